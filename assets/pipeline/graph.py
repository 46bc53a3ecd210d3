"""The graph of a recipe: what each asset is made from, and which fields of the recipe it reads itself.

This table is the one place that knows the shape of a pipeline. The Dagster assets are declared from it, keys of
derivations are computed from it, and `pedigree status` walks it. Order is topological.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from training.contract.config.data_source import settings_of_sources
from training.contract.config.fields import ConfigSection
from training.contract.config.recipe import Recipe
from training.contract.identity.fingerprint import fingerprint, short
from training.contract.identity.software import SOFTWARE, scoring_software, token_software
from training.contract.store.logprob_cache import SCORING_VERSION
from training.contract.store.manifest import Derivation, Source

Settings = dict[str, Any]

GPU_POOL = "gpu"  # of which one step runs at a time, unless dagster.yaml says otherwise


def _data(recipe: Recipe) -> Settings:
    data = recipe.data
    return settings_of_sources(data.sources) | data.model_dump(include={"validation_fraction", "duplicates"})


def _dumped(section: ConfigSection, *later: str, exclude: Collection[str] = ()) -> Settings:
    """A section, without the fields in `later` that have their defaults: while they ask for nothing, a key stays as it was."""
    fields = type(section).model_fields
    unused = {name for name in later if getattr(section, name) == fields[name].get_default()}
    return section.model_dump(mode="json", exclude={*unused, *exclude})


def _tokenization(recipe: Recipe) -> Settings:
    """Without what its files say themselves."""
    settings = _dumped(recipe.tokenization, "date", exclude=("tokenizer", "revision", "chat_template"))
    return settings | {SOFTWARE: token_software()}


def _tuning(recipe: Recipe) -> Settings:
    return {} if recipe.reference.sft is None else _dumped(recipe.reference.sft, "precision", "router_aux_loss_coef")


def _training(recipe: Recipe) -> Settings:
    """Without `epochs` where `max_steps` decides."""
    training = recipe.training
    unused = () if training.max_steps is None else ("epochs",)
    settings = _dumped(training, "head_precision", "router_aux_loss_coef", exclude=unused)
    return settings | {"loss": training.loss.settings()}


def _scoring(recipe: Recipe) -> Settings:
    """With the version of the scoring algorithm: another one gives other log-probs."""
    software = scoring_software(recipe.compute.device)
    return {"dtype": recipe.reference.dtype, "scoring": SCORING_VERSION, SOFTWARE: software}


def _evaluation(recipe: Recipe) -> Settings:
    """With what decides where the samples end."""
    loss = {"loss": recipe.training.loss.settings()}
    return recipe.evaluation.model_dump(mode="json") | loss | _answering(recipe)


def _answering(recipe: Recipe) -> Settings:
    """How the released model answers, without what is at its default."""
    return _dumped(recipe.release, "eos_tokens", "generation", exclude=("model_name", "gate"))


def _shipping(recipe: Recipe) -> Settings:
    """What decides how the released tokenizer writes, and where the released model stops."""
    rendering = {name: value for name, value in _tokenization(recipe).items() if name in ("template_kwargs", "date")}
    return rendering | _answering(recipe)


def _release(recipe: Recipe) -> Settings:
    return _dumped(recipe.release, exclude=("eos_tokens", "generation")) | {
        "gate": _dumped(recipe.release.gate, "min_accuracy_of")
    }


@dataclass(frozen=True)
class Node:
    """An asset: `needs` are its direct dependencies, `reads` gives the fields of the recipe that it reads itself.

    `spec` is the one among its dependencies that holds its settings; such an asset reads no fields itself. `may_need` gives
    further dependencies in some recipes. `version` is that of the asset's algorithm: raise it when the same inputs shall
    give another result.
    """

    group: str
    kinds: tuple[str, ...]
    description: str
    needs: tuple[str, ...] = ()
    may_need: Callable[[Recipe], tuple[str, ...]] = lambda recipe: ()
    reads: Callable[[Recipe], Settings] = lambda recipe: {}
    spec: str | None = None
    pool: str | None = None
    version: str = "1"

    def code_version(self, recipe: Recipe) -> str:
        """What Dagster compares to see that the code or the recipe's fields behind an asset changed."""
        return f"{self.version}-{short(fingerprint('settings', self.reads(recipe)))}"

    def inputs(self, recipe: Recipe) -> tuple[str, ...]:
        """The direct dependencies in this recipe."""
        return (*self.needs, *self.may_need(recipe))


GRAPH: dict[str, Node] = {
    "preference_source": Node(
        "sources",
        ("json",),
        "Preference files or a hub data set, as they are now. The data version is the fingerprint of their contents.",
        version="2",
    ),
    "base_model": Node(
        "sources",
        ("huggingface",),
        "The model the recipe starts from. The data version is the fingerprint of its weights and configuration.",
    ),
    "tokenization_spec": Node(
        "specs",
        ("json",),
        "How text becomes tokens: tokenizer, chat template and rules, frozen.",
        reads=_tokenization,
    ),
    "training_spec": Node("specs", ("json",), "Every field that changes the trained policy, frozen.", reads=_training),
    "evaluation_spec": Node(
        "specs",
        ("json",),
        "Every field that changes the evaluation, frozen.",
        reads=_evaluation,
    ),
    "release_spec": Node(
        "specs",
        ("json", "huggingface"),
        "What is released beside the weights, frozen: tokenizer, chat template, generation settings, processors. An edit of "
        "these makes a new version and trains nothing.",
        reads=_shipping,
    ),
    "raw_preferences": Node(
        "data",
        ("parquet",),
        "Preference pairs in one schema, each in its split; rows that are none, with reasons, in quarantine.",
        needs=("preference_source",),
        reads=_data,
        version="9",
    ),
    "tokenized_pairs": Node(
        "data",
        ("huggingface", "arrow"),
        "Token ids and response masks of every pair, memory-mapped.",
        needs=("raw_preferences", "tokenization_spec"),
        reads=lambda recipe: {SOFTWARE: token_software()},
        version="2",
    ),
    "reference_model": Node(
        "reference",
        ("pytorch",),
        "The frozen model the policy is measured against: the base model, or the base model after supervised tuning.",
        needs=("base_model",),
        may_need=lambda recipe: ("tokenized_pairs",) if recipe.reference.sft else (),
        reads=_tuning,
        pool=GPU_POOL,
    ),
    "reference_logprobs": Node(
        "reference",
        ("pytorch", "safetensors"),
        "Log-probs of every response under the reference model; each distinct sequence is scored once, ever.",
        needs=("tokenized_pairs", "reference_model"),
        reads=_scoring,
        pool=GPU_POOL,
    ),
    "policy": Node(
        "training",
        ("pytorch", "mlflow"),
        "The model trained with Direct Preference Optimization. A reward is beta times the log-prob over the reference's; "
        "`loss` and `rewards/...` are of the last step, `eval/...` of the held-out pairs after it; memory in MB.",
        needs=("tokenized_pairs", "reference_logprobs", "reference_model", "training_spec"),
        spec="training_spec",
        pool=GPU_POOL,
    ),
    "evaluation": Node(
        "evaluation",
        ("pytorch", "mlflow"),
        "Held-out loss, rewards and accuracy, a table of the pairs, and answers before and after.",
        needs=("policy", "reference_logprobs", "reference_model", "tokenized_pairs", "evaluation_spec"),
        may_need=lambda recipe: ("raw_preferences",) if recipe.data.has_named_sources else (),
        spec="evaluation_spec",
        pool=GPU_POOL,
        version="5",
    ),
    "released_model": Node(
        "release",
        ("mlflow",),
        "A version in the MLflow registry, and the gate's decision whether it is champion: only a candidate that is better on "
        "the held-out pairs by more than one standard error replaces it, so that the pairs can be used again.",
        needs=("policy", "evaluation", "tokenization_spec", "release_spec"),
        reads=_release,
    ),
}


def with_upstream(recipe: Recipe, asset: str) -> list[str]:
    """`asset` and what it is made of, directly or not; in the graph's order."""
    needed = {asset}
    for name in reversed(GRAPH):
        if name in needed:
            needed.update(GRAPH[name].inputs(recipe))
    return [name for name in GRAPH if name in needed]


def derive(asset: str, inputs: dict[str, str], settings: Settings) -> Derivation:
    """How `asset` is made from `inputs` (fingerprints by asset name) and `settings`; or another kind of artifact."""
    version = GRAPH[asset].version if asset in GRAPH else "1"
    sources = {name: Source(kind=name, fingerprint=found) for name, found in inputs.items()}
    return Derivation(kind=asset, code_version=version, inputs=sources, settings=settings)

"""The graph of a recipe: the inputs of each asset, and the fields of the recipe it reads itself.

This table alone defines the shape of a pipeline. Dagster's assets are declared from it, keys of derivations are computed
from it, and `pedigree status` walks it. The order is topological.
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

STAGE_TAG = "pedigree/stage"
GPU_POOL = "gpu"  # one step at a time, unless dagster.yaml sets another limit


def _data_settings(recipe: Recipe) -> Settings:
    data = recipe.data
    return settings_of_sources(data.sources) | data.model_dump(include={"validation_fraction", "duplicates"})


def _dump_section(section: ConfigSection, *later: str, exclude: Collection[str] = ()) -> Settings:
    """Return a section's fields. Leave out fields in `later` with default values, so that adding a field keeps old keys."""
    fields = type(section).model_fields
    unused = {name for name in later if getattr(section, name) == fields[name].get_default()}
    return section.model_dump(mode="json", exclude={*unused, *exclude})


def _tokenization_settings(recipe: Recipe) -> Settings:
    """Leave out the fields that name files: hashes of the files identify them."""
    settings = _dump_section(recipe.tokenization, "date", exclude=("tokenizer", "revision", "chat_template"))
    return settings | {SOFTWARE: token_software()}


def _sft_settings(recipe: Recipe) -> Settings:
    return (
        {} if recipe.reference.sft is None else _dump_section(recipe.reference.sft, "precision", "router_aux_loss_coef")
    )


def _training_settings(recipe: Recipe) -> Settings:
    """Leave out `epochs` if `max_steps` is set."""
    training = recipe.training
    unused = () if training.max_steps is None else ("epochs",)
    settings = _dump_section(training, "head_precision", "router_aux_loss_coef", exclude=unused)
    return settings | {"loss": training.loss.settings()}


def _scoring_settings(recipe: Recipe) -> Settings:
    """Include the version of the scoring algorithm, because log-probs depend on it."""
    software = scoring_software(recipe.compute.device)
    return {"dtype": recipe.reference.dtype, "scoring": SCORING_VERSION, SOFTWARE: software}


def _evaluation_settings(recipe: Recipe) -> Settings:
    """Include the settings of the samples' length and end."""
    loss = {"loss": recipe.training.loss.settings()}
    return recipe.evaluation.model_dump(mode="json") | loss | _generation_settings(recipe)


def _generation_settings(recipe: Recipe) -> Settings:
    """Return how the released model generates, without fields at their defaults."""
    return _dump_section(recipe.release, "eos_tokens", "generation", exclude=("model_name", "gate"))


def _release_spec_settings(recipe: Recipe) -> Settings:
    """Return the settings of the released tokenizer's rendering and of the released model's end of generation."""
    rendering = {
        name: value for name, value in _tokenization_settings(recipe).items() if name in ("template_kwargs", "date")
    }
    return rendering | _generation_settings(recipe)


def _released_model_settings(recipe: Recipe) -> Settings:
    return _dump_section(recipe.release, exclude=("eos_tokens", "generation")) | {
        "gate": _dump_section(recipe.release.gate, "min_accuracy_of")
    }


@dataclass(frozen=True)
class Node:
    """An asset.

    `stage`: the part of the work, a tag in Dagster. `needs`: its direct dependencies. `may_need`: further dependencies in some
    recipes. `reads`: the fields of the recipe it reads itself. `spec`: the dependency with its settings; such an asset reads no
    fields. `version`: the version of its algorithm; raise it when the same inputs shall give another result.
    """

    stage: str
    kinds: tuple[str, ...]
    description: str
    needs: tuple[str, ...] = ()
    may_need: Callable[[Recipe], tuple[str, ...]] = lambda recipe: ()
    reads: Callable[[Recipe], Settings] = lambda recipe: {}
    spec: str | None = None
    pool: str | None = None
    version: str = "1"

    def code_version(self, recipe: Recipe) -> str:
        """Return the version by which Dagster detects a change of the asset's algorithm or of its fields in the recipe."""
        return f"{self.version}-{short(fingerprint('settings', self.reads(recipe)))}"

    def inputs(self, recipe: Recipe) -> tuple[str, ...]:
        """Return the direct dependencies in this recipe."""
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
        reads=_tokenization_settings,
    ),
    "training_spec": Node(
        "specs", ("json",), "Every field that changes the trained policy, frozen.", reads=_training_settings
    ),
    "evaluation_spec": Node(
        "specs",
        ("json",),
        "Every field that changes the evaluation, frozen.",
        reads=_evaluation_settings,
    ),
    "release_spec": Node(
        "specs",
        ("json", "huggingface"),
        "The files released beside the weights, frozen: tokenizer, chat template, generation settings, processors. An edit of "
        "these makes a new version without training.",
        reads=_release_spec_settings,
    ),
    "raw_preferences": Node(
        "data",
        ("parquet",),
        "Preference pairs in one schema, each in its split. Other rows are in quarantine, with reasons.",
        needs=("preference_source",),
        reads=_data_settings,
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
        "The frozen model the policy is compared with: the base model, or the base model after supervised tuning.",
        needs=("base_model",),
        may_need=lambda recipe: ("tokenized_pairs",) if recipe.reference.sft else (),
        reads=_sft_settings,
        pool=GPU_POOL,
    ),
    "reference_logprobs": Node(
        "reference",
        ("pytorch", "safetensors"),
        "Log-probs of every response under the reference model; each distinct sequence is scored once, ever.",
        needs=("tokenized_pairs", "reference_model"),
        reads=_scoring_settings,
        pool=GPU_POOL,
    ),
    "policy": Node(
        "training",
        ("pytorch", "mlflow"),
        "The model trained with Direct Preference Optimization. `eval/...` belongs to all held-out pairs, other figures to the "
        "last batch.",
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
        "A version in the MLflow registry, and the gate's decision whether it becomes champion: a candidate must be better on "
        "the held-out pairs by more than one standard error, so that the pairs can be used again.",
        needs=("policy", "evaluation", "tokenization_spec", "release_spec"),
        reads=_released_model_settings,
    ),
}


def with_upstream(recipe: Recipe, asset: str) -> list[str]:
    """Return `asset` and all assets it is made from, directly or indirectly, in the graph's order."""
    needed = {asset}
    for name in reversed(GRAPH):
        if name in needed:
            needed.update(GRAPH[name].inputs(recipe))
    return [name for name in GRAPH if name in needed]


def derive(asset: str, inputs: dict[str, str], settings: Settings) -> Derivation:
    """Return the derivation of `asset`, or of another kind of artifact. `inputs`: fingerprints by asset name."""
    version = GRAPH[asset].version if asset in GRAPH else "1"
    sources = {name: Source(kind=name, fingerprint=digest) for name, digest in inputs.items()}
    return Derivation(kind=asset, code_version=version, inputs=sources, settings=settings)

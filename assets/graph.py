"""The graph of a recipe: what each asset is made from, where it stands, and which fields of the recipe it reads itself.

This table is the one place that knows the shape of a pipeline. The Dagster assets are declared from it, keys of
derivations are computed from it, and `pedigree status` walks it. Order is topological.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from training.contract.fingerprint import fingerprint, short
from training.contract.manifest import Derivation, Source
from training.contract.recipe import Recipe
from training.contract.scoring import SCORING_VERSION

Settings = dict[str, Any]

GPU_POOL = "gpu"  # of which one step runs at a time, unless dagster.yaml says otherwise


def _nothing(recipe: Recipe) -> Settings:
    return {}


def _data(recipe: Recipe) -> Settings:
    return {
        "formats": [source.format for source in recipe.data.sources],
        "validation_fraction": recipe.data.validation_fraction,
    }


def _tokenization(recipe: Recipe) -> Settings:
    return recipe.tokenization.model_dump(mode="json", exclude={"tokenizer", "revision", "chat_template"})


def _training(recipe: Recipe) -> Settings:
    """Epochs change nothing where `max_steps` says when to stop; what came later is left out where it is not used."""
    unused = {
        "epochs": recipe.training.max_steps is not None,
        "head_precision": recipe.training.head_precision == "exact",
    }
    without = {name for name, is_unused in unused.items() if is_unused}
    return recipe.training.model_dump(mode="json", exclude=without) | {"loss": recipe.training.loss.settings()}


def _evaluation(recipe: Recipe) -> Settings:
    return {**recipe.evaluation.model_dump(mode="json"), "loss": recipe.training.loss.settings()}


def _supervised(recipe: Recipe) -> Settings:
    return recipe.reference.sft.model_dump(mode="json") if recipe.reference.sft else {}


def _scoring(recipe: Recipe) -> Settings:
    """The scoring's version too: log-probs of another one are others, though the recipe says nothing of it."""
    return {"dtype": recipe.reference.dtype, "scoring": SCORING_VERSION}


def _release(recipe: Recipe) -> Settings:
    return recipe.release.model_dump(mode="json")


@dataclass(frozen=True)
class Node:
    """`version` is the version of the asset's algorithm: raise it when the same inputs shall give another result."""

    group: str
    kinds: frozenset[str]
    description: str
    needs: tuple[str, ...] = ()
    reads: Callable[[Recipe], Settings] = _nothing
    pool: str | None = None
    version: str = "1"

    def code_version(self, recipe: Recipe) -> str:
        """What Dagster compares to see that the code or the recipe's fields behind an asset changed."""
        return f"{self.version}-{short(fingerprint('settings', self.reads(recipe)))}"

    def needed_by(self, recipe: Recipe) -> tuple[str, ...]:
        """The direct dependencies in this recipe: supervised tuning of the reference is what brings in the pairs."""
        if self.group == "reference" and "base_model" in self.needs and recipe.reference.sft is None:
            return ("base_model",)
        return self.needs


GRAPH: dict[str, Node] = {
    "preference_source": Node(
        "sources",
        frozenset({"json"}),
        "Preference files or a hub data set, as they are now. The data version is the fingerprint of their contents.",
    ),
    "base_model": Node(
        "sources",
        frozenset({"huggingface"}),
        "The model the recipe starts from. The data version is the fingerprint of its weights and configuration.",
    ),
    "tokenization_spec": Node(
        "specs",
        frozenset({"json"}),
        "How text becomes tokens: tokenizer, chat template and rules, frozen.",
        reads=_tokenization,
    ),
    "training_spec": Node(
        "specs", frozenset({"json"}), "Every field that changes the trained policy, frozen.", reads=_training
    ),
    "evaluation_spec": Node(
        "specs", frozenset({"json"}), "Every field that changes the evaluation, frozen.", reads=_evaluation
    ),
    "raw_preferences": Node(
        "data",
        frozenset({"parquet"}),
        "Preference pairs in one schema, each in its split; rows that are none, with reasons, in quarantine.",
        needs=("preference_source",),
        reads=_data,
    ),
    "tokenized_pairs": Node(
        "data",
        frozenset({"huggingface", "arrow"}),
        "Token ids and response masks of every pair, memory-mapped.",
        needs=("raw_preferences", "tokenization_spec"),
    ),
    "reference_model": Node(
        "reference",
        frozenset({"pytorch"}),
        "The frozen model the policy is measured against: the base model, or the base model after supervised tuning.",
        needs=("base_model", "tokenized_pairs"),
        reads=_supervised,
        pool=GPU_POOL,
    ),
    "reference_logprobs": Node(
        "reference",
        frozenset({"pytorch", "safetensors"}),
        "Log-probs of every response under the reference model; each distinct sequence is scored once, ever.",
        needs=("tokenized_pairs", "reference_model"),
        reads=_scoring,
        pool=GPU_POOL,
    ),
    "policy": Node(
        "training",
        frozenset({"pytorch", "mlflow"}),
        "The model trained with Direct Preference Optimization. A reward is beta times the log-prob over the reference's; "
        "`loss` and `rewards/...` are of the last step, `eval/...` of the held-out pairs after it; memory in MB.",
        needs=("tokenized_pairs", "reference_logprobs", "reference_model", "training_spec"),
        pool=GPU_POOL,
    ),
    "evaluation": Node(
        "evaluation",
        frozenset({"pytorch", "mlflow"}),
        "Held-out loss, rewards and accuracy, a table of the pairs, and answers before and after.",
        needs=("policy", "reference_logprobs", "reference_model", "tokenized_pairs", "evaluation_spec"),
        pool=GPU_POOL,
        version="3",
    ),
    "released_model": Node(
        "release",
        frozenset({"mlflow"}),
        "A version in the MLflow registry, and the gate's decision whether it is champion. Losses are those of the held-out "
        "pairs, rounded to 1 / pairs: the Ladder tells no more, so that the pairs can be used again.",
        needs=("policy", "evaluation", "tokenization_spec"),
        reads=_release,
    ),
}


def derivation(asset: str, inputs: dict[str, str], settings: Settings) -> Derivation:
    """How `asset` is made from `inputs` (fingerprints by asset name) and `settings`; its key says if that was done."""
    sources = {name: Source(kind=name, fingerprint=found) for name, found in inputs.items()}
    return Derivation(kind=asset, code_version=GRAPH[asset].version, inputs=sources, settings=settings)

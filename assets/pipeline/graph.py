"""The graph of a recipe: the inputs of each asset, and the fields of the recipe it reads itself.

This table alone defines the shape of a pipeline. Dagster's assets are declared from it, keys of derivations are computed
from it, and `pedigree status` walks it. The order is topological.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from training.contract.config.key_settings import Settings, key_settings
from training.contract.config.recipe import Recipe
from training.contract.identity.fingerprint import fingerprint, short
from training.contract.protocol.artifacts import AssetName
from training.contract.protocol.prequential import ArrivalSettings
from training.contract.protocol.settings import (
    EvaluationRules,
    NoSettings,
    PairsSettings,
    PreferencesSettings,
    ReleasedModelSettings,
    ReleaseRules,
    ScoringSettings,
    TokenizationRules,
    TrainingSettings,
    reference_settings,
)
from training.contract.store.manifest import Derivation, Source

Fingerprints = Mapping[str, str] | Mapping[AssetName, str]

STAGE_TAG = "pedigree/stage"
GPU_POOL = "gpu"  # one step at a time, unless dagster.yaml sets another limit


@dataclass(frozen=True)
class Node:
    """An asset.

    `stage`: the part of the work, a tag in Dagster. `needs`: its direct dependencies. `may_need`: further dependencies in some
    recipes. `after`: assets that a run makes before it; it is not made from them, so they are not in its key. `reads`: the
    fields of the recipe it reads itself. `spec`: the dependency with its settings; such an asset reads no fields. `version`:
    the version of its algorithm; raise it when the same inputs shall give another result.
    """

    stage: str
    kinds: tuple[str, ...]
    description: str
    needs: tuple[str, ...] = ()
    may_need: Callable[[Recipe], tuple[AssetName, ...]] = lambda recipe: ()
    after: tuple[str, ...] = ()
    reads: Callable[[Recipe], Settings] = lambda recipe: NoSettings()
    spec: AssetName | None = None
    pool: str | None = None
    version: str = "1"

    def __post_init__(self) -> None:
        """Keep plain text: Dagster and Click treat members of an enum in their own ways."""
        object.__setattr__(self, "needs", tuple(map(str, self.needs)))
        object.__setattr__(self, "after", tuple(map(str, self.after)))

    def code_version(self, recipe: Recipe) -> str:
        """Return the version by which Dagster detects a change of the asset's algorithm or of its fields in the recipe."""
        return f"{self.version}-{short(fingerprint('settings', key_settings(self.reads(recipe))))}"

    def inputs(self, recipe: Recipe) -> tuple[str, ...]:
        """Return the names of the direct dependencies in this recipe."""
        return (*self.needs, *map(str, self.may_need(recipe)))

    def upstream(self, recipe: Recipe) -> tuple[str, ...]:
        """Return the names of all assets that a run makes before it, as Dagster's graph shows them."""
        return (*self.inputs(recipe), *self.after)


_NODES: dict[AssetName, Node] = {
    AssetName.PREFERENCE_SOURCE: Node(
        "sources",
        ("json",),
        "Preference files or a hub data set, as they are now. The data version is the fingerprint of their contents.",
        version="2",
    ),
    AssetName.BASE_MODEL: Node(
        "sources",
        ("huggingface",),
        "The model the recipe starts from. The data version is the fingerprint of its weights and configuration.",
    ),
    AssetName.TOKENIZATION_SPEC: Node(
        "specs",
        ("json",),
        "How text becomes tokens: tokenizer, chat template and rules, frozen.",
        reads=TokenizationRules.of,
    ),
    AssetName.TRAINING_SPEC: Node(
        "specs", ("json",), "Every field that changes the trained policy, frozen.", reads=TrainingSettings.of
    ),
    AssetName.EVALUATION_SPEC: Node(
        "specs",
        ("json",),
        "Every field that changes the evaluation, frozen.",
        reads=EvaluationRules.of,
    ),
    AssetName.RELEASE_SPEC: Node(
        "specs",
        ("json", "huggingface"),
        "The files released beside the weights, frozen: tokenizer, chat template, generation settings, processors. An edit of "
        "these makes a new version without training.",
        reads=ReleaseRules.of,
    ),
    AssetName.RAW_PREFERENCES: Node(
        "data",
        ("parquet",),
        "Preference pairs in one schema, each in its split. Other rows are in quarantine, with reasons.",
        needs=(AssetName.PREFERENCE_SOURCE,),
        reads=PreferencesSettings.of,
        version="9",
    ),
    AssetName.TOKENIZED_PAIRS: Node(
        "data",
        ("huggingface", "arrow"),
        "Token ids and response masks of every pair, memory-mapped.",
        needs=(AssetName.RAW_PREFERENCES, AssetName.TOKENIZATION_SPEC),
        reads=PairsSettings.of,
        version="2",
    ),
    AssetName.REFERENCE_MODEL: Node(
        "reference",
        ("pytorch",),
        "The frozen model the policy is compared with: the base model, or the base model after supervised tuning.",
        needs=(AssetName.BASE_MODEL,),
        may_need=lambda recipe: (AssetName.TOKENIZED_PAIRS,) if recipe.reference.sft else (),
        reads=reference_settings,
        pool=GPU_POOL,
    ),
    AssetName.REFERENCE_LOGPROBS: Node(
        "reference",
        ("pytorch", "safetensors"),
        "Log-probs of every response under the reference model; each distinct sequence is scored once, ever.",
        needs=(AssetName.TOKENIZED_PAIRS, AssetName.REFERENCE_MODEL),
        reads=ScoringSettings.of,
        pool=GPU_POOL,
    ),
    AssetName.PREQUENTIAL_SCORES: Node(
        "evaluation",
        ("pytorch", "parquet"),
        "Test, then train: the champion and the waiting candidates score the pairs that arrived since their training.",
        needs=(AssetName.RAW_PREFERENCES,),
        after=(AssetName.TOKENIZED_PAIRS, AssetName.REFERENCE_LOGPROBS),
        reads=ArrivalSettings.of,
        pool=GPU_POOL,
    ),
    AssetName.POLICY: Node(
        "training",
        ("pytorch", "mlflow"),
        "The model trained with Direct Preference Optimization. `eval/...` belongs to all held-out pairs, other figures to the "
        "last batch.",
        needs=(
            AssetName.TOKENIZED_PAIRS,
            AssetName.REFERENCE_LOGPROBS,
            AssetName.REFERENCE_MODEL,
            AssetName.TRAINING_SPEC,
        ),
        after=(AssetName.PREQUENTIAL_SCORES,),
        spec=AssetName.TRAINING_SPEC,
        pool=GPU_POOL,
    ),
    AssetName.EVALUATION: Node(
        "evaluation",
        ("pytorch", "mlflow"),
        "Held-out loss, rewards and accuracy, a table of the pairs, and answers before and after.",
        needs=(
            AssetName.POLICY,
            AssetName.REFERENCE_LOGPROBS,
            AssetName.REFERENCE_MODEL,
            AssetName.TOKENIZED_PAIRS,
            AssetName.EVALUATION_SPEC,
        ),
        may_need=lambda recipe: (AssetName.RAW_PREFERENCES,) if recipe.data.has_named_sources else (),
        spec=AssetName.EVALUATION_SPEC,
        pool=GPU_POOL,
        version="5",
    ),
    AssetName.RELEASED_MODEL: Node(
        "release",
        ("mlflow",),
        "A version in the MLflow registry, and the gate's decision: a candidate becomes champion when the evidence that it is "
        "better, on held-out and on arriving pairs, reaches its level.",
        needs=(AssetName.POLICY, AssetName.EVALUATION, AssetName.TOKENIZATION_SPEC, AssetName.RELEASE_SPEC),
        after=(AssetName.PREQUENTIAL_SCORES,),
        reads=ReleasedModelSettings.of,
    ),
}
GRAPH: dict[str, Node] = {name.value: node for name, node in _NODES.items()}


def with_upstream(recipe: Recipe, asset: str) -> list[str]:
    """Return `asset` and all assets that a run makes before it, directly or indirectly, in the graph's order."""
    needed = {asset}
    for name in reversed(GRAPH):
        if name in needed:
            needed.update(GRAPH[name].upstream(recipe))
    return [name for name in GRAPH if name in needed]


def derive(asset: str, inputs: Fingerprints, *settings: Settings) -> Derivation:
    """Return the derivation of `asset`, or of another kind of artifact, with the fields of all `settings`.

    `inputs`: fingerprints by asset name, or by `input_name`.
    """
    version = GRAPH[asset].version if asset in GRAPH else "1"
    sources = {str(name): Source(kind=kind_of(name), fingerprint=digest) for name, digest in inputs.items()}
    fields = {name: value for part in settings for name, value in key_settings(part).items()}
    return Derivation(kind=str(asset), code_version=version, inputs=sources, settings=fields)


def read_settings(asset: str, recipe: Recipe, name: str) -> Settings:
    """Return the fields that `asset` reads in the recipe `name`."""
    settings = GRAPH[asset].reads(recipe)
    return settings.model_copy(update={"recipe": name}) if isinstance(settings, ArrivalSettings) else settings


def input_name(kind: str, fingerprint: str) -> str:
    """Return a name for one of several inputs of the same kind."""
    return f"{kind}:{short(fingerprint)}"


def kind_of(name: str) -> str:
    """Return the kind of the input `name`."""
    return str(name).partition(":")[0]

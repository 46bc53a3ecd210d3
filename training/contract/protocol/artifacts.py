"""The names of the assets, and the kinds of artifacts in the store with their details."""

from enum import StrEnum

from training.contract.protocol.details import (
    EvaluationDetails,
    LogProbsDetails,
    ModelDetails,
    PairsDetails,
    PolicyDetails,
    PrequentialDetails,
    ReferenceModelDetails,
    ReleaseFilesDetails,
    RescoredDetails,
    RowsDetails,
    SourceDetails,
    TokenizationDetails,
)
from training.contract.store.artifact_kind import ArtifactKind, Details


class AssetName(StrEnum):
    """The assets of a recipe, in the order of the graph. A name is also the kind of the asset's artifacts."""

    PREFERENCE_SOURCE = "preference_source"
    BASE_MODEL = "base_model"
    TOKENIZATION_SPEC = "tokenization_spec"
    TRAINING_SPEC = "training_spec"
    EVALUATION_SPEC = "evaluation_spec"
    RELEASE_SPEC = "release_spec"
    RAW_PREFERENCES = "raw_preferences"
    TOKENIZED_PAIRS = "tokenized_pairs"
    REFERENCE_MODEL = "reference_model"
    REFERENCE_LOGPROBS = "reference_logprobs"
    PREQUENTIAL_SCORES = "prequential_scores"
    POLICY = "policy"
    EVALUATION = "evaluation"
    RELEASED_MODEL = "released_model"


CHAMPION = "champion"  # the input of a training that starts from a released version

PREFERENCE_SOURCE = ArtifactKind(AssetName.PREFERENCE_SOURCE.value, SourceDetails)
BASE_MODEL = ArtifactKind(AssetName.BASE_MODEL.value, ModelDetails)
TOKENIZATION_SPEC = ArtifactKind(AssetName.TOKENIZATION_SPEC.value, TokenizationDetails)
TRAINING_SPEC = ArtifactKind(AssetName.TRAINING_SPEC.value, Details)
EVALUATION_SPEC = ArtifactKind(AssetName.EVALUATION_SPEC.value, Details)
RELEASE_SPEC = ArtifactKind(AssetName.RELEASE_SPEC.value, ReleaseFilesDetails)
RAW_PREFERENCES = ArtifactKind(AssetName.RAW_PREFERENCES.value, RowsDetails)
TOKENIZED_PAIRS = ArtifactKind(AssetName.TOKENIZED_PAIRS.value, PairsDetails)
REFERENCE_MODEL = ArtifactKind(AssetName.REFERENCE_MODEL.value, ReferenceModelDetails)
REFERENCE_LOGPROBS = ArtifactKind(AssetName.REFERENCE_LOGPROBS.value, LogProbsDetails)
PREQUENTIAL_SCORES = ArtifactKind(AssetName.PREQUENTIAL_SCORES.value, PrequentialDetails)
POLICY = ArtifactKind(AssetName.POLICY.value, PolicyDetails)
EVALUATION = ArtifactKind(AssetName.EVALUATION.value, EvaluationDetails)
MERGED_POLICY = ArtifactKind("merged_policy", Details)  # an adapter merged into its base, for a release
RESCORED = ArtifactKind("proof", RescoredDetails)  # pairs scored again, for `verify` and `inspect`

KINDS: dict[str, ArtifactKind] = {
    kind.name: kind
    for kind in (
        *(PREFERENCE_SOURCE, BASE_MODEL, TOKENIZATION_SPEC, TRAINING_SPEC, EVALUATION_SPEC, RELEASE_SPEC),
        *(RAW_PREFERENCES, TOKENIZED_PAIRS, REFERENCE_MODEL, REFERENCE_LOGPROBS, PREQUENTIAL_SCORES),
        *(POLICY, EVALUATION),
        *(MERGED_POLICY, RESCORED),
    )
}

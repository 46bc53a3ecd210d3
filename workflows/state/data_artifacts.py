"""The artifacts of a run that take seconds and no GPU: sources, specs, rows and tokens. Dagster does not learn of them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import dagster as dg

from assets.bodies.data import check_splits, pairs_checks, pairs_work, preferences_work, rows_checks
from assets.bodies.embedding_check import check_embeddings
from assets.bodies.reference import reference_pointer
from assets.bodies.specs import release_work, tokenizer_work
from assets.execution.materialize import JobSpec, make, publish_resolved
from assets.inputs.current import find_data, find_model, find_release, find_tokenizer, resolve_root
from assets.pipeline.graph import GRAPH
from assets.pipeline.pipeline import Pipeline, Services
from training.contract.errors import DataError
from training.contract.identity.model_identity import count_parameters
from training.contract.protocol.artifacts import (
    BASE_MODEL,
    EVALUATION_SPEC,
    PREFERENCE_SOURCE,
    RAW_PREFERENCES,
    RELEASE_SPEC,
    TOKENIZATION_SPEC,
    TOKENIZED_PAIRS,
    TRAINING_SPEC,
)
from training.contract.protocol.details import (
    PairsDetails,
    ReleaseFilesDetails,
    RowsDetails,
    SourceDetails,
    TokenizationDetails,
)
from training.contract.store.artifact import Artifact
from training.contract.store.artifact_kind import ArtifactKind, DetailsT

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataArtifacts:
    """The artifacts by their assets, without the prefix, and the number of the base model's `parameters`."""

    source: Artifact[SourceDetails]
    spec: Artifact[TokenizationDetails]
    release: Artifact[ReleaseFilesDetails]
    rows: Artifact[RowsDetails]
    pairs: Artifact[PairsDetails]
    parameters: int


def make_data(pipeline: Pipeline, services: Services) -> DataArtifacts:
    """Make the artifacts that are missing, by the code of a run. Raises its errors, and DataError for a failed check."""

    def made(kind: ArtifactKind[DetailsT], work: JobSpec, *inputs: Artifact) -> Artifact[DetailsT]:
        fingerprints = {artifact.manifest.kind: artifact.fingerprint for artifact in inputs}
        return make(pipeline, services, kind, work, fingerprints, _LOG).artifact

    data, model, tokenizer = find_data(pipeline), find_model(pipeline, services), find_tokenizer(pipeline, services)
    source = publish_resolved(services, PREFERENCE_SOURCE, data, _LOG).artifact
    base_model = publish_resolved(services, BASE_MODEL, model, _LOG).artifact
    for kind in (TRAINING_SPEC, EVALUATION_SPEC):
        publish_resolved(services, kind, resolve_root(pipeline, services, kind.name), _LOG)
    spec = made(TOKENIZATION_SPEC, tokenizer_work(pipeline, tokenizer))
    release = made(RELEASE_SPEC, release_work(pipeline, find_release(pipeline, services)))
    check_embeddings(pipeline, services, spec)
    rows = made(RAW_PREFERENCES, preferences_work(pipeline, data), source)
    _check_passed(rows_checks(pipeline, rows))
    pairs = made(TOKENIZED_PAIRS, pairs_work(pipeline), rows, spec)
    check_splits(pipeline, pairs, GRAPH)
    check_embeddings(pipeline, services, spec, pairs)
    _check_passed(pairs_checks(pipeline, pairs))
    if pipeline.recipe.reference.sft is None:
        reference_pointer(services, base_model.fingerprint, _LOG)
    assert model.located is not None  # it is downloaded by now
    return DataArtifacts(source, spec, release, rows, pairs, count_parameters(model.located.folder))


def _check_passed(results: Sequence[dg.AssetCheckResult]) -> None:
    """Raise DataError with the message of the run that would end here."""
    for check in results:
        if not check.passed:
            raise DataError(
                f"a run would end here: the check {check.check_name} failed: {check.description}", "check-failed"
            )

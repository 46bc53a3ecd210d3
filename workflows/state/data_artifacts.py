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
from training.contract.store.store import Artifact

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataArtifacts:
    """The artifacts by their assets, without the prefix, and the number of the base model's `parameters`."""

    source: Artifact
    spec: Artifact
    release: Artifact
    rows: Artifact
    pairs: Artifact
    parameters: int


def make_data(pipeline: Pipeline, services: Services) -> DataArtifacts:
    """Make the artifacts that are missing, by the code of a run. Raises its errors, and DataError for a failed check."""

    def made(asset: str, work: JobSpec, **inputs: Artifact) -> Artifact:
        fingerprints = {name: artifact.fingerprint for name, artifact in inputs.items()}
        return make(pipeline, services, asset, work, fingerprints, _LOG).artifact

    data, model, tokenizer = find_data(pipeline), find_model(pipeline, services), find_tokenizer(pipeline, services)
    source, base_model = (publish_resolved(services, found, _LOG).artifact for found in (data, model))
    for asset in ("training_spec", "evaluation_spec"):
        publish_resolved(services, resolve_root(pipeline, services, asset), _LOG)
    spec = made("tokenization_spec", tokenizer_work(pipeline, tokenizer))
    release = made("release_spec", release_work(pipeline, find_release(pipeline, services)))
    check_embeddings(pipeline, services, spec)
    rows = made("raw_preferences", preferences_work(pipeline, data), preference_source=source)
    _check_passed(rows_checks(pipeline, rows))
    pairs = made("tokenized_pairs", pairs_work(pipeline), raw_preferences=rows, tokenization_spec=spec)
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

"""Body of the evaluation: metrics on held-out pairs, a table of the pairs, a report, and sampled answers."""

from collections.abc import Sequence

import dagster as dg
import pyarrow.parquet as pq

from assets.bodies import checks
from assets.bodies.policy import delivered_run
from assets.bodies.policy_difference import difference
from assets.comparison.leakage import find_leakage
from assets.comparison.paired_metrics import rows_by_pair
from assets.comparison.votes import record_evaluation
from assets.execution.asset_context import AssetContext
from assets.execution.materialize import JobSpec, materialize
from assets.views.metadata import figures_table, margin_histogram, optional_table, rounded, sample_answers
from assets.views.pages import publish_report
from assets.views.sentences import of_evaluation, of_votes
from training.contract.config.json_object import JsonObject
from training.contract.config.loss import Loss
from training.contract.protocol.artifacts import EVALUATION, POLICY, AssetName
from training.contract.protocol.details import EvaluationDetails, PolicyDetails
from training.contract.protocol.settings import EvaluationSpec, RecordedSettings
from training.contract.store.artifact import Artifact

_SHOWN_SAMPLES = 8  # the report has all of them


def evaluation(context: AssetContext) -> dg.MaterializeResult:
    settings = context.settings(EvaluationSpec).model_copy(update={"loss": _loss_of_policy(context)})
    materialized = materialize(context, EVALUATION, JobSpec("evaluation", settings))
    artifact = materialized.artifact
    meter = record_evaluation(context, artifact)  # before anything is shown
    details, is_exact = artifact.details, artifact.details.accuracy_votes is None
    metrics = {name: value for name, value in details.shown_metrics.items() if not name.startswith("eval/sources/")}
    report = artifact.file("report.html").read_text(encoding="utf-8")
    margins = context.picture("margins", artifact, lambda: margin_histogram(_margins(artifact))) if is_exact else None
    links = {
        **({} if margins is None else {"margins": margins}),
        **publish_report(context.services.home, context.pipeline, report),
        **_tracking_links(context, artifact),
        **sample_answers(details.samples[:_SHOWN_SAMPLES]),
    }
    sources = _sources_table(details.sources) if is_exact else {}
    figures = {**sources, **figures_table(metrics, {}), **metrics, **meter.figures}
    results = [
        checks.accuracy(artifact),
        _check_leakage(context, artifact),
        checks.differs(difference(artifact)) if is_exact else checks.difference_hidden(),
        checks.disclosure(meter, context.pipeline.recipe.evaluation),
    ]
    return materialized.result(evaluation_sentence(artifact), links, figures, results)


def evaluation_sentence(evaluation: Artifact[EvaluationDetails]) -> str:
    """Return the result in one sentence, without exact figures if they are hidden."""
    if evaluation.details.accuracy_votes is not None:
        return of_votes(evaluation.details.accuracy_votes)
    changed = difference(evaluation)
    return of_evaluation(evaluation.details, changed.changed, changed.samples)


def _margins(evaluation: Artifact) -> list[float]:
    margins: list[float] = pq.read_table(evaluation.file("pairs.parquet"), columns=["margin"])["margin"].to_pylist()
    return margins


def _loss_of_policy(context: AssetContext) -> Loss:
    """Return the loss of the policy's training. The evaluation spec has the same, unless one spec was materialized alone."""
    trained = context.history.derivation(AssetName.POLICY, context.history.fingerprint(AssetName.POLICY))
    return RecordedSettings.model_validate(trained.settings).loss


def _check_leakage(context: AssetContext, evaluation: Artifact) -> dg.AssetCheckResult:
    policy, rows = evaluation.derivation.inputs[AssetName.POLICY].fingerprint, rows_by_pair(evaluation)
    pairs = evaluation.derivation.inputs[AssetName.TOKENIZED_PAIRS].fingerprint
    raw_preferences = (
        context.history.derivation(AssetName.TOKENIZED_PAIRS, pairs).inputs[AssetName.RAW_PREFERENCES].fingerprint
    )
    return checks.leakage(find_leakage(context.services.store, [policy], rows, raw_preferences), len(rows))


def _sources_table(rows: Sequence[JsonObject]) -> dict[str, dg.TableMetadataValue]:
    """Return the metrics by source as a table, because their names are too long for the page."""
    return optional_table("sources", [rounded(row) for row in rows], tuple(rows[0])) if rows else {}


def delivered_evaluation(
    context: AssetContext, policy: Artifact[PolicyDetails], evaluation: Artifact[EvaluationDetails]
) -> str | None:
    """Log missing events, held-out metrics and the report to the policy's MLflow run, and return its id.

    Return None if the server refuses; a later run logs them then.
    """
    run_id = delivered_run(context, policy)
    if run_id is None:
        return None
    metrics, last_step = evaluation.details.shown_metrics, policy.details.steps
    tracker, report = context.services.tracker, evaluation.file("report.html")
    return run_id if tracker.log_evaluation(run_id, evaluation.fingerprint, metrics, last_step, report) else None


def _tracking_links(
    context: AssetContext, evaluation: Artifact[EvaluationDetails]
) -> dict[str, str | dg.UrlMetadataValue]:
    """Return the link to the report in the policy's MLflow run, if the server has it."""
    policy_fingerprint = evaluation.derivation.inputs[AssetName.POLICY].fingerprint
    policy = context.services.store.open(POLICY, policy_fingerprint, hashes=False)
    run_id = delivered_evaluation(context, policy, evaluation)
    if run_id is None:
        return {}
    link = context.services.tracker.run_link(run_id, "artifacts/evaluation/report.html")
    return {"mlflow": dg.MetadataValue.url(link), "mlflow_run_id": run_id}

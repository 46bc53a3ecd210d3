"""Body of the evaluation: metrics on held-out pairs, a table of the pairs, a report, and sampled answers."""

from typing import Any

import dagster as dg
import pyarrow.parquet as pq

from assets.bodies import checks
from assets.bodies.policy import delivered_run
from assets.bodies.policy_difference import difference
from assets.comparison.leakage import find_leakage
from assets.comparison.paired_metrics import rows_by_pair
from assets.execution.asset_context import AssetContext
from assets.execution.materialize import JobSpec, materialize
from assets.lineage.settings_diff import setting_changes
from assets.pipeline.graph import Settings
from assets.views.metadata import figures_table, margin_histogram, optional_table, rounded, sample_answers
from assets.views.pages import publish_report
from assets.views.sentences import of_evaluation
from training.contract.config.loss import Loss
from training.contract.errors import StoreError
from training.contract.store.store import Artifact

_SHOWN_SAMPLES = 8  # the report has all of them


def evaluation(context: AssetContext) -> dg.MaterializeResult:
    settings = context.settings
    _check_loss_of_policy(context, settings["loss"])
    materialized = materialize(context, JobSpec("evaluation", settings))
    artifact = materialized.artifact
    details, changed = artifact.details, difference(artifact)
    metrics = {name: value for name, value in details["metrics"].items() if not name.startswith("eval/sources/")}
    report = artifact.file("report.html").read_text(encoding="utf-8")
    links = {
        "margins": context.picture("margins", artifact, lambda: margin_histogram(_margins(artifact))),
        **publish_report(context.services.home, context.pipeline, report),
        **_tracking_links(context, artifact),
        **sample_answers(details["samples"][:_SHOWN_SAMPLES]),
    }
    figures = {**_sources_table(details.get("sources")), **figures_table(metrics, {}), **metrics}
    results = [checks.accuracy(artifact), _check_leakage(context, artifact), checks.differs(changed)]
    return materialized.result(of_evaluation(details, changed.changed, changed.samples), links, figures, results)


def _margins(evaluation: Artifact) -> list[float]:
    margins: list[float] = pq.read_table(evaluation.file("pairs.parquet"), columns=["margin"])["margin"].to_pylist()
    return margins


def _check_loss_of_policy(context: AssetContext, loss: Settings) -> None:
    """Raise StoreError if the policy was trained with another loss: one of the two specs may be materialized alone."""
    name = context.pipeline.name
    trained = context.history.derivation("policy", context.history.fingerprint("policy")).settings["loss"]
    if Loss.model_validate(trained) != Loss.model_validate(loss):
        differing = "; ".join(setting_changes({"loss": trained}, {"loss": loss}))
        raise StoreError(
            f"{name}/policy was trained with another loss than in {name}/evaluation_spec: {differing}; materialize "
            f"{name}/training_spec, {name}/evaluation_spec, {name}/policy and {name}/evaluation in one run",
            "losses-differ",
        )


def _check_leakage(context: AssetContext, evaluation: Artifact) -> dg.AssetCheckResult:
    policy, rows = evaluation.derivation.inputs["policy"].fingerprint, rows_by_pair(evaluation)
    pairs = evaluation.derivation.inputs["tokenized_pairs"].fingerprint
    raw_preferences = context.history.derivation("tokenized_pairs", pairs).inputs["raw_preferences"].fingerprint
    return checks.leakage(find_leakage(context.services.store, [policy], rows, raw_preferences), len(rows))


def _sources_table(rows: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Return the metrics by source as a table, because their names are too long for the page. Old evaluations lack them."""
    return optional_table("sources", [rounded(row) for row in rows], tuple(rows[0])) if rows else {}


def delivered_evaluation(context: AssetContext, policy: Artifact, evaluation: Artifact) -> str | None:
    """Log missing events, held-out metrics and the report to the policy's MLflow run, and return its id.

    Return None if the server refuses; a later run logs them then.
    """
    run_id = delivered_run(context, policy)
    if run_id is None:
        return None
    metrics, last_step = evaluation.details["metrics"], policy.details["steps"]
    tracker, report = context.services.tracker, evaluation.file("report.html")
    return run_id if tracker.log_evaluation(run_id, evaluation.fingerprint, metrics, last_step, report) else None


def _tracking_links(context: AssetContext, evaluation: Artifact) -> dict[str, Any]:
    """Return the link to the report in the policy's MLflow run, if the server has it."""
    policy_fingerprint = evaluation.derivation.inputs["policy"].fingerprint
    policy = context.services.store.open("policy", policy_fingerprint, hashes=False)
    run_id = delivered_evaluation(context, policy, evaluation)
    if run_id is None:
        return {}
    link = context.services.tracker.run_link(run_id, "artifacts/evaluation/report.html")
    return {"mlflow": dg.MetadataValue.url(link), "mlflow_run_id": run_id}

"""The policy on pairs it has not seen: metrics, a table of the pairs, a report, and answers before and after."""

from typing import Any

import dagster as dg

from assets.bodies import checks
from assets.bodies.policy import delivered_run
from assets.bodies.policy_difference import difference
from assets.comparison.leakage import find_leakage
from assets.comparison.paired_metrics import rows_by_pair
from assets.execution.asset_context import AssetContext
from assets.execution.materialize import JobSpec, materialize
from assets.lineage.settings_diff import setting_changes
from assets.pipeline.graph import Settings
from assets.views.metadata import table
from training.contract.config.loss import Loss
from training.contract.errors import StoreError
from training.contract.store.store import Artifact


def evaluation(step: AssetContext) -> dg.MaterializeResult:
    settings = step.settings
    _check_loss_of_policy(step, settings["loss"])
    made = materialize(step, JobSpec("evaluation", settings))
    details = made.artifact.details
    metadata = {
        **{name: value for name, value in details["metrics"].items() if not name.startswith("eval/sources/")},
        **_of_sources(details.get("sources")),
        # A path to copy: browsers follow no link from a server's page to a local file.
        "report": dg.MetadataValue.path(str(made.artifact.file("report.html"))),
        "samples": table(details["samples"], ("prompt", "before", "after", "chosen")),
        **_tracked(step, made.artifact),
    }
    found = [checks.accuracy(made.artifact), _leakage(step, made.artifact), checks.differs(difference(made.artifact))]
    return made.result(metadata, found)


def _check_loss_of_policy(step: AssetContext, loss: Settings) -> None:
    """Raises StoreError where the policy was trained with another loss: two specs have it, and one may be made alone."""
    name = step.pipeline.name
    trained = step.history.derivation("policy", step.history.fingerprint("policy")).settings["loss"]
    if Loss.model_validate(trained) != Loss.model_validate(loss):
        differing = "; ".join(setting_changes({"loss": trained}, {"loss": loss}))
        raise StoreError(
            f"{name}/policy was trained with another loss than that of {name}/evaluation_spec: {differing}; materialize "
            f"{name}/training_spec, {name}/evaluation_spec, {name}/policy and {name}/evaluation in one run"
        )


def _leakage(step: AssetContext, evaluation: Artifact) -> dg.AssetCheckResult:
    policy, rows = evaluation.derivation.inputs["policy"].fingerprint, rows_by_pair(evaluation)
    pairs = evaluation.derivation.inputs["tokenized_pairs"].fingerprint
    raw_preferences = step.history.derivation("tokenized_pairs", pairs).inputs["raw_preferences"].fingerprint
    return checks.leakage(find_leakage(step.services.store, [policy], rows, raw_preferences), len(rows))


def _of_sources(rows: list[dict[str, Any]] | None) -> dict[str, Any]:
    """A table: names of their metrics are too long for the page. What was evaluated before sources had names has no rows."""
    return {"sources": table(rows, tuple(rows[0]))} if rows else {}


def delivered_evaluation(step: AssetContext, policy: Artifact, evaluation: Artifact) -> str | None:
    """The MLflow run of an evaluated policy, after what it misses was delivered: events, held-out metrics, the report.

    None where the server does not take them; a later run delivers them then.
    """
    run_id = delivered_run(step, policy)
    if run_id is None:
        return None
    metrics, at = evaluation.details["metrics"], policy.details["steps"]
    tracker, report = step.services.tracker, evaluation.file("report.html")
    return run_id if tracker.log_evaluation(run_id, evaluation.fingerprint, metrics, at, report) else None


def _tracked(step: AssetContext, evaluation: Artifact) -> dict[str, Any]:
    """The link to the report in the policy's MLflow run, if the server has them."""
    made_from = evaluation.derivation.inputs["policy"].fingerprint
    policy = step.services.store.open("policy", made_from, hashes=False)
    run_id = delivered_evaluation(step, policy, evaluation)
    if run_id is None:
        return {}
    link = step.services.tracker.run_link(run_id, "artifacts/evaluation/report.html")
    return {"mlflow_run_id": run_id, "mlflow": dg.MetadataValue.url(link)}

"""The policy on pairs it has not seen: metrics, a table of the pairs, a report, and answers before and after."""

from typing import Any

import dagster as dg

from assets import checks
from assets.metadata import table
from assets.realize import Work, realize
from assets.step import Step
from training.contract.store import Artifact


def evaluation(step: Step) -> dg.MaterializeResult:
    settings = step.upstream("evaluation_spec").json("spec.json")
    made = realize(step, Work("evaluation", settings))
    details = made.artifact.details
    metadata = {
        **details["metrics"],
        # A path to copy: browsers follow no link from a server's page to a local file.
        "report": dg.MetadataValue.path(str(made.artifact.file("report.html"))),
        "samples": table(details["samples"], ("prompt", "before", "after", "chosen")),
        **_tracked(step, made.artifact),
    }
    return made.result(metadata, [checks.accuracy(made.artifact)])


def _tracked(step: Step, evaluated: Artifact) -> dict[str, Any]:
    """Add the metrics and the report to the policy's MLflow run, if there is one; gives the link to the report there."""
    policy = step.latest("policy").metadata
    run_id = policy.get("mlflow_run_id")
    if run_id is None:
        return {}
    tracker = step.services.tracker
    tracker.log_evaluation(run_id, evaluated.details["metrics"], step=int(policy["steps"]))
    tracker.log_file(run_id, evaluated.file("report.html"), "evaluation", evaluated.fingerprint)
    link = tracker.run_link(run_id, "artifacts/evaluation/report.html")
    return {"mlflow_run_id": run_id, "mlflow": dg.MetadataValue.url(link)}

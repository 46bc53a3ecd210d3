"""The policy on pairs it has not seen: metrics, a table of the pairs, a report, and answers before and after."""

from typing import Any

import dagster as dg

from assets import checks
from assets.metadata import table
from assets.pipeline import Pipeline, Services, declare
from assets.policy import delivered_run
from assets.realize import Work, realize, upstream
from training.contract.store import Artifact


def evaluation(pipeline: Pipeline) -> dg.AssetsDefinition:
    declared = checks.specs(pipeline, "evaluation", checks.ACCURACY, blocking=False)

    @declare(pipeline, "evaluation", declared)
    def evaluation(context: dg.AssetExecutionContext, services: dg.ResourceParam[Services]) -> dg.MaterializeResult:
        settings = upstream(context, pipeline, services, "evaluation_spec").json("spec.json")
        made = realize(context, pipeline, services, Work("evaluation", settings))
        details = made.artifact.details
        metadata = {
            **details["metrics"],
            # A path to copy: from a page of a server no browser follows a link to a file.
            "report": dg.MetadataValue.path(str(made.artifact.file("report.html"))),
            "samples": table(details["samples"], ("prompt", "before", "after", "chosen")),
            **_tracked(context, pipeline, services, made.artifact),
        }
        return made.result(metadata, [checks.accuracy(made.artifact)])

    return evaluation


def delivered_evaluation(
    context: dg.AssetExecutionContext, pipeline: Pipeline, services: Services, policy: Artifact, evaluation: Artifact
) -> str | None:
    """The MLflow run of an evaluated policy, after whatever it misses was delivered: events, held-out metrics, the report.

    None where the server does not take them; who comes next delivers them then.
    """
    run_id = delivered_run(context, pipeline, services, policy)
    if run_id is None:
        return None
    metrics, step = evaluation.details["metrics"], policy.details["steps"]
    report = evaluation.file("report.html")
    done = services.tracker.log_evaluation(run_id, evaluation.fingerprint, metrics, step, report)
    return run_id if done else None


def _tracked(
    context: dg.AssetExecutionContext, pipeline: Pipeline, services: Services, evaluation: Artifact
) -> dict[str, Any]:
    """The link to the report in the policy's MLflow run, if the server has them."""
    policy = services.store.open("policy", evaluation.derivation.inputs["policy"].fingerprint, hashes=False)
    run_id = delivered_evaluation(context, pipeline, services, policy, evaluation)
    if run_id is None:
        return {}
    link = services.tracker.run_link(run_id, "artifacts/evaluation/report.html")
    return {"mlflow_run_id": run_id, "mlflow": dg.MetadataValue.url(link)}

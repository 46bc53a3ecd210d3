"""The policy on pairs it has not seen: metrics, a table of the pairs, a report, and answers before and after."""

from typing import Any

import dagster as dg

from assets import checks
from assets.metadata import table
from assets.pipeline import Pipeline, Services, declare
from assets.realize import Realized, Work, latest_metadata, realize, upstream


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
            **_tracked(context, pipeline, services, made),
        }
        return made.result(metadata, [checks.accuracy(made.artifact)])

    return evaluation


def _tracked(
    context: dg.AssetExecutionContext, pipeline: Pipeline, services: Services, made: Realized
) -> dict[str, Any]:
    """Add the metrics and the report to the policy's MLflow run, if there is one; gives the link to the report there."""
    policy = latest_metadata(context.instance, pipeline.key("policy"))
    run_id = policy.get("mlflow_run_id")
    if run_id is None:
        return {}
    services.tracker.log_evaluation(run_id, made.artifact.details["metrics"], step=int(policy["steps"]))
    services.tracker.log_file(run_id, made.artifact.file("report.html"), "evaluation", made.artifact.fingerprint)
    link = services.tracker.run_link(run_id, "artifacts/evaluation/report.html")
    return {"mlflow_run_id": run_id, "mlflow": dg.MetadataValue.url(link)}

"""The job `<recipe>_smoke`: a smoke run from the launchpad, with the number of steps as its only field."""

import dagster as dg

from assets.inputs.recipe_location import add_recipe_location
from assets.pipeline.graph import GPU_POOL
from assets.pipeline.pipeline import Pipeline, Services
from workflows.orchestration.smoke_run import DEFAULT_STEPS, smoke_run


def smoke_job(pipeline: Pipeline) -> dg.JobDefinition:
    """Return the job. It takes a slot of the pool `gpu`, like a training."""

    @dg.op(
        name=f"{pipeline.identifier}_smoke_run",
        pool=GPU_POOL,
        config_schema={"steps": dg.Field(int, default_value=DEFAULT_STEPS, description="Number of training steps.")},
        required_resource_keys={"services"},
        out=dg.Out(dg.Nothing),
    )
    def run(context: dg.OpExecutionContext) -> None:
        services: Services = context.resources.services
        with add_recipe_location(pipeline):
            found = smoke_run(pipeline, services, context.op_config["steps"], context.log)
        context.log.info(str(found))

    graph = dg.GraphDefinition(
        f"{pipeline.identifier}_smoke",
        node_defs=[run],
        description=(
            f"Trains a few steps of {pipeline.name} on its longest pairs, to see that everything fits. Nothing is "
            "materialized or registered."
        ),
    )
    return graph.to_job(executor_def=dg.in_process_executor)

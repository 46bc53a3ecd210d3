"""When a recipe is materialized without anybody asking: on a schedule, and when its preference data change.

Both request the whole graph. Every asset asks the store first, so what did not change costs a look and no more.
"""

import dagster as dg

from assets.graph import GRAPH
from assets.locate import locate_data
from assets.pipeline import Pipeline
from assets.realize import data_version
from training.contract.fingerprint import short

_SECONDS_BETWEEN_LOOKS = 60


def retraining(pipeline: Pipeline) -> dg.Definitions:
    """The job that materializes a recipe, with the schedule and the sensor that the recipe asks for; both start running."""
    job = dg.define_asset_job(
        f"{pipeline.name}_retrain",
        selection=[pipeline.key(asset) for asset in GRAPH],
        description=f"Brings every artifact of {pipeline.name} up to date.",
    )
    automation = pipeline.recipe.automation
    return dg.Definitions(
        jobs=[job],
        schedules=[_schedule(pipeline, job.name)] if automation.cron else [],
        sensors=[_data_sensor(pipeline, job.name)] if automation.on_change else [],
    )


def _schedule(pipeline: Pipeline, job: str) -> dg.ScheduleDefinition:
    automation = pipeline.recipe.automation
    assert automation.cron is not None
    return dg.ScheduleDefinition(
        name=f"{pipeline.name}_schedule",
        job_name=job,
        cron_schedule=automation.cron,
        execution_timezone=automation.timezone,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description=f"Retrains {pipeline.name} at {automation.cron!r} ({automation.timezone}).",
    )


def _data_sensor(pipeline: Pipeline, job: str) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"{pipeline.name}_data_sensor",
        job_name=job,
        minimum_interval_seconds=_SECONDS_BETWEEN_LOOKS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Retrains {pipeline.name} when the bytes of its preference data are not those it was made from.",
    )
    def data_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        found = locate_data(pipeline.recipe).fingerprint
        known = data_version(context.instance, pipeline.key("preference_source"))
        if known is None:
            return dg.SkipReason(f"{pipeline.name} was never materialized; the first run is yours to start")
        if found == known:
            return dg.SkipReason(f"the preference data are still {short(found)}")
        if found == context.cursor:
            return dg.SkipReason(f"a run for the preference data {short(found)} was requested already")
        return dg.SensorResult(run_requests=[dg.RunRequest()], cursor=found)

    return data_sensor

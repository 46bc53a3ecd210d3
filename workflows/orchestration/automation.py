"""When a recipe is materialized automatically: on a schedule, and when its content changes.

* The schedule requests the whole graph. Every asset asks the store first; what is there is only read, once, to see that it
  is whole.
* The data sensor looks at what Dagster cannot see: preference files, base model, tokenizer and template. If one differs
  from its latest materialization, the sensor requests the assets that record it, and no others. If a person has stopped the
  run that was to record it, the sensor waits until something has changed since. It also closes runs whose process is gone:
  what they were to make counts as in progress, and the conditions would wait for it. And it reports what is stale and why
  (`workflows.orchestration.observations`).
* The automation condition of every asset (`assets.bodies.automation`) does the rest: recorded content that changed, or a code
  version that a changed recipe gave, requests everything downstream in one run. Unchanged content requests nothing.

Without `automation.on_change` there is neither sensor nor conditions, but one that only reports what is stale and why.

A person starts the first run: sensors and conditions ignore a recipe that was never materialized.
"""

import datetime
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import dagster as dg

from assets.execution.run_liveness import fail_orphaned_runs
from assets.execution.stopped_runs import was_stopped
from assets.inputs.current import ResolvedInput
from assets.inputs.recipe_location import written
from assets.lineage.diff import changes_since
from assets.lineage.history import History
from assets.pipeline.graph import GRAPH
from assets.pipeline.pipeline import Pipeline
from training.contract.config.recipe import Recipe
from training.contract.errors import CorruptRecord, RecipeError
from training.contract.identity.fingerprint import fingerprint
from training.contract.store.manifest import Derivation
from workflows.orchestration.observations import NOTHING, Cursor, status_sensor
from workflows.orchestration.resources import build_services, pedigree_home
from workflows.state.expected_state import expect_state
from workflows.state.status import judge

_SECONDS_BETWEEN_LOOKS = 60
_SECONDS_BETWEEN_TICKS = 30
_SECONDS_BEFORE_ASKING_AGAIN = 3600
# The assets that record the world outside. `training_spec` depends on the recipe alone, so on its code version: one that
# starts from the champion, with `training.start_from`, is refused a sensor.
_LOOKED_AT = ("preference_source", "base_model", "tokenization_spec", "evaluation_spec", "release_spec")
_CAUSE_TAG = "pedigree/cause"
_CAUSE_CHARACTERS = 500


def retraining(pipeline: Pipeline) -> dg.Definitions:
    """The jobs of a recipe, and its schedule and sensors, which are switched on."""
    retrain = dg.define_asset_job(
        f"{pipeline.identifier}_retrain",
        selection=[pipeline.key(asset) for asset in GRAPH],
        description=f"Brings every artifact of {pipeline.name} up to date.",
    )
    record = dg.define_asset_job(
        f"{pipeline.identifier}_look",
        selection=[pipeline.key(asset) for asset in _LOOKED_AT],
        description=f"Records the data, the base model and the tokenizer of {pipeline.name} as they are now.",
    )
    automation = pipeline.recipe.automation
    return dg.Definitions(
        jobs=[retrain, record],
        schedules=[_schedule(pipeline, retrain.name)] if automation.cron else [],
        sensors=[_data_sensor(pipeline, record.name), _condition_sensor(pipeline)]
        if automation.on_change
        else [status_sensor(pipeline)],
    )


def _schedule(pipeline: Pipeline, job: str) -> dg.ScheduleDefinition:
    automation = pipeline.recipe.automation
    assert automation.cron is not None
    with written(pipeline, "automation.timezone"):
        _check_timezone(automation.timezone)
    with written(pipeline, "automation.cron"):
        try:
            schedule = dg.ScheduleDefinition(
                name=f"{pipeline.identifier}_schedule",
                job_name=job,
                cron_schedule=automation.cron,
                execution_timezone=automation.timezone,
                default_status=dg.DefaultScheduleStatus.RUNNING,
                description=f"Retrains {pipeline.name} at {automation.cron!r} ({automation.timezone}).",
            )
            _check_date_exists(automation.cron, automation.timezone)
        except (dg.DagsterInvalidDefinitionError, ValueError) as error:
            told = 'it is no schedule; expected five fields such as "0 6 * * 1", Mondays at six'
            raise RecipeError(told) from error
    return schedule


def _check_timezone(name: str) -> None:
    """Raises RecipeError for what names no time zone. Dagster refuses it too, but as it refuses a wrong `cron`."""
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise RecipeError("it is not a known time zone; expected a name such as Europe/Berlin") from error


def _check_date_exists(cron: str, timezone: str) -> None:
    """Raises ValueError where no day is ever one of `cron`, as 31 April: Dagster's page of all schedules fails at one.

    What Dagster makes public of the dates of a schedule are the partitions that they would bound.
    """
    days = dg.TimeWindowPartitionsDefinition(
        start=datetime.datetime(2000, 1, 1), cron_schedule=cron, timezone=timezone, fmt="%Y-%m-%dT%H:%M"
    )
    days.get_next_partition_window(datetime.datetime.now(datetime.UTC))


def _condition_sensor(pipeline: Pipeline) -> dg.AutomationConditionSensorDefinition:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        return dg.AutomationConditionSensorDefinition(
            name=f"{pipeline.identifier}_automation",
            target=[pipeline.key(asset) for asset in GRAPH],
            minimum_interval_seconds=_SECONDS_BETWEEN_TICKS,
            default_status=dg.DefaultSensorStatus.RUNNING,
            use_user_code_server=True,  # one of the conditions is ours
            description=f"Materializes what of {pipeline.name} lies below a change of content.",
        )


def _data_sensor(pipeline: Pipeline, job: str) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"{pipeline.identifier}_data_sensor",
        job_name=job,
        minimum_interval_seconds=_SECONDS_BETWEEN_LOOKS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Records data, base model and tokenizer of {pipeline.name} when they are not what they were.",
    )
    def data_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        services = build_services(pedigree_home())
        fail_orphaned_runs(context.instance, services.home)
        history = History(context.instance, pipeline, services.store)
        if history.latest("preference_source").fingerprint is None:
            return dg.SkipReason(f"{pipeline.name} was never materialized; the first run is yours to start")
        expected, cursor = expect_state(pipeline, services), Cursor.parse(context.cursor)
        cursor = cursor.observing(context.instance, pipeline, list(judge(history, services, expected)))
        found = [each for asset in _LOOKED_AT if (each := expected[asset].found) is not None]
        causes = _causes(history, found)
        if not causes:
            same = dg.SkipReason("data, base model and tokenizer are what was last materialized")
            return dg.SensorResult(skip_reason=same, cursor=str(replace(cursor, asked=NOTHING)))
        seen = fingerprint("seen", [_identity(each, pipeline.recipe) for each in found])
        anew, told = replace(cursor, asked=seen, when=time.time()), "; ".join(causes)
        if _was_stopped(history, found, seen, cursor):
            stopped = dg.SkipReason(f"a person has stopped the run that was to record this: {told}")
            return dg.SensorResult(skip_reason=stopped, cursor=str(anew))
        if _was_asked_for(seen, cursor):
            asked = dg.SkipReason(f"a run was requested already: {told}")
            return dg.SensorResult(skip_reason=asked, cursor=str(cursor))
        return dg.SensorResult(
            run_requests=[dg.RunRequest(tags={_CAUSE_TAG: told[:_CAUSE_CHARACTERS]})], cursor=str(anew)
        )

    return data_sensor


def _was_stopped(history: History, found: Sequence[ResolvedInput], seen: str, cursor: Cursor) -> bool:
    """Whether a person has stopped the run that was to record this state: the one in the cursor, or the first that differs."""
    latest = [history.latest(each.asset) for each in found if _differs(history, each)]
    return cursor.asked in (NOTHING, seen) and was_stopped(history.instance, latest)


def _was_asked_for(seen: str, cursor: Cursor) -> bool:
    """Whether a run for this state was requested within the hour; after that a run that failed is requested again."""
    return cursor.asked == seen and time.time() - cursor.when < _SECONDS_BEFORE_ASKING_AGAIN


def _causes(history: History, found: Sequence[ResolvedInput]) -> list[str]:
    """What differs from the latest materializations, in words; nothing for an asset that was never materialized."""
    causes = []
    for each in found:
        if (key := history.latest(each.asset).key) is not None and _differs(history, each):
            causes += [f"{each.asset}: {words}" for words in changes_since(history.store, key, each)]
    return causes


def _differs(history: History, found: ResolvedInput) -> bool:
    """Whether an asset that was materialized before is another one now."""
    return history.latest(found.asset).key is not None and not _is_recorded(history, found)


def _is_recorded(history: History, found: ResolvedInput) -> bool:
    recipe = history.pipeline.recipe
    if not GRAPH[found.asset].reads(recipe):  # a model without a fingerprint is to be downloaded, by the run
        return history.latest(found.asset).fingerprint == found.fingerprint
    try:
        before = history.made_from(found.asset)
    except CorruptRecord:  # a run mends it
        return False
    return before is not None and _seen(before, recipe) == _seen(found.derivation, recipe)


def _identity(found: ResolvedInput, recipe: Recipe) -> Any:
    return found.fingerprint or _seen(found.derivation, recipe)


def _seen(how: Derivation, recipe: Recipe) -> dict[str, Any]:
    """What a spec has of the world outside. Its other settings are fields of the recipe, of which the code version tells."""
    fields = GRAPH[how.kind].reads(recipe)
    return {name: value for name, value in how.settings.items() if name not in fields}

"""Automatic runs of a recipe: on a schedule, and after a change of content.

* The schedule requests the whole graph. Every asset first asks the store; an existing artifact is read once, to check that it
  is intact.
* The data sensor watches inputs invisible to Dagster: preference files, base model, tokenizer and template. If one differs
  from its latest materialization, the sensor requests only the assets that record these inputs. If the user stopped such a run,
  the sensor waits for the next change. It also closes runs without a process: their assets count as in progress, and the
  conditions would wait for them. And it reports stale assets with their causes (`workflows.orchestration.observations`).
* The automation condition of every asset (`assets.bodies.automation`) does the rest. Changed content, or a new code version
  after a change of the recipe, requests everything downstream in one run. Unchanged content requests nothing.

Without `automation.on_change`, there are neither conditions nor a data sensor. One sensor then reports stale assets.
Another one always follows jobs that an ended run has left in the queue of an engine (`workflows.orchestration.detached_jobs`).

The user starts the first run: sensors and conditions ignore a recipe that was never materialized.
"""

import datetime
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import dagster as dg
from dagster._utils.schedules import get_smallest_cron_interval

from assets.execution.run_liveness import fail_orphaned_runs
from assets.execution.stopped_runs import was_stopped
from assets.inputs.current import ResolvedInput
from assets.inputs.recipe_location import written
from assets.lineage.diff import changes_since
from assets.lineage.history import History
from assets.pipeline.graph import GRAPH
from assets.pipeline.pipeline import Pipeline
from training.contract.config.json_object import JsonObject
from training.contract.config.key_settings import key_settings
from training.contract.config.recipe import Recipe
from training.contract.errors import CorruptRecord, RecipeError
from training.contract.identity.fingerprint import fingerprint
from training.contract.protocol.artifacts import AssetName
from training.contract.store.manifest import Derivation
from workflows.orchestration.detached_jobs import detached_jobs_sensor
from workflows.orchestration.observations import NOTHING, Cursor, status_sensor
from workflows.orchestration.resources import build_services, pedigree_home
from workflows.orchestration.smoke_job import smoke_job
from workflows.state.expected_state import expect_state
from workflows.state.status import judge

_SECONDS_BETWEEN_LOOKS = 60
_SECONDS_BETWEEN_TICKS = 30
_SECONDS_BEFORE_ASKING_AGAIN = 3600
# The assets that record external inputs. `training_spec` depends on the recipe alone, so on its code version; with
# `training.start_from`, it starts from the champion, and a sensor is refused.
_LOOKED_AT = (
    AssetName.PREFERENCE_SOURCE,
    AssetName.BASE_MODEL,
    AssetName.TOKENIZATION_SPEC,
    AssetName.EVALUATION_SPEC,
    AssetName.RELEASE_SPEC,
)
_CAUSE_TAG = "pedigree/cause"
_CAUSE_CHARACTERS = 500


def retraining(pipeline: Pipeline) -> dg.Definitions:
    """Return the jobs of a recipe, with its schedule and sensors switched on."""
    retrain = dg.define_asset_job(
        f"{pipeline.identifier}_retrain",
        selection=[pipeline.key(asset) for asset in GRAPH],
        description=f"Brings every artifact of {pipeline.name} up to date.",
    )
    record = dg.define_asset_job(
        f"{pipeline.identifier}_look",
        selection=[pipeline.key(asset) for asset in _LOOKED_AT],
        description=f"Records the current data, base model and tokenizer of {pipeline.name}.",
    )
    automation = pipeline.recipe.automation
    return dg.Definitions(
        jobs=[retrain, record, smoke_job(pipeline)],
        schedules=[_schedule(pipeline, retrain.name)] if automation.cron else [],
        sensors=[detached_jobs_sensor(pipeline, retrain.name), *_sensors(pipeline, record.name)],
    )


def _sensors(pipeline: Pipeline, record: str) -> list[dg.SensorDefinition]:
    if pipeline.recipe.automation.on_change:
        return [_data_sensor(pipeline, record), _condition_sensor(pipeline)]
    return [status_sensor(pipeline)]


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
            message = 'it is not a schedule; expected five fields such as "0 6 * * 1", Mondays at six'
            raise RecipeError(message, "wrong-schedule") from error
    return schedule


def release_freshness(pipeline: Pipeline) -> dg.FreshnessPolicy | None:
    """Return the policy that the released model was materialized since the previous tick of the schedule.

    None without a schedule. If the intervals between ticks differ, the shortest one counts, so after a longer one the model is
    late while its run works.
    """
    automation = pipeline.recipe.automation
    if automation.cron is None:
        return None
    interval = get_smallest_cron_interval(automation.cron)
    return dg.FreshnessPolicy.cron(automation.cron, interval, automation.timezone)


def _check_timezone(name: str) -> None:
    """Raise RecipeError for an unknown time zone. Dagster's error is the same as for a wrong `cron`."""
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise RecipeError(
            "it is not a known time zone; expected a name such as Europe/Berlin", "unknown-time-zone"
        ) from error


def _check_date_exists(cron: str, timezone: str) -> None:
    """Raise ValueError if no date matches `cron`, as for 31 April: one such schedule breaks Dagster's page of all schedules.

    Dagster lacks a public function for a schedule's dates, so use the partitions between them.
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
            use_user_code_server=True,  # one condition is defined here
            description=f"Materializes the assets of {pipeline.name} downstream of changed content.",
        )


def _data_sensor(pipeline: Pipeline, job: str) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"{pipeline.identifier}_data_sensor",
        job_name=job,
        minimum_interval_seconds=_SECONDS_BETWEEN_LOOKS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Records data, base model and tokenizer of {pipeline.name} after a change.",
    )
    def data_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        services = build_services(pedigree_home())
        fail_orphaned_runs(context.instance, services.home)
        history = History(context.instance, pipeline, services.store)
        cursor = Cursor.parse(context.cursor)
        if history.latest(AssetName.PREFERENCE_SOURCE).fingerprint is None:
            return cursor.skip(f"{pipeline.name} was never materialized; start the first run yourself")
        expected = expect_state(pipeline, services)
        cursor = cursor.observing(context.instance, pipeline, list(judge(history, services, expected)))
        found = [resolved for asset in _LOOKED_AT if (resolved := expected[asset].found) is not None]
        causes = _causes(history, found)
        if not causes:
            same = "data, base model and tokenizer equal the latest materialization"
            return replace(cursor, asked=NOTHING).skip(same)
        seen = fingerprint("seen", [_identity(resolved, pipeline.recipe) for resolved in found])
        renewed, message = replace(cursor, asked=seen, when=time.time()), "; ".join(causes)
        if _was_stopped(history, found, seen, cursor):
            return renewed.skip(f"the user stopped the run that was to record this: {message}")
        if _was_asked_for(seen, cursor):
            return cursor.skip(f"a run was requested already: {message}")
        return dg.SensorResult(
            run_requests=[dg.RunRequest(tags={_CAUSE_TAG: message[:_CAUSE_CHARACTERS]})],
            cursor=renewed.text(f"run requested: {message}"),
        )

    return data_sensor


def _was_stopped(history: History, found: Sequence[ResolvedInput], seen: str, cursor: Cursor) -> bool:
    """Return whether the user stopped the run for this state: the run in the cursor, or the first one with a difference."""
    latest = [history.latest(resolved.asset) for resolved in found if _differs(history, resolved)]
    return cursor.asked in (NOTHING, seen) and was_stopped(history.instance, latest)


def _was_asked_for(seen: str, cursor: Cursor) -> bool:
    """Return whether a run for this state was requested within the hour. After that, a failed run is requested again."""
    return cursor.asked == seen and time.time() - cursor.when < _SECONDS_BEFORE_ASKING_AGAIN


def _causes(history: History, found: Sequence[ResolvedInput]) -> list[str]:
    """Return the differences to the latest materializations as text; nothing for an asset without one."""
    causes = []
    for resolved in found:
        if (key := history.latest(resolved.asset).key) is not None and _differs(history, resolved):
            causes += [f"{resolved.asset}: {change}" for change in changes_since(history.store, key, resolved)]
    return causes


def _differs(history: History, found: ResolvedInput) -> bool:
    """Return whether a materialized asset has changed since."""
    return history.latest(found.asset).key is not None and not _is_recorded(history, found)


def _is_recorded(history: History, found: ResolvedInput) -> bool:
    recipe = history.pipeline.recipe
    if not key_settings(GRAPH[found.asset].reads(recipe)):  # a model without a fingerprint has yet to be downloaded
        return history.latest(found.asset).fingerprint == found.fingerprint
    try:
        recorded = history.made_from(found.asset)
    except CorruptRecord:  # a run repairs it
        return False
    return recorded is not None and _external_settings(recorded, recipe) == _external_settings(found.derivation, recipe)


def _identity(found: ResolvedInput, recipe: Recipe) -> Any:
    return found.fingerprint or _external_settings(found.derivation, recipe)


def _external_settings(derivation: Derivation, recipe: Recipe) -> JsonObject:
    """Return the external inputs in a spec. Its other settings are fields of the recipe, covered by the code version."""
    fields = key_settings(GRAPH[derivation.kind].reads(recipe))
    return {name: value for name, value in derivation.settings.items() if name not in fields}

"""When a recipe is materialized without anybody asking: on a schedule, and when its content changes.

Three parts, each of which does what only it can:

* The schedule requests the whole graph. Every asset asks the store first, so what did not change costs a look and no more.
* The data sensor looks at the world, which Dagster cannot see: preference files, base model, tokenizer and template. If
  something is not what was last materialized, it requests the assets that record it, and only these.
* The automation condition of every asset (`assets.conditions`) does the rest: what was recorded anew, or a code version that
  a changed recipe gave, requests everything below it in one run. Recorded anew with the same content, it requests nothing.

The first run is a person's to start: a recipe that was never materialized is left alone by sensor and conditions.
"""

import time
import warnings
from collections.abc import Sequence
from typing import Any

import dagster as dg

from assets.changes import changes_since
from assets.graph import GRAPH
from assets.pipeline import Pipeline, Services
from assets.realize import latest_key
from assets.recorded import data_version
from assets.world import Found, hash_cache, look
from training.contract.errors import RecipeError
from training.contract.fingerprint import fingerprint
from workflows.resources import build_services, pedigree_home

_SECONDS_BETWEEN_LOOKS = 60
_SECONDS_BETWEEN_TICKS = 30
_SECONDS_BEFORE_ASKING_AGAIN = 3600
_NOTHING = "nothing"  # the cursor when there is nothing to ask for; Dagster would keep the old one for an empty text
# What stands for the world outside; the two other specs are made of the recipe alone, and their code version tells.
_LOOKED_AT = ("preference_source", "base_model", "tokenization_spec")
_CAUSE_TAG = "pedigree/cause"
_CAUSE_CHARACTERS = 500


def retraining(pipeline: Pipeline) -> dg.Definitions:
    """The jobs of a recipe, with the schedule and the sensors that it asks for; these start running."""
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
        sensors=[_data_sensor(pipeline, record.name), _condition_sensor(pipeline)] if automation.on_change else [],
    )


def _schedule(pipeline: Pipeline, job: str) -> dg.ScheduleDefinition:
    automation = pipeline.recipe.automation
    assert automation.cron is not None
    try:
        return dg.ScheduleDefinition(
            name=f"{pipeline.identifier}_schedule",
            job_name=job,
            cron_schedule=automation.cron,
            execution_timezone=automation.timezone,
            default_status=dg.DefaultScheduleStatus.RUNNING,
            description=f"Retrains {pipeline.name} at {automation.cron!r} ({automation.timezone}).",
        )
    except dg.DagsterInvalidDefinitionError as error:
        raise RecipeError(
            f"{pipeline.name}: `automation.cron: {automation.cron}` with `automation.timezone: {automation.timezone}` is no "
            'schedule; expected five fields such as "0 6 * * 1", Mondays at six, and a name such as Europe/Berlin'
        ) from error


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
        if data_version(context.instance, pipeline.key("preference_source")) is None:
            return dg.SkipReason(f"{pipeline.name} was never materialized; the first run is yours to start")
        services = build_services(pedigree_home())
        cache = hash_cache(services)
        found = [look(pipeline, services, asset, cache) for asset in _LOOKED_AT]
        causes = _causes(pipeline, services, context.instance, found)
        if not causes:
            same = dg.SkipReason("data, base model and tokenizer are what was last materialized")
            return dg.SensorResult(skip_reason=same, cursor=_NOTHING)
        seen = fingerprint("seen", [_identity(each) for each in found])
        if _was_asked_for(seen, context.cursor):
            return dg.SkipReason(f"a run was requested already: {'; '.join(causes)}")
        request = dg.RunRequest(tags={_CAUSE_TAG: "; ".join(causes)[:_CAUSE_CHARACTERS]})
        return dg.SensorResult(run_requests=[request], cursor=f"{seen} {time.time():.0f}")

    return data_sensor


def _was_asked_for(seen: str, cursor: str | None) -> bool:
    """Whether a run for what is seen was requested lately. One that failed, since a disk was full, is requested again."""
    asked, _, when = (cursor or "").partition(" ")
    return asked == seen and time.time() - float(when) < _SECONDS_BEFORE_ASKING_AGAIN


def _causes(pipeline: Pipeline, services: Services, instance: dg.DagsterInstance, found: Sequence[Found]) -> list[str]:
    """What of the world is not what was last materialized, in words; nothing for what never was."""
    causes = []
    for each in found:
        key = latest_key(instance, pipeline.key(each.asset))
        if key is not None and not _is_recorded(pipeline, services, instance, each, key):
            causes += [f"{each.asset}: {words}" for words in changes_since(services.store, key, each)]
    return causes


def _is_recorded(pipeline: Pipeline, services: Services, instance: dg.DagsterInstance, found: Found, key: str) -> bool:
    if found.fingerprint is not None:
        return data_version(instance, pipeline.key(found.asset)) == found.fingerprint
    if found.job is None:
        return False  # a model that is not downloaded yet: the run does it
    record = services.store.record(found.asset, key)
    return record is not None and _files(record.derivation.settings) == _files(found.derivation.settings)


def _identity(found: Found) -> Any:
    settings = found.derivation.settings
    return found.fingerprint or (settings if found.job is None else _files(settings))


def _files(settings: dict[str, Any]) -> dict[str, Any]:
    """The files of a tokenization spec. Its rules are the recipe's, and a code version tells of those."""
    return {name: settings[name] for name in ("files", "chat_template")}

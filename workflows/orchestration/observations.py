"""What is stale and why, on the pages of the assets in Dagster's UI: an observation of each asset whose causes changed.

An observation says what `pedigree status` says. It has no data version, so it neither makes anything stale nor starts a run.
What was said last is in Dagster's records, so each change is said once, whoever looks. The records are asked only if what is
found is new to the sensor, by its cursor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import dagster as dg

from assets.lineage.history import History
from assets.pipeline.pipeline import Pipeline
from assets.views.metadata import verbatim
from training.contract.identity.fingerprint import fingerprint
from workflows.orchestration.resources import build_services, pedigree_home
from workflows.state.expected_state import expect_state
from workflows.state.status import AssetStatus, judge

NOTHING = "nothing"  # is requested, or was observed so far
STATE, CAUSES = "state", "causes"

_SECONDS_BETWEEN_LOOKS = 60
_SECONDS_BETWEEN_LOOKS_AT_A_VARIANT = 600  # of which there may be a hundred, and Dagster keeps a record of each look


@dataclass(frozen=True)
class Cursor:
    """What a sensor keeps: for which state it requested a run and when, and a digest of what it observed.

    It is never empty, since Dagster keeps the old cursor for an empty one.
    """

    asked: str = NOTHING
    when: float = 0.0
    observed: str = NOTHING

    @classmethod
    def parse(cls, text: str | None) -> Self:
        asked, when, observed, *_ = [*(text or NOTHING).split(" "), "", ""]
        return cls(asked, float(when or 0), observed or NOTHING)

    def __str__(self) -> str:
        return f"{self.asked} {self.when:.0f} {self.observed}"

    def observing(self, instance: dg.DagsterInstance, pipeline: Pipeline, found: Sequence[AssetStatus]) -> Self:
        """Report what of `found` was not reported yet; gives the cursor after that."""
        seen = fingerprint("observed", [[each.asset, each.state, list(each.causes)] for each in found])
        if seen != self.observed:
            observe(pipeline, instance, found)
        return replace(self, observed=seen)


def status_sensor(pipeline: Pipeline) -> dg.SensorDefinition:
    """A sensor that reports what is stale and why, and requests nothing."""

    @dg.sensor(
        name=f"{pipeline.identifier}_status_sensor",
        minimum_interval_seconds=_SECONDS_BETWEEN_LOOKS
        if pipeline.variant is None
        else _SECONDS_BETWEEN_LOOKS_AT_A_VARIANT,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Reports what of {pipeline.name} is stale and why, on the pages of its assets. It starts no run.",
    )
    def look(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        services = build_services(pedigree_home())
        history = History(context.instance, pipeline, services.store)
        if not any(history.latest(asset).fingerprint for asset in history.assets):
            return dg.SensorResult(skip_reason=dg.SkipReason(f"{pipeline.name} was never materialized"))
        found = list(judge(history, services, expect_state(pipeline, services)))
        cursor = Cursor.parse(context.cursor).observing(context.instance, pipeline, found)
        stale = [each.asset for each in found if each.state == "stale"]
        said = dg.SkipReason(f"stale: {', '.join(stale)}" if stale else "nothing is stale")
        return dg.SensorResult(skip_reason=said, cursor=str(cursor))

    return look


def observe(pipeline: Pipeline, instance: dg.DagsterInstance, found: Sequence[AssetStatus]) -> None:
    """Report the state and the causes of each asset for which they are not those last reported.

    An asset that is fresh is reported only after causes were. One that was never materialized is not, as Dagster shows that.
    """
    for each in found:
        if each.state != "missing" and _is_new(pipeline, instance, each):
            news = f"It is {each.state}, for these causes." if each.causes else "It is fresh again."
            observation = dg.AssetObservation(pipeline.key(each.asset), description=news, metadata=_metadata(each))
            instance.report_runless_asset_event(observation)


def _is_new(pipeline: Pipeline, instance: dg.DagsterInstance, now: AssetStatus) -> bool:
    last = _last(instance, pipeline.key(now.asset))
    if last is None:
        return bool(now.causes)
    return any(last[name].value != value.value for name, value in _metadata(now).items())


def _last(instance: dg.DagsterInstance, key: dg.AssetKey) -> Mapping[str, Any] | None:
    """The metadata of the latest observation, if it is one of ours."""
    for record in instance.fetch_observations(key, limit=1).records:
        observation = record.asset_observation
        if observation is not None and {STATE, CAUSES} <= observation.metadata.keys():
            return observation.metadata
    return None


def _metadata(found: AssetStatus) -> dict[str, dg.MetadataValue[Any]]:
    causes = verbatim(found.causes) if found.causes else dg.MetadataValue.md("none")
    return {STATE: dg.MetadataValue.text(found.state), CAUSES: causes}

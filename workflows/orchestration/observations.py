"""Stale assets and their causes in Dagster's UI: an observation of each asset with changed causes.

An observation has the texts of `pedigree status`. It lacks a data version, so it neither makes assets stale nor starts a run.
The latest observation is in Dagster's records, so each change is reported once, by any process. A sensor reads these records
only if its cursor shows a new state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any, Self

import dagster as dg

from assets.lineage.history import History, latest_of
from assets.pipeline.pipeline import Pipeline
from assets.views.metadata import verbatim
from assets.views.pages import publish_card
from training.contract.identity.fingerprint import fingerprint
from workflows.orchestration.resources import build_services, pedigree_home
from workflows.state.expected_state import expect_state
from workflows.state.status import AssetStatus, judge

_AFTER_REASON = " | "
_REASON_CHARACTERS = 300
_LATEST = 10
NOTHING = "nothing"  # requested or observed so far
STATE, CAUSES = "state", "causes"

_SECONDS_BETWEEN_LOOKS = 60
_SECONDS_BETWEEN_LOOKS_AT_A_VARIANT = 600  # there may be a hundred, and Dagster records each tick


@dataclass(frozen=True)
class Cursor:
    """A sensor's memory: the state it last requested a run for, when, and a digest of the last observation.

    It is never empty, as Dagster keeps the old cursor for an empty one. Its text begins with the reason of the latest tick:
    the sensor's page shows the cursor, but no skip reason.
    """

    asked: str = NOTHING
    when: float = 0.0
    observed: str = NOTHING

    @classmethod
    def parse(cls, text: str | None) -> Self:
        asked, when, observed, *_ = [*(text or NOTHING).rpartition(_AFTER_REASON)[2].split(" "), "", ""]
        return cls(asked, float(when or 0), observed or NOTHING)

    def text(self, reason: str) -> str:
        """Return the cursor for Dagster. `reason`: the result of this tick, for the user."""
        shown = shorten(reason, _REASON_CHARACTERS, placeholder=" ...")
        return f"{shown}{_AFTER_REASON}{self.asked} {self.when:.0f} {self.observed}"

    def skip(self, reason: str) -> dg.SensorResult:
        """Return the result of a tick that requests nothing."""
        return dg.SensorResult(skip_reason=dg.SkipReason(reason), cursor=self.text(reason))

    def observing(self, instance: dg.DagsterInstance, pipeline: Pipeline, found: Sequence[AssetStatus]) -> Self:
        """Report the new part of `found`. Return the cursor after that."""
        seen = fingerprint("observed", [[status.asset, status.state, list(status.causes)] for status in found])
        if seen != self.observed:
            observe(pipeline, instance, found)
        return replace(self, observed=seen)


def seconds_between_looks(pipeline: Pipeline) -> int:
    return _SECONDS_BETWEEN_LOOKS if pipeline.variant is None else _SECONDS_BETWEEN_LOOKS_AT_A_VARIANT


def status_sensor(pipeline: Pipeline) -> dg.SensorDefinition:
    """Return a sensor that reports stale assets with their causes, and requests nothing."""

    @dg.sensor(
        name=f"{pipeline.identifier}_status_sensor",
        minimum_interval_seconds=seconds_between_looks(pipeline),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Reports stale assets of {pipeline.name} and the causes, on their pages. It starts no run.",
    )
    def look(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        services = build_services(pedigree_home())
        history = History(context.instance, pipeline, services.store)
        cursor = Cursor.parse(context.cursor)
        if not any(history.latest(asset).fingerprint for asset in history.assets):
            return cursor.skip(f"{pipeline.name} was never materialized")
        found = list(judge(history, services, expect_state(pipeline, services)))
        stale = [status.asset for status in found if status.state == "stale"]
        summary = f"stale: {', '.join(stale)}" if stale else "nothing is stale"
        return cursor.observing(context.instance, pipeline, found).skip(summary)

    return look


def observe(pipeline: Pipeline, instance: dg.DagsterInstance, found: Sequence[AssetStatus]) -> None:
    """Report the state and the causes of each asset if they changed since the last report.

    A fresh asset is reported only after a report with causes. A missing one is not, as Dagster shows it.
    """
    for status in found:
        if status.state != "missing" and _is_new(pipeline, instance, status):
            description = f"It is {status.state}, for these causes." if status.causes else "It is fresh again."
            observation = dg.AssetObservation(
                pipeline.key(status.asset), description=description, metadata=_metadata(status)
            )
            instance.report_runless_asset_event(observation)
            key = pipeline.key(status.asset)
            metadata = latest_of(instance, [key])[key].metadata
            publish_card(pedigree_home(), pipeline, status.asset, metadata, "; ".join(status.causes))


def _is_new(pipeline: Pipeline, instance: dg.DagsterInstance, status: AssetStatus) -> bool:
    last = _last_observation(instance, pipeline.key(status.asset))
    if last is None:
        return bool(status.causes)
    return any(last[name].value != value.value for name, value in _metadata(status).items())


def _last_observation(instance: dg.DagsterInstance, key: dg.AssetKey) -> Mapping[str, Any] | None:
    """Return the metadata of the latest observation that was made here. A run records others: queues and links."""
    for record in instance.fetch_observations(key, limit=_LATEST).records:
        observation = record.asset_observation
        if observation is not None and {STATE, CAUSES} <= observation.metadata.keys():
            return observation.metadata
    return None


def _metadata(status: AssetStatus) -> dict[str, dg.MetadataValue[Any]]:
    causes = verbatim(status.causes) if status.causes else dg.MetadataValue.md("none")
    return {STATE: dg.MetadataValue.text(status.state), CAUSES: causes}

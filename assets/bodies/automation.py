"""When an asset is materialized automatically: once for every change of content, never for a repetition.

    cause          the asset's code version changed (its algorithm, or fields of the recipe that it reads); or the data version
                   of a dependency did; or a dependency is requested at this tick; or the asset went missing; or blocking
                   checks that had failed have passed
    and            its latest materialization has another code version, or was made from other data versions, than those of
                   now, and no person has stopped the last run that was to make it, unless something has changed since; or a
                   dependency is requested at this tick
    and            no dependency is missing, neither the asset nor a dependency is in progress, and no blocking check of a
                   dependency has failed

A run that a person stops (its status is CANCELED) has handled every cause that is older than its end. What it was to make is
requested again only after something of the recipe has changed since: the code version or the data version of any asset. A
change between the end of the run and the tick before counts as newer than the end.

A cause is remembered until the asset is requested, so one that arises during a run, or while a check has failed, is handled
afterwards. The end of a materialization does not handle it, since that may have begun before the cause arose: the data
versions it was made from tell. Nor does a request that is older than the cause, though Dagster sees both at one tick. What
failed is requested again only if something upstream has changed since.

Since requested dependencies count, one change gives one run of everything downstream, in which the store answers for
whatever the change does not affect. `AutomationCondition.eager()` would not do: it fires for every materialization,
identical or not.
"""

import functools
from dataclasses import dataclass
from typing import Any

import dagster as dg

from assets.execution.stopped_runs import StoppedRun, find_stops
from assets.lineage.history import Materialization, latest_of
from assets.pipeline.graph import GRAPH
from training.contract.identity.fingerprint import fingerprint, short

_Condition = dg.AutomationCondition
_NO_RUN = "-"  # in a cursor


class _MadeFromOthers(dg.AutomationCondition[dg.AssetKey]):
    """What Dagster's UI calls stale or missing, for which it has no condition."""

    @property
    def name(self) -> str:
        return "made_from_others"

    def evaluate(self, context: dg.AutomationContext[dg.AssetKey]) -> dg.AutomationResult[dg.AssetKey]:
        node = context.asset_graph.get(context.key)
        recorded = _seen(context.asset_graph_view, context.key.path[0]).recorded
        made = recorded[context.key]
        is_of_now = (
            made.fingerprint is not None
            and made.code_version == node.code_version
            and all(made.input_version(key) == recorded[key].fingerprint for key in node.parent_keys)
        )
        return dg.AutomationResult(context, context.get_empty_subset() if is_of_now else context.candidate_subset)


class _Stopped(dg.AutomationCondition[dg.AssetKey]):
    """Whether a person has stopped the last run that was to make the asset, and nothing of its recipe has changed since.

    The cursor has the run, the code at its end, and the code at this tick. The code at the end is that of the tick before.
    """

    @property
    def name(self) -> str:
        return "stopped"

    def evaluate(self, context: dg.AutomationContext[dg.AssetKey]) -> dg.AutomationResult[dg.AssetKey]:
        seen = _seen(context.asset_graph_view, context.key.path[0])
        stop = seen.stops.get(seen.recorded[context.key].last_run or "")
        codes = {key: context.asset_graph.get(key).code_version or "" for key in seen.recorded}
        now = short(fingerprint("codes", sorted(codes.values())))
        known, then, before = (context.cursor or f"{_NO_RUN} {now} {now}").split(" ")
        if stop is None:
            return dg.AutomationResult(context, context.get_empty_subset(), cursor=f"{_NO_RUN} {now} {now}")
        then = then if known == stop.run else before
        is_as_then = (now == then or stop.was_to_use(codes)) and not seen.has_changed_since(stop)
        subset = context.candidate_subset if is_as_then else context.get_empty_subset()
        return dg.AutomationResult(context, subset, cursor=f"{stop.run} {then} {now}")


@dataclass(frozen=True)
class _Seen:
    """What Dagster has recorded of a pipeline, and the runs among them that a person has stopped, by id."""

    instance: dg.DagsterInstance
    recorded: dict[dg.AssetKey, Materialization]
    stops: dict[str, StoppedRun]

    def has_changed_since(self, stop: StoppedRun) -> bool:
        """Whether an asset has another data version than at the end of that run."""
        later = (key for key, made in self.recorded.items() if made.time > stop.time and made.run != stop.run)
        return any(self._version_at(key, stop.time) != self.recorded[key].fingerprint for key in later)

    def _version_at(self, key: dg.AssetKey, time: float) -> str | None:
        found = self.instance.fetch_materializations(dg.AssetRecordsFilter(key, before_timestamp=time), limit=1)
        made = [event for record in found.records if (event := record.asset_materialization) is not None]
        return Materialization.of(made[0]).fingerprint if made else None


@functools.lru_cache(maxsize=1)
def _seen(tick: Any, pipeline: str) -> _Seen:
    """What is recorded of a pipeline; `tick` is Dagster's view of all assets, another one each time it looks.

    Asked once, and not by each asset: a hundred variants have a hundred sensors, which look twice a minute.
    """
    recorded = latest_of(tick.instance, [dg.AssetKey([pipeline, asset]) for asset in GRAPH])
    return _Seen(tick.instance, recorded, find_stops(tick.instance, recorded.values()))


_ABOVE_ANEW: dg.AutomationCondition[Any] = _Condition.any_deps_match(_Condition.will_be_requested())

_CHANGED: dg.AutomationCondition[Any] = (
    _Condition.newly_missing()
    | _Condition.code_version_changed()
    | _Condition.any_deps_match(_Condition.data_version_changed())
    | _ABOVE_ANEW
    | _Condition.all_deps_blocking_checks_passed().newly_true()
)

ON_CONTENT: dg.AutomationCondition[Any] = (
    _CHANGED.since((~_CHANGED & _Condition.newly_requested()) | _Condition.initial_evaluation())
    & ((_MadeFromOthers() & ~_Stopped()) | _ABOVE_ANEW)
    & ~_Condition.any_deps_missing()
    & ~_Condition.any_deps_in_progress()
    & ~_Condition.in_progress()
    & _Condition.all_deps_blocking_checks_passed()
).with_label("content changed")

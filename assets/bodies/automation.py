"""The automation condition of assets: materialize once for every change of content.

An asset is requested if all of the following hold:

    cause          the asset's code version changed (its algorithm, or fields of the recipe it reads); or the data version of
                   a dependency changed; or a dependency is requested at this tick; or the asset went missing; or blocking
                   checks passed after a failure
    need           its latest materialization has another code version, or other data versions of inputs, than now, and the
                   user did not stop the last run that planned it, unless something changed since; or a dependency is
                   requested at this tick
    readiness      no input is missing, neither the asset nor a dependency is in progress, and no blocking check of a
                   dependency has failed

A run stopped by the user (status CANCELED) has handled all causes older than its end. Its assets are requested again only after
a code version or data version of any asset of the recipe changes. A change between the end of the run and the previous tick
counts as newer than the end.

A cause is kept until the asset is requested. So a cause that arises during a run, or while a check has failed, is handled
afterwards. The end of a materialization does not handle it, because the materialization may have begun earlier; the data
versions of its inputs decide. A request older than the cause does not handle it either, though Dagster sees both at one tick.
Failed assets are requested again only after a change upstream.

Because requested dependencies count, one change leads to one run of all assets downstream. Unaffected assets are reused from
the store in it. `AutomationCondition.eager()` does not fit: it fires for every materialization, identical or not.
"""

import functools
from dataclasses import dataclass
from typing import Any

import dagster as dg

from assets.execution.stopped_runs import StoppedRun, find_stops
from assets.lineage.history import Materialization, latest_of
from assets.pipeline.graph import GRAPH
from training.contract.identity.fingerprint import fingerprint, short
from training.contract.protocol.artifacts import AssetName

_Condition = dg.AutomationCondition
_NO_RUN = "-"  # in a cursor


class _StaleOrMissing(dg.AutomationCondition[dg.AssetKey]):
    """The states stale and missing of Dagster's UI, for which Dagster lacks a condition."""

    @property
    def name(self) -> str:
        return "made_from_others"

    def evaluate(self, context: dg.AutomationContext[dg.AssetKey]) -> dg.AutomationResult[dg.AssetKey]:
        node = context.asset_graph.get(context.key)
        recorded = _read_records(context.asset_graph_view, context.key.path[0]).recorded
        latest = recorded[context.key]
        is_fresh = (
            latest.fingerprint is not None
            and latest.code_version == node.code_version
            and all(latest.input_version(key) == recorded[key].fingerprint for key in node.parent_keys)
        )
        return dg.AutomationResult(context, context.get_empty_subset() if is_fresh else context.candidate_subset)


class _NeverAnInput(dg.AutomationCondition[dg.AssetKey]):
    """No asset is made from it; a run only makes it earlier. A home made before the asset existed lacks it."""

    @property
    def name(self) -> str:
        return "never_an_input"

    def evaluate(self, context: dg.AutomationContext[dg.AssetKey]) -> dg.AutomationResult[dg.AssetKey]:
        is_so = context.key.path[-1] == AssetName.PREQUENTIAL_SCORES
        return dg.AutomationResult(context, context.candidate_subset if is_so else context.get_empty_subset())


class _Stopped(dg.AutomationCondition[dg.AssetKey]):
    """The user stopped the last run that planned the asset, and its recipe has not changed since.

    The cursor holds the run, the code at its end, and the code at this tick, separated by spaces. The code of the previous tick
    counts as the code at the end.
    """

    @property
    def name(self) -> str:
        return "stopped"

    def evaluate(self, context: dg.AutomationContext[dg.AssetKey]) -> dg.AutomationResult[dg.AssetKey]:
        records = _read_records(context.asset_graph_view, context.key.path[0])
        stop = records.stops.get(records.recorded[context.key].last_run or "")
        codes = {key: context.asset_graph.get(key).code_version or "" for key in records.recorded}
        code = short(fingerprint("codes", sorted(codes.values())))
        cursor_run, code_at_end, previous_code = (context.cursor or f"{_NO_RUN} {code} {code}").split(" ")
        if stop is None:
            return dg.AutomationResult(context, context.get_empty_subset(), cursor=f"{_NO_RUN} {code} {code}")
        code_at_end = code_at_end if cursor_run == stop.run else previous_code
        is_unchanged = (code == code_at_end or stop.was_to_use(codes)) and not records.has_changed_since(stop)
        subset = context.candidate_subset if is_unchanged else context.get_empty_subset()
        return dg.AutomationResult(context, subset, cursor=f"{stop.run} {code_at_end} {code}")


@dataclass(frozen=True)
class _Records:
    """Dagster's records of a pipeline: latest materializations, and their last runs stopped by the user, by id."""

    instance: dg.DagsterInstance
    recorded: dict[dg.AssetKey, Materialization]
    stops: dict[str, StoppedRun]

    def has_changed_since(self, stop: StoppedRun) -> bool:
        """Return whether an asset has another data version than at the end of the stopped run."""
        later = (key for key, latest in self.recorded.items() if latest.time > stop.time and latest.run != stop.run)
        return any(self._version_at(key, stop.time) != self.recorded[key].fingerprint for key in later)

    def _version_at(self, key: dg.AssetKey, time: float) -> str | None:
        page = self.instance.fetch_materializations(dg.AssetRecordsFilter(key, before_timestamp=time), limit=1)
        events = [event for record in page.records if (event := record.asset_materialization) is not None]
        return Materialization.of(events[0]).fingerprint if events else None


@functools.lru_cache(maxsize=1)
def _read_records(tick: Any, pipeline: str) -> _Records:
    """Read the records of a pipeline. `tick`: Dagster's view of all assets, a new one for each evaluation.

    The cache makes this one query per tick, not one per asset: a hundred variants have a hundred sensors, each evaluated twice
    a minute.
    """
    recorded = latest_of(tick.instance, [dg.AssetKey([pipeline, asset]) for asset in GRAPH])
    return _Records(tick.instance, recorded, find_stops(tick.instance, recorded.values()))


_DEPENDENCY_REQUESTED: dg.AutomationCondition[Any] = _Condition.any_deps_match(_Condition.will_be_requested())

_CHANGED: dg.AutomationCondition[Any] = (
    _Condition.newly_missing()
    | _Condition.code_version_changed()
    | _Condition.any_deps_match(_Condition.data_version_changed())
    | _DEPENDENCY_REQUESTED
    | _Condition.all_deps_blocking_checks_passed().newly_true()
)

ON_CONTENT: dg.AutomationCondition[Any] = (
    _CHANGED.since((~_CHANGED & _Condition.newly_requested()) | _Condition.initial_evaluation())
    & ((_StaleOrMissing() & ~_Stopped()) | _DEPENDENCY_REQUESTED)
    & ~_Condition.any_deps_match(_Condition.missing() & ~_Condition.will_be_requested() & ~_NeverAnInput())
    & ~_Condition.any_deps_in_progress()
    & ~_Condition.in_progress()
    & _Condition.all_deps_blocking_checks_passed()
).with_label("content changed")

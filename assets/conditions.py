"""When an asset is materialized automatically: once for every change of content, never for a repetition.

    cause          the asset's code version changed (its algorithm, or fields of the recipe that it reads); or the data version
                   of a dependency did; or a dependency is requested at this tick; or the asset went missing; or blocking
                   checks that had failed have passed
    and            its latest materialization has another code version, or was made from other data versions, than those of
                   now; or a dependency is requested at this tick
    and            no dependency is missing, neither the asset nor a dependency is in progress, and no blocking check of a
                   dependency has failed

A cause is remembered until the asset is requested, so one that arises during a run, or while a check has failed, is handled
afterwards. The end of a materialization does not handle it, since that may have begun before the cause arose: the data
versions it was made from tell. Nor does a request that is older than the cause, though Dagster sees both at one tick. What
failed is requested again only if something upstream has changed since.

Since requested dependencies count, one change gives one run of everything downstream, in which the store answers for
whatever the change does not affect. `AutomationCondition.eager()` would not do: it fires for every materialization,
identical or not.
"""

import functools
from typing import Any

import dagster as dg

from assets.graph import GRAPH
from assets.materialized import Materialization, latest_of

_Condition = dg.AutomationCondition


class _MadeFromOthers(dg.AutomationCondition[dg.AssetKey]):
    """What Dagster's UI calls stale or missing, for which it has no condition."""

    @property
    def name(self) -> str:
        return "made_from_others"

    def evaluate(self, context: dg.AutomationContext[dg.AssetKey]) -> dg.AutomationResult[dg.AssetKey]:
        node = context.asset_graph.get(context.key)
        recorded = _recorded(context.asset_graph_view, context.key.path[0])
        made = recorded[context.key]
        is_of_now = (
            made.fingerprint is not None
            and made.code_version == node.code_version
            and all(made.input_version(key) == recorded[key].fingerprint for key in node.parent_keys)
        )
        return dg.AutomationResult(context, context.get_empty_subset() if is_of_now else context.candidate_subset)


@functools.lru_cache(maxsize=1)
def _recorded(tick: Any, pipeline: str) -> dict[dg.AssetKey, Materialization]:
    """What was last materialized of a pipeline; `tick` is Dagster's view of all assets, another one each time it looks.

    Asked once, and not by each asset: a hundred variants have a hundred sensors, which look twice a minute.
    """
    return latest_of(tick.instance, [dg.AssetKey([pipeline, asset]) for asset in GRAPH])


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
    & (_MadeFromOthers() | _ABOVE_ANEW)
    & ~_Condition.any_deps_missing()
    & ~_Condition.any_deps_in_progress()
    & ~_Condition.in_progress()
    & _Condition.all_deps_blocking_checks_passed()
).with_label("content changed")

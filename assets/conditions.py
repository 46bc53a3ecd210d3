"""When an asset is materialized without anybody asking: once for every change of content, and never for a repetition.

    cause          the code version of the asset changed (its algorithm, or fields of the recipe that it reads), or the data
                   version of something it is made from did, or that is about to be made anew; or it went missing; or blocking
                   checks that held it up have passed
    and            its latest materialization was made by another code version or from other data versions than those of now,
                   or something it is made from is about to be made anew
    and            everything it is made from is there, nothing of it or of the asset is being made, and no blocking check of
                   what it is made from has failed

A cause is remembered until the asset is asked for: one that comes while a check has failed, or while a run is in progress,
is answered afterwards. That a materialization ended does not answer it, since that may have begun before the cause came: what
it was made from tells. Nor does a request that is older than the cause, though Dagster sees both at the same moment. What
failed is asked for again only if something above it had become another since it was asked for: so once.

Because of "about to be made anew" one change gives one run of all that lies below it, in the order of the graph; there the
store answers for whatever the change does not reach, and a failed blocking check stops what follows. `eager()` is another
thing: it fires for every materialization, identical or not.
"""

from typing import Any

import dagster as dg

from assets.recorded import data_version, latest

_Condition = dg.AutomationCondition


class _MadeFromOthers(dg.AutomationCondition[dg.AssetKey]):
    """What Dagster's UI calls stale or missing, for which it has no condition."""

    @property
    def name(self) -> str:
        return "made_from_others"

    def evaluate(self, context: dg.AutomationContext[dg.AssetKey]) -> dg.AutomationResult[dg.AssetKey]:
        node, instance = context.asset_graph.get(context.key), context.asset_graph_view.instance
        made = latest(instance, context.key)
        is_of_now = (
            made is not None
            and made.code_version == node.code_version
            and all(made.input_version(key) == data_version(instance, key) for key in node.parent_keys)
        )
        return dg.AutomationResult(context, context.get_empty_subset() if is_of_now else context.candidate_subset)


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

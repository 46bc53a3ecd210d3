"""When an asset is materialized automatically: once for every change of content, never for a repetition.

    cause          the asset's code version changed (its algorithm, or fields of the recipe that it reads); or the data version
                   of a dependency did; or a dependency is requested at this tick; or the asset went missing; or blocking
                   checks that had failed have passed
    and            no dependency is missing, neither the asset nor a dependency is in progress, and no blocking check of a
                   dependency has failed

A cause is remembered until the asset is requested or materialized, so one that arises during a run, or while a check has
failed, is handled afterwards. Since requested dependencies count, one change gives one run of everything downstream, in
which the store answers for whatever the change does not affect. `AutomationCondition.eager()` would not do: it fires for
every materialization, identical or not.
"""

from typing import Any

import dagster as dg

_Condition = dg.AutomationCondition

_CHANGED: dg.AutomationCondition[Any] = (
    _Condition.newly_missing()
    | _Condition.code_version_changed()
    | _Condition.any_deps_match(_Condition.data_version_changed() | _Condition.will_be_requested())
    | _Condition.all_deps_blocking_checks_passed().newly_true()
)

ON_CONTENT: dg.AutomationCondition[Any] = (
    _CHANGED.since_last_handled()
    & ~_Condition.any_deps_missing()
    & ~_Condition.any_deps_in_progress()
    & ~_Condition.in_progress()
    & _Condition.all_deps_blocking_checks_passed()
).with_label("content changed")

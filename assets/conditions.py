"""When an asset is materialized without anybody asking: once for every change of content, and never for a repetition.

    cause          the code version of the asset changed (its algorithm, or fields of the recipe that it reads), or the data
                   version of something it is made from did, or that is about to be made anew; or it went missing; or blocking
                   checks that held it up have passed
    and            everything it is made from is there, nothing of it or of the asset is being made, and no blocking check of
                   what it is made from has failed

A cause is remembered until the asset is requested or materialized: one that comes while a check has failed, or while a run is
in progress, is answered afterwards. Because of "about to be made anew" one change gives one run of all that lies below it, in
the order of the graph; there the store answers for whatever the change does not reach, and a failed blocking check stops what
follows. `eager()` is another thing: it fires for every materialization, identical or not.
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

"""Waiting for a slot in a pool, within a run.

Dagster's own wait (1.13) asks again at once, which keeps a core busy for as long as the other run trains: the interval that
`InstanceConcurrencyContext.interval_to_next_pending_claim_check` gives is the least of some times and zero. It hears no
Ctrl-C and no termination either, and does not see that the run which has the slot is dead. And where that run gives the slot
back just while this one takes its place in the queue, nobody tells this one.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import dagster as dg
from dagster._core.execution.plan.active import ActiveExecution, _pool_key_for_step
from dagster._core.storage.event_log import SqlEventLogStorage
from dagster._utils.interrupts import pop_captured_interrupt
from sqlalchemy.exc import DatabaseError

from assets.execution.interruption import without_stack_traces
from assets.execution.run_liveness import fail_orphaned_runs

_SECONDS_ASLEEP = 1.0
_SECONDS_BETWEEN_LOOKS = 5.0
_LOG = logging.getLogger(__name__)


def wait_patiently(home: Callable[[], Path]) -> None:
    """Let every run of this process that waits sleep, end when it is told to, and take the slots of dead runs in `home`."""
    told = set()
    next_look = 0.0

    def sleep_til_ready(waiting: ActiveExecution) -> None:
        nonlocal next_look
        if pop_captured_interrupt():
            without_stack_traces()
            raise dg.DagsterExecutionInterruptedError
        slots = waiting._instance_concurrency_context
        if slots is not None and time.monotonic() >= next_look:
            next_look = time.monotonic() + _SECONDS_BETWEEN_LOOKS
            pools = {_pool_key_for_step(waiting.get_step_by_key(step)) for step in slots.pending_claim_steps()}
            with suppress(DatabaseError):  # what cannot be seen now is seen at the next look
                for pool in sorted(filter(None, pools)):
                    look(slots._instance, pool)
        time.sleep(_SECONDS_ASLEEP)

    def look(instance: dg.DagsterInstance, pool: str) -> None:
        fail_orphaned_runs(instance, home())
        storage = instance.event_log_storage
        found = storage.get_concurrency_info(pool)
        runs = ", ".join(sorted(found.active_run_ids))
        if runs and (pool, runs) not in told:
            _LOG.warning("waiting for the pool %s, taken by run %s", pool, runs)
            told.add((pool, runs))
        if found.assigned_step_count <= found.active_slot_count < found.slot_count:  # a free slot is nobody's
            assert isinstance(storage, SqlEventLogStorage), "no other storage has slots"
            storage.assign_pending_steps([pool])

    ActiveExecution.sleep_til_ready = sleep_til_ready  # type: ignore[assignment]

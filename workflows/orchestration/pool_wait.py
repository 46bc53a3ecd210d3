"""Waiting for a slot in a pool, within a run.

Dagster's wait (1.13) keeps a core busy (dagster_patches.py). It ignores Ctrl-C and termination, and does not notice the death
of the run with the slot. If that run frees the slot just while this one enters the queue, this one is never assigned to it.
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
from workflows.orchestration.dagster_patches import replace_pool_wait

_SECONDS_ASLEEP = 1.0
_SECONDS_BETWEEN_CHECKS = 5.0
_LOG = logging.getLogger(__name__)


def wait_patiently(home: Callable[[], Path]) -> None:
    """Let waiting runs of this process sleep, end on request, and take the slots of dead runs in `home`."""
    reported = set()
    next_check = 0.0

    def sleep_til_ready(waiting: ActiveExecution) -> None:
        nonlocal next_check
        if pop_captured_interrupt():
            without_stack_traces()
            raise dg.DagsterExecutionInterruptedError
        slots = waiting._instance_concurrency_context
        if slots is not None and time.monotonic() >= next_check:
            next_check = time.monotonic() + _SECONDS_BETWEEN_CHECKS
            pools = {_pool_key_for_step(waiting.get_step_by_key(step)) for step in slots.pending_claim_steps()}
            with suppress(DatabaseError):  # the next check tries again
                for pool in sorted(filter(None, pools)):
                    check_pool(slots._instance, pool, slots._run_id)
        time.sleep(_SECONDS_ASLEEP)

    def check_pool(instance: dg.DagsterInstance, pool: str, waiting: str) -> None:
        fail_orphaned_runs(instance, home())
        storage = instance.event_log_storage
        info = storage.get_concurrency_info(pool)
        runs = ", ".join(sorted(info.active_run_ids))
        if runs and (pool, runs) not in reported:
            message = f"waiting for the pool {pool}, taken by run {runs}"
            _LOG.warning(message)
            if (run := instance.get_run_by_id(waiting)) is not None:
                instance.report_engine_event(message, run)  # Dagster's own line is at the level DEBUG
            reported.add((pool, runs))
        if info.assigned_step_count <= info.active_slot_count < info.slot_count:  # a slot is free and not assigned
            assert isinstance(storage, SqlEventLogStorage), "no other storage has slots"
            storage.assign_pending_steps([pool])

    replace_pool_wait(sleep_til_ready)

"""Waiting for a slot in a pool, within a run.

Dagster's own wait (1.13) asks again at once, which keeps a core busy for as long as the other run trains: the interval that
`InstanceConcurrencyContext.interval_to_next_pending_claim_check` gives is the least of some times and zero. It hears no
Ctrl-C and no termination either, and does not see that the run which has the slot is dead.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import dagster as dg
from dagster._core.execution.plan.active import ActiveExecution
from dagster._utils.interrupts import pop_captured_interrupt

from assets.process import close_dead_runs

_SECONDS_BETWEEN_LOOKS = 1.0
_LOG = logging.getLogger(__name__)


def wait_patiently(home: Callable[[], Path]) -> None:
    """Let every run of this process that waits sleep, end when it is told to, and take the slots of dead runs in `home`."""
    told = set()

    def sleep_til_ready(waiting: ActiveExecution) -> None:
        if pop_captured_interrupt():
            raise dg.DagsterExecutionInterruptedError
        if (slots := waiting._instance_concurrency_context) is not None:
            instance = slots._instance
            for step in slots.pending_claim_steps():
                pool = waiting.get_step_by_key(step).pool
                assert pool is not None, "only a step of a pool waits for a slot"
                runs = ", ".join(sorted(instance.event_log_storage.get_concurrency_info(pool).active_run_ids))
                if runs and (pool, runs) not in told:
                    _LOG.warning("waiting for the pool %s, taken by run %s", pool, runs)
                    told.add((pool, runs))
                close_dead_runs(instance, home())
        time.sleep(_SECONDS_BETWEEN_LOOKS)

    ActiveExecution.sleep_til_ready = sleep_til_ready  # type: ignore[assignment]

"""What we replace in Dagster."""

from collections.abc import Callable

from dagster._core.execution.plan.active import ActiveExecution

from training.contract.system.patches import replace_attribute


def replace_pool_wait(wait: Callable[[ActiveExecution], None]) -> None:
    """Let a run call `wait` again and again while none of its steps can start, for example without a slot in a pool.

    Dagster's own wait polls without a pause and keeps a core busy during the other run's training:
    `InstanceConcurrencyContext.interval_to_next_pending_claim_check` returns the minimum of some times and zero.
    """
    otherwise = "a run that waits for a pool keeps a core busy, and does not notice the death of the run with the slot"
    replace_attribute(ActiveExecution, "sleep_til_ready", lambda _: wait, "Dagster 1.13", otherwise)

"""Dagster has the wait that we replace, and calls it. test_pool.py shows what our wait does."""

import time

import dagster as dg
import pytest
from dagster._core.execution.plan.active import ActiveExecution

from workflows.orchestration.dagster_patches import replace_pool_wait


def test_replace_pool_wait_dagster_calls_the_replacement(monkeypatch: pytest.MonkeyPatch):
    """A step that retries after a second has to wait."""
    monkeypatch.setattr(ActiveExecution, "sleep_til_ready", ActiveExecution.sleep_til_ready)  # restored after the test
    waits: list[ActiveExecution] = []
    attempts: list[int] = []

    def wait(waiting: ActiveExecution) -> None:
        waits.append(waiting)
        time.sleep(0.05)

    replace_pool_wait(wait)

    @dg.op
    def refused_once() -> None:
        attempts.append(len(waits))
        if len(attempts) == 1:
            raise dg.RetryRequested(seconds_to_wait=1)

    @dg.job
    def retrying() -> None:
        refused_once()

    with dg.DagsterInstance.ephemeral() as instance:
        assert retrying.execute_in_process(instance=instance).success
    assert attempts[0] == 0 and attempts[1] == len(waits) > 0

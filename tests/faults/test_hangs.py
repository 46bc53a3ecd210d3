"""Processes that stand still: the run goes on when they do, and Ctrl-C ends all of them."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.disturbed import (
    GRACE_SECONDS,
    CommandHost,
    Undisturbed,
    check_fingerprints,
    check_next_run,
    wait_until,
)

pytestmark = pytest.mark.long

ROLES = ("rank 0", "rank 1", "torchrun", "supervisor", "pedigree")
STILL_SECONDS = 3


@pytest.mark.parametrize("role", ROLES)
def test_stopped_process_that_continues_changes_nothing(
    role: str, undisturbed: Undisturbed, host: CommandHost, tmp_path: Path, record: Callable[..., None]
) -> None:
    home, reached, go = undisturbed.without("policy", tmp_path / "home"), tmp_path / "reached", tmp_path / "go"
    do = f"while ! [ -e {go} ]; do sleep 0.02; done"
    fault = {"of": "policy", "at": "checkpoint", "reached": str(reached), "do": do}
    command = host.start(home, "run", str(undisturbed.recipe), "--json", fault=fault)
    wait_until(lambda: reached.exists() and reached.read_text(), "checkpoint")
    stopped = command.find(role)
    stopped.suspend()
    go.touch()
    time.sleep(STILL_SECONDS)
    stopped.resume()
    assert command.wait() == 0, command.output
    check_fingerprints(command.output, undisturbed)
    seconds = command.seconds_until_nothing_is_left()
    record("policy", f"{role} stands still for {STILL_SECONDS} s", "goes on", seconds, same=True)


@pytest.mark.parametrize("stage", ["tokenized_pairs", "policy", "evaluation"])
@pytest.mark.parametrize("role", ["rank 0", "supervisor"])
def test_ctrl_c_ends_a_stopped_job(
    stage: str, role: str, undisturbed: Undisturbed, host: CommandHost, tmp_path: Path, record: Callable[..., None]
) -> None:
    """A stopped process cannot handle SIGTERM, so it is killed after the grace period; so is a stopped supervisor."""
    home, reached = undisturbed.without(stage, tmp_path / "home"), tmp_path / "reached"
    fault = {"of": stage, "at": "write", "reached": str(reached), "do": "wait"}
    command = host.start(home, "run", str(undisturbed.recipe), fault=fault)
    wait_until(lambda: reached.exists() and reached.read_text(), f"write of {stage}")
    command.find(role).suspend()
    command.find("pedigree").send_signal(signal.SIGINT)
    seconds = command.seconds_until_nothing_is_left()
    assert command.wait() == 1
    assert "interrupted; " in command.output and "Traceback" not in command.output
    assert seconds < 10 * GRACE_SECONDS
    check_next_run(host, home, undisturbed)
    record(stage, f"{role} stands still, then Ctrl-C", '"interrupted"', seconds, same=True)

"""Two commands in one home at once."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.disturbed import CommandHost, Undisturbed, check_fingerprints, wait_until

pytestmark = pytest.mark.long


@pytest.mark.parametrize("stage", ["raw_preferences", "tokenized_pairs", "reference_logprobs", "policy"])
def test_second_run_waits_for_a_killed_first_one_and_takes_over(
    stage: str, undisturbed: Undisturbed, host: CommandHost, tmp_path: Path, record: Callable[..., None]
) -> None:
    home, reached = undisturbed.without(stage, tmp_path / "home"), tmp_path / "reached"
    fault = {"of": stage, "at": "write", "reached": str(reached), "do": "wait"}
    first = host.start(home, "run", str(undisturbed.recipe), fault=fault)
    wait_until(lambda: reached.exists() and reached.read_text(), f"write of {stage}")
    second = host.start(home, "run", str(undisturbed.recipe), "--json")
    lock = f"/store/locks/{stage}-"
    wait_until(lambda: _opens(second.pid, lock) or "waiting" in second.output, "wait")
    first.find("pedigree").kill()
    assert second.wait() == 0, second.output
    check_fingerprints(second.output, undisturbed)
    assert len(list((home.path / "store" / stage).iterdir())) == 1
    seconds = first.seconds_until_nothing_is_left()
    record(stage, "two runs; SIGKILL of the first", "the second waits, then takes over", seconds, same=True)


def _opens(pid: int, part: str) -> bool:
    return any(part in str(link.resolve()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink())


@pytest.mark.parametrize("stage", ["tokenized_pairs", "policy", "evaluation"])
def test_gc_beside_a_run_removes_nothing_in_use(
    stage: str, undisturbed: Undisturbed, host: CommandHost, tmp_path: Path, record: Callable[..., None]
) -> None:
    home, reached, go = undisturbed.without(stage, tmp_path / "home"), tmp_path / "reached", tmp_path / "go"
    do = f"while ! [ -e {go} ]; do sleep 0.02; done"
    fault = {"of": stage, "at": "write", "reached": str(reached), "do": do}
    command = host.start(home, "run", str(undisturbed.recipe), "--json", fault=fault)
    wait_until(lambda: reached.exists() and reached.read_text(), f"write of {stage}")
    collector = host.start(home, "gc", "--delete")
    assert collector.wait() == 0, collector.output
    go.touch()
    assert command.wait() == 0, command.output
    check_fingerprints(command.output, undisturbed)
    seconds = command.seconds_until_nothing_is_left()
    record(stage, "`pedigree gc --delete` beside a run", "both end well", seconds, same=True)


def test_two_first_runs_of_a_new_home_make_everything_once(
    undisturbed: Undisturbed, host: CommandHost, tmp_path: Path, record: Callable[..., None]
) -> None:
    home = undisturbed.without("raw_preferences", tmp_path / "home")
    shutil.rmtree(home.path)
    commands = [host.start(home, "run", str(undisturbed.recipe), "--json") for _ in range(2)]
    for command in commands:
        assert command.wait() == 0, command.output
        check_fingerprints(command.output, undisturbed)
    seconds = commands[0].seconds_until_nothing_is_left()
    record("all", "two first runs of a new home at once", "both end well", seconds, same=True)

"""Signals to each process of a run, at each stage, while the stage writes its result."""

import itertools
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.disturbed import RANKED, STAGES, CommandHost, Undisturbed, check_next_run, wait_until

pytestmark = pytest.mark.long

# What the command says, or nothing if it is killed itself.
SAYS = {
    ("rank 0", "SIGKILL"): r"(rank 0|it) was ended by SIGKILL \(the kernel does so when memory runs out\)",
    ("rank 0", "SIGSEGV"): r"(rank 0|it) was ended by SIGSEGV",
    ("rank 1", "SIGKILL"): r"rank 1 was ended by SIGKILL \(the kernel does so when memory runs out\)",
    ("torchrun", "SIGKILL"): r"it was ended by SIGKILL",
    ("supervisor", "SIGKILL"): r"its supervisor was ended by SIGKILL",
    ("pedigree", "SIGTERM"): r"interrupted",
    ("pedigree", "SIGINT"): r"interrupted",
    ("pedigree", "SIGKILL"): r"",
}
JOBS = STAGES[:-1]
FAULTS = [
    *itertools.product(JOBS, ("rank 0", "supervisor", "pedigree"), ("SIGKILL",)),
    *itertools.product(JOBS, ("pedigree",), ("SIGTERM",)),
    *itertools.product(("raw_preferences", "policy", "evaluation"), ("pedigree",), ("SIGINT",)),
    *itertools.product(RANKED, ("rank 1",), ("SIGKILL",)),
    *itertools.product(("policy", "evaluation"), ("torchrun",), ("SIGKILL",)),
    *itertools.product(("tokenized_pairs", "policy"), ("rank 0",), ("SIGSEGV",)),
]


@pytest.mark.parametrize(("stage", "role", "name"), FAULTS)
def test_signal_leaves_nothing_and_the_next_run_has_the_same_bits(
    stage: str,
    role: str,
    name: str,
    undisturbed: Undisturbed,
    host: CommandHost,
    tmp_path: Path,
    record: Callable[..., None],
) -> None:
    home, reached = undisturbed.without(stage, tmp_path / "home"), tmp_path / "reached"
    fault = {"of": stage, "at": "write", "reached": str(reached), "do": "wait"}
    command = host.start(home, "run", str(undisturbed.recipe), fault=fault)
    wait_until(lambda: reached.exists() and reached.read_text(), f"write of {stage}")
    command.find(role).send_signal(signal.Signals[name])
    seconds = command.seconds_until_nothing_is_left()
    status, text = command.wait(), " ".join(command.output.split())
    assert status == (-signal.SIGKILL if (role, name) == ("pedigree", "SIGKILL") else 1), text
    assert re.search(SAYS[role, name], text), text
    assert "Traceback" not in text
    check_next_run(host, home, undisturbed)
    said = re.search(SAYS[role, name], text)
    of = "the job's process" if role == "rank 0" and stage not in RANKED else role
    record(stage, f"{name} of {of}", f'"{said[0]}"' if said and said[0] else "no message", seconds, same=True)

"""Two real ranks under torchrun: what they make, how their failures are told, and that none of them is ever left behind."""

import contextlib
import ipaddress
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.launch.living import alive, all_gone, first_event
from training.contract.errors import JobFailed
from training.contract.protocol.events import Event
from training.contract.protocol.job import Job
from training.contract.store.store import Store
from training.launch.launcher import run_job, write_job
from training.launch.local import LocalLauncher, environment

LAUNCHER = LocalLauncher("ranked_program")
LAUNCH = Path(__file__).parent / "programs" / "launch_program.py"
MakeJob = Callable[..., Job]
pytestmark = pytest.mark.slow


def pids_of(note: Event) -> list[int]:
    return [*note["ranks"], note["torchrun"], note["supervisor"]]


def run_and_fail(job: Job, on_event: Callable[[Event], None]) -> str:
    """The message of the failure, which comes long before gloo's timeout of 30 minutes, or that of the tests."""
    with pytest.raises(JobFailed) as caught:
        run_job(LAUNCHER, job, on_event)
    return str(caught.value)


def listening(pid: int) -> list[str]:
    """The addresses on which a process accepts TCP connections, from /proc/net/tcp (hexadecimal, words little-endian)."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            sockets.add(str(link.readlink()))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                words = bytes.fromhex(fields[1].partition(":")[0])
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.append(str(ipaddress.ip_address(packed)))
    return found


def test_what_a_user_sets_stays_but_for_the_rank_of_another_launcher() -> None:
    given = {"OMP_NUM_THREADS": "3", "RANK": "7"}
    found = environment(given, processes=2)
    assert {name: found.get(name) for name in given} == {**given, "RANK": None}


@pytest.mark.system
def test_compiled_code_is_the_users_own(tmp_path: Path) -> None:
    """torch tells where its compiler keeps code that it loads; anybody can have made a folder of that name in /tmp."""
    asked = "from torch._inductor.runtime.cache_dir_utils import cache_dir; print(cache_dir())"
    given = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR")}
    for more, place in (
        ({"HOME": str(tmp_path)}, tmp_path),
        ({"TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/a"}, tmp_path / "a"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", asked], env=environment(given | more, 1), capture_output=True, text=True, check=True
        )
        assert Path(done.stdout.strip()).is_relative_to(place)
    assert "TORCHINDUCTOR_CACHE_DIR" not in environment({"HOME": str(tmp_path / "nowhere")}, 1)


def test_the_processes_of_a_machine_share_its_cores() -> None:
    """As many as there are cores have a thread each, and so has one more."""
    cores = int(environment({}, 1)["OMP_NUM_THREADS"])
    assert environment({}, cores)["OMP_NUM_THREADS"] == environment({}, cores + 1)["OMP_NUM_THREADS"] == "1"


def test_two_ranks_publish_one_artifact(make_job: MakeJob) -> None:
    job = make_job("write", ranks=2)
    run_job(LAUNCHER, job, lambda event: None)
    artifact = Store(job.store).find("policy", job.derivation.key)
    assert artifact is not None
    assert [artifact.file(f"rank-{rank}.txt").read_text() for rank in range(2)] == ["0 of 2", "1 of 2"]
    assert artifact.details["ranks"] == 2
    assert not job.staging.exists()


def test_refusal_of_one_rank_is_the_cause_though_the_other_waits_for_it(make_job: MakeJob) -> None:
    job = make_job("rank_1_refuses", ranks=2)
    message = run_and_fail(job, lambda event: None)
    assert message == (
        f"the loss at step 0 is 0.7, expected ln 2; rank 1 of the policy job failed, whose log is {job.log}"
    )


def test_unexpected_error_is_told_with_its_place_in_one_line_and_its_traceback_in_the_log(make_job: MakeJob) -> None:
    """On one rank, which runs without torchrun."""
    job = make_job("break")
    with pytest.raises(JobFailed) as caught:
        run_job(LAUNCHER, job, lambda event: None)
    cause, _, place = str(caught.value).partition(', in "')
    assert cause == "IndexError: row 12 of 10"
    assert re.fullmatch(rf'.*ranked_program\.py", line \d+; the policy job failed, whose log is {job.log}', place)
    assert 'raise IndexError("row 12 of 10")' in job.log.read_text()


def test_killed_rank_is_named_with_its_signal(make_job: MakeJob) -> None:
    """Not gloo's "connection closed" on rank 0, and not after gloo's timeout of minutes."""
    pids: list[int] = []

    def kill(note: Event) -> None:
        pids.extend(pids_of(note))
        assert all(address in ("127.0.0.1", "::1") for pid in pids for address in listening(pid))
        assert any(listening(pid) for pid in note["ranks"])
        os.kill(note["ranks"][1], signal.SIGKILL)

    message = run_and_fail(make_job("train_for_ever", ranks=2), kill)
    assert message.startswith("the policy job failed: rank 1 was ended by SIGKILL")
    assert not alive(pids)


@pytest.mark.parametrize(
    ("victim", "told", "gone"),
    [
        ("torchrun", "it was ended by SIGKILL", lambda pids: not alive(pids)),
        ("supervisor", "its supervisor was ended by SIGKILL", all_gone),
    ],
)
def test_who_is_killed_above_the_ranks_takes_them_along(
    make_job: MakeJob, victim: str, told: str, gone: Callable[[list[int]], bool]
) -> None:
    pids: list[int] = []

    def kill(note: Event) -> None:
        pids.extend(pids_of(note))
        os.kill(note[victim], signal.SIGKILL)

    assert told in run_and_fail(make_job("train_for_ever", ranks=2), kill)
    assert gone(pids)


def heed_signals() -> None:
    """Whoever runs the tests in the background of a shell may have them ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_job_whose_launcher_ends(make_job: MakeJob, number: signal.Signals) -> None:
    """SIGINT goes to the process group, as Ctrl-C in a terminal does. Whoever then gets the lock finds nobody at work."""
    job = make_job("train_for_ever", ranks=2)
    write_job(job)
    launcher = subprocess.Popen(
        [sys.executable, str(LAUNCH), str(job.path), "ranked_program", "-"],
        start_new_session=True,
        preexec_fn=heed_signals,
    )
    pids = pids_of(first_event(job))
    assert len(alive(pids)) == 4
    (os.killpg if number == signal.SIGINT else os.kill)(launcher.pid, number)
    with Store(job.store).lock(job.artifact, job.derivation.key):
        at_work = alive(pids[:-1])
    assert at_work == []
    assert all_gone(pids)
    launcher.wait(timeout=60)

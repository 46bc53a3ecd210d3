"""Two real ranks under torchrun: their artifact, the messages of failures, and no process left after a job."""

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

from tests.training.launch.living import AnyEvent, alive, all_gone, first_event
from training.contract.errors import JobFailed
from training.contract.identity.file_stamps import model_stamps
from training.contract.protocol.job import Input, Job
from training.contract.store.store import Store
from training.launch.launcher import run_job, write_job
from training.launch.local import LocalEngine, environment

LOCAL = LocalEngine("ranked_program")
LAUNCH = Path(__file__).parent / "programs" / "launch_program.py"
MakeJob = Callable[..., Job]
pytestmark = pytest.mark.slow


def pids_of(note: AnyEvent) -> list[int]:
    return [*note["ranks"], note["torchrun"], note["supervisor"]]


def run_and_fail(job: Job, on_event: Callable[[AnyEvent], None]) -> str:
    """Run the job and return the message of its failure. It comes long before gloo's timeout of 30 minutes."""
    with pytest.raises(JobFailed) as caught:
        run_job(LOCAL, job, on_event)
    return str(caught.value)


def listening(pid: int) -> list[str]:
    """Return the addresses on which a process accepts TCP connections.

    In /proc/net/tcp, an address is hexadecimal, in little-endian words of four bytes.
    """
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            sockets.add(str(link.readlink()))
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                words = bytes.fromhex(fields[1].partition(":")[0])
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                addresses.append(str(ipaddress.ip_address(packed)))
    return addresses


def test_environment_keeps_inherited_variables_except_the_rank() -> None:
    inherited = {"OMP_NUM_THREADS": "3", "RANK": "7", "PET_NNODES": "4"}
    variables = environment(inherited, processes=2)
    assert {name: variables.get(name) for name in inherited} == {**inherited, "RANK": None, "PET_NNODES": None}


@pytest.mark.system
def test_environment_puts_compiled_code_in_a_folder_of_the_user(tmp_path: Path) -> None:
    """torch loads code from its cache. The default is a folder in /tmp that another user may own."""
    program = "from torch._inductor.runtime.cache_dir_utils import cache_dir; print(cache_dir())"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR")}
    for variables, folder in (
        ({"HOME": str(tmp_path)}, tmp_path),
        ({"TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/a"}, tmp_path / "a"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment(inherited | variables, 1),
            capture_output=True,
            text=True,
            check=True,
        )
        assert Path(done.stdout.strip()).is_relative_to(folder)
    assert "TORCHINDUCTOR_CACHE_DIR" not in environment({"HOME": str(tmp_path / "nowhere")}, 1)


@pytest.mark.system
def test_start_without_loopback_says_how_to_turn_it_on(make_job: MakeJob, tmp_path: Path) -> None:
    """In a new network namespace, `lo` is down. Gloo would name an address family."""
    job = make_job("write", ranks=2)
    write_job(job)
    command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, str(LAUNCH), str(job.path)]
    done = subprocess.run([*command, "ranked_program", str(tmp_path)], capture_output=True, text=True)
    if "unshare" in done.stderr and os.environ.get("CI") != "true":
        pytest.skip("a network namespace is not permitted here")
    assert "`ip link set lo up`" in done.stderr and "[loopback-down]" in done.stderr


def test_environment_divides_the_cores_among_the_processes() -> None:
    """A process has at least one thread."""
    cores = int(environment({}, 1)["OMP_NUM_THREADS"])
    assert environment({}, cores)["OMP_NUM_THREADS"] == environment({}, cores + 1)["OMP_NUM_THREADS"] == "1"


def test_run_job_of_two_ranks_publishes_one_artifact(make_job: MakeJob) -> None:
    job = make_job("write", ranks=2)
    run_job(LOCAL, job, lambda event: None)
    artifact = Store(job.store).find("policy", job.derivation.key)
    assert artifact is not None
    assert [artifact.file(f"rank-{rank}.txt").read_text() for rank in range(2)] == ["0 of 2", "1 of 2"]
    assert artifact.details.notes == ("2 ranks",)
    assert not job.staging.exists()


def test_run_job_ignores_the_options_of_another_torchrun(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubeflow Trainer sets these variables in its containers."""
    options = {"NNODES": "2", "NPROC_PER_NODE": "8", "NODE_RANK": "1", "MASTER_ADDR": "nowhere", "MASTER_PORT": "29500"}
    for name, value in options.items():
        monkeypatch.setenv(f"PET_{name}", value)
    job = make_job("write", ranks=2)
    run_job(LOCAL, job, lambda event: None)
    artifact = Store(job.store).find("policy", job.derivation.key)
    assert artifact is not None and artifact.details.notes == ("2 ranks",)


def test_run_job_error_of_one_rank_is_the_cause_while_the_other_waits(make_job: MakeJob) -> None:
    job = make_job("rank_1_refuses", ranks=2)
    message = run_and_fail(job, lambda event: None)
    assert message.startswith("the loss at step 0 is 0.7, expected ln 2; rank 1 of ") and str(job.log) in message


def test_run_job_unexpected_error_has_its_line_and_the_log_its_traceback(make_job: MakeJob) -> None:
    """One rank runs without torchrun."""
    job = make_job("break")
    with pytest.raises(JobFailed) as caught:
        run_job(LOCAL, job, lambda event: None)
    cause, _, location = str(caught.value).partition(', in "')
    assert cause == "IndexError: row 12 of 10"
    assert re.match(r'.*ranked_program\.py", line \d+; ', location) and str(job.log) in location
    assert 'raise IndexError("row 12 of 10")' in job.log.read_text()


def test_run_job_names_a_killed_rank_and_its_signal(make_job: MakeJob) -> None:
    """The message is not gloo's "connection closed" on rank 0, and comes before gloo's timeout of minutes."""
    pids: list[int] = []

    def kill(note: AnyEvent) -> None:
        pids.extend(pids_of(note))
        assert all(address in ("127.0.0.1", "::1") for pid in pids for address in listening(pid))
        assert any(listening(pid) for pid in note["ranks"])
        os.kill(note["ranks"][1], signal.SIGKILL)

    message = run_and_fail(make_job("train_for_ever", ranks=2), kill)
    assert "rank 1 was ended by SIGKILL" in message
    assert not alive(pids)


def test_run_job_names_the_file_that_was_truncated_under_a_rank(make_job: MakeJob, tmp_path: Path) -> None:
    """The kernel ends a process that reads a mapped page beyond the end of its file."""
    (base := tmp_path / "base").mkdir()
    (weights := base / "model.safetensors").write_bytes(b"weights")
    source = Input(kind="base_model", fingerprint="a" * 64, folder=base)
    job = make_job("read_a_truncated_map", ranks=2)
    job = job.model_copy(update={"inputs": {"base_model": source}, "stamps": {"base_model": model_stamps(base)}})
    message = run_and_fail(job, lambda event: None)
    assert f"rank 1 was ended by SIGBUS because {weights} changed while it was read" in message
    assert message.endswith("[file-changed]")


@pytest.mark.parametrize(
    ("victim", "cause", "ended"),
    [
        ("torchrun", ": it was ended by SIGKILL", lambda pids: not alive(pids)),
        ("supervisor", "its supervisor was ended by SIGKILL", all_gone),
    ],
)
def test_run_job_a_kill_above_the_ranks_ends_them(
    make_job: MakeJob, victim: str, cause: str, ended: Callable[[list[int]], bool]
) -> None:
    pids: list[int] = []

    def kill(note: AnyEvent) -> None:
        pids.extend(pids_of(note))
        os.kill(note[victim], signal.SIGKILL)

    assert cause in run_and_fail(make_job("train_for_ever", ranks=2), kill)
    assert ended(pids)


def restore_signals() -> None:
    """Set the default handlers. Tests in the background of a shell inherit ignored signals."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_run_job_the_end_of_the_launcher_ends_every_process(
    make_job: MakeJob, tmp_path: Path, number: signal.Signals
) -> None:
    """SIGINT goes to the process group, as Ctrl-C does. When the lock is free, no rank runs."""
    job = make_job("train_for_ever", ranks=2)
    write_job(job)
    launcher = subprocess.Popen(
        [sys.executable, str(LAUNCH), str(job.path), "ranked_program", str(tmp_path)],
        start_new_session=True,
        preexec_fn=restore_signals,
    )
    pids = pids_of(first_event(job))
    assert len(alive(pids)) == 4
    (os.killpg if number == signal.SIGINT else os.kill)(launcher.pid, number)
    with Store(job.store).lock(job.artifact, job.derivation.key):
        running = alive(pids[:-1])
    assert running == []
    assert all_gone(pids)
    launcher.wait(timeout=60)

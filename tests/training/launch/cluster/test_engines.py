"""One contract for all engines: this machine, a real Slurm and a real Ray, each as engine.yaml names it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.training.launch.living import AnyEvent, alive, all_gone, first_event
from training.contract.errors import JobFailed
from training.contract.protocol.job import Job
from training.contract.store.store import Store
from training.launch.cluster.configured import ConfiguredEngine
from training.launch.engine import Handle
from training.launch.launcher import run_job, write_job

MakeJob = Callable[..., Job]
LAUNCH = Path(__file__).parents[1] / "programs" / "launch_program.py"
MODULE = "ranked_program"
SECONDS = 90.0
pytestmark = pytest.mark.slow


@dataclass
class Configured:
    """A home with an engine. `has_queue`: the engine's jobs outlive the process that submitted them."""

    home: Path
    has_queue: bool

    @property
    def engine(self) -> ConfiguredEngine:
        return ConfiguredEngine(self.home, MODULE)

    def submit(self, job: Job) -> Handle:
        write_job(job)
        return self.engine.submit(job)

    def start_launcher(self, job: Job) -> "subprocess.Popen[bytes]":
        write_job(job)
        return subprocess.Popen([sys.executable, str(LAUNCH), str(job.path), MODULE, str(self.home)])


@pytest.fixture
def local(tmp_path: Path) -> Configured:
    return Configured(tmp_path, has_queue=False)


@pytest.fixture
def slurm_home(use_slurm: None, tmp_path: Path) -> Configured:
    (tmp_path / "engine.yaml").write_text("engine: slurm\n")
    return Configured(tmp_path, has_queue=True)


@pytest.fixture
def ray_home(use_ray, tmp_path: Path) -> Configured:
    env = "profiles: {default: {env: {OMP_NUM_THREADS: 1}}}"
    (tmp_path / "engine.yaml").write_text(f"engine: ray\naddress: {use_ray.address}\n{env}\n")
    return Configured(tmp_path, has_queue=True)


SLURM = pytest.param("slurm_home", marks=[pytest.mark.system, pytest.mark.xdist_group("slurm")])
RAY = pytest.param("ray_home", marks=[pytest.mark.system, pytest.mark.xdist_group("ray")])


@pytest.fixture(params=["local", SLURM, RAY])
def configured(request: pytest.FixtureRequest) -> Configured:
    found: Configured = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=[SLURM, RAY])
def with_queue(request: pytest.FixtureRequest) -> Configured:
    found: Configured = request.getfixturevalue(request.param)
    return found


def pids_of(note: AnyEvent) -> list[int]:
    return [*note["ranks"], note["torchrun"]]


def ending(handle: Handle) -> int:
    deadline = time.monotonic() + SECONDS
    while (status := handle.state().status) is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return status


def test_run_job_of_two_ranks_publishes_one_artifact(configured: Configured, make_job: MakeJob) -> None:
    job = make_job("write", ranks=2)
    run_job(configured.engine, job, lambda event: None)
    artifact = Store(job.store).find("policy", job.derivation.key)
    assert artifact is not None
    assert [artifact.file(f"rank-{rank}.txt").read_text() for rank in range(2)] == ["0 of 2", "1 of 2"]


def test_run_job_on_two_nodes_publishes_one_artifact(with_queue: Configured, make_job: MakeJob) -> None:
    job, notes = make_job("write", nodes=2), list[str]()
    run_job(with_queue.engine, job, lambda event: notes.append(event.get("text", "")))
    artifact = Store(job.store).find("policy", job.derivation.key)
    assert artifact is not None and artifact.details.notes == ("2 ranks",)
    assert any("runs" in note for note in notes), notes


def test_run_job_with_one_process_needs_no_torchrun(configured: Configured, make_job: MakeJob) -> None:
    job = make_job("write")
    run_job(configured.engine, job, lambda event: None)
    assert Store(job.store).find("policy", job.derivation.key) is not None
    assert "torchrun" not in job.log.read_text()


def test_run_job_error_of_one_rank_is_the_cause(configured: Configured, make_job: MakeJob) -> None:
    job = make_job("rank_1_refuses", ranks=2)
    with pytest.raises(JobFailed, match=r"^the loss at step 0 is 0.7, expected ln 2; rank 1 of ") as caught:
        run_job(configured.engine, job, lambda event: None)
    assert str(job.log) in str(caught.value)


def test_run_job_names_a_killed_rank_and_its_signal(configured: Configured, make_job: MakeJob) -> None:
    pids: list[int] = []

    def kill(event: AnyEvent) -> None:
        if "ranks" in event:
            pids.extend(pids_of(event))
            os.kill(event["ranks"][1], signal.SIGKILL)

    with pytest.raises(JobFailed, match="rank 1 was ended by SIGKILL"):
        run_job(configured.engine, make_job("train_for_ever", ranks=2), kill)
    assert pids and all_gone(pids)


def test_run_job_that_the_user_interrupts_leaves_nothing(configured: Configured, make_job: MakeJob) -> None:
    job, pids = make_job("train_for_ever", ranks=2), list[int]()

    def interrupt(event: AnyEvent) -> None:
        if "ranks" in event:
            pids.extend(pids_of(event))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(configured.engine, job, interrupt)
    assert pids and alive(pids) == []
    assert configured.engine.find(job) is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_run_job_that_ends_otherwise_leaves_its_job_in_the_queue(
    configured: Configured, make_job: MakeJob, error: type[BaseException]
) -> None:
    """A job on this machine cannot outlive its run."""
    job, pids = make_job("train_for_ever", ranks=2), list[int]()

    def fail(event: AnyEvent) -> None:
        if "ranks" in event:
            pids.extend(pids_of(event))
            raise error

    with pytest.raises(error):
        run_job(configured.engine, job, fail, is_canceled=lambda: False)
    assert alive(pids) == (pids if configured.has_queue else [])
    found = configured.engine.find(job)
    assert (found is not None) == configured.has_queue
    if found is not None:
        found.cancel()
        assert alive(pids) == []


def test_run_job_whose_folder_is_removed_cancels_its_job(configured: Configured, make_job: MakeJob) -> None:
    job, pids = make_job("train_for_ever"), list[int]()

    def remove(event: AnyEvent) -> None:
        if "ranks" in event:
            pids.extend(event["ranks"])
            job.path.unlink()

    with pytest.raises(JobFailed, match="job-folder-removed"):
        run_job(configured.engine, job, remove)
    assert pids and all_gone(pids)


def test_run_job_follows_the_job_of_a_killed_process(with_queue: Configured, make_job: MakeJob) -> None:
    """The next run submits nothing. It gets the events and the result."""
    job = make_job("wait_for_go", nodes=2)
    launcher = with_queue.start_launcher(job)
    ranks = first_event(job)["ranks"]
    launcher.kill()
    launcher.wait()
    seen: list[list[int]] = []

    def on_event(event: AnyEvent) -> None:
        seen.append(event.get("ranks", []))
        (job.folder / "go").touch()

    run_job(with_queue.engine, job, on_event)
    assert Store(job.store).find("policy", job.derivation.key) is not None
    assert ranks in seen and all(found in ([], ranks) for found in seen)


def test_find_returns_a_live_job_of_the_same_work_only(with_queue: Configured, make_job: MakeJob) -> None:
    job = make_job("train_for_ever", ranks=2)
    assert with_queue.engine.find(job) is None
    handle = with_queue.submit(job)
    pids = pids_of(first_event(job))
    assert with_queue.engine.find(job) is not None
    assert with_queue.engine.find(job.model_copy(update={"store": job.store / "other"})) is None
    (link := job.folder.parent / "link").symlink_to(job.store)
    assert with_queue.engine.find(job.model_copy(update={"store": link})) is not None
    assert handle.state().status is None
    handle.cancel()
    assert alive(pids) == [] and with_queue.engine.find(job) is None


def test_run_job_with_other_settings_replaces_the_live_job(with_queue: Configured, make_job: MakeJob) -> None:
    """Looking for it, as `status` does, leaves it alone."""
    job = make_job("wait_for_go")
    with_queue.submit(job)
    pids = first_event(job)["ranks"]
    other = job.model_copy(update={"compute": job.compute.model_copy(update={"checkpoint_every": 7})})
    assert with_queue.engine.find(other) is not None and alive(pids) == pids
    seen: list[int] = []

    def on_event(event: AnyEvent) -> None:
        if "ranks" in event:
            assert alive(pids) == []
            seen.extend(event["ranks"])
            (job.folder / "go").touch()

    run_job(with_queue.engine, other, on_event)
    assert seen and set(seen).isdisjoint(pids)
    assert Store(job.store).find("policy", job.derivation.key) is not None


def test_cancel_may_be_called_twice_and_after_the_end(configured: Configured, make_job: MakeJob) -> None:
    job = make_job("write")
    handle = configured.submit(job)
    assert ending(handle) == 0, job.log.read_text()
    handle.cancel()
    handle.cancel()
    assert handle.state().status == 0


def test_submit_after_an_ended_job_runs_again(configured: Configured, make_job: MakeJob) -> None:
    job = make_job("rank_1_refuses", ranks=2)
    for _ in range(2):
        assert ending(configured.submit(job)) != 0
        assert "expected ln 2" in job.error.read_text()

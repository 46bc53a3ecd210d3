"""Jobs in the queue of a real Slurm of two nodes on this machine."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.training.launch.cluster.slurm_cluster import missing_programs, slurm_cluster
from tests.training.launch.living import alive, first_event
from training.contract.errors import EngineError
from training.contract.protocol.events import Event
from training.contract.protocol.job import Job
from training.contract.store.store import Store
from training.launch.cluster import slurm
from training.launch.cluster.engine_file import SlurmProfile, SlurmSettings
from training.launch.engine import JobState, Submission, name_of
from training.launch.launcher import run_job, write_job

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]
MakeJob = Callable[..., Job]
ENGINE = SlurmSettings(engine="slurm")
SECONDS = 90.0
FOLLOW = """
import sys
from training.contract.protocol.job import Job
from training.launch.cluster.engine_file import SlurmSettings, SlurmProfile
from training.launch.launcher import run_job
from training.launch.cluster.slurm import SlurmEngine
job = Job.model_validate_json(sys.argv[1])
run_job(SlurmEngine(SlurmSettings(engine="slurm"), SlurmProfile(), "ranked_program"), job, lambda event: None)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if missing := missing_programs():
        pytest.fail(f"these tests need Slurm ({', '.join(missing)}): apt-get install -y slurm-wlm munge")
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as config:
        yield config


@pytest.fixture(autouse=True)
def in_cluster(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the cluster, and cancel what a test leaves in its queue."""
    monkeypatch.setenv("SLURM_CONF", str(cluster))
    yield
    subprocess.run(["scancel", "--me"], check=True)
    wait(lambda: not subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True).stdout)


def wait(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def submit(job: Job, **sbatch: str) -> str:
    write_job(job)
    return slurm.submit(job, ENGINE, SlurmProfile(sbatch=sbatch), "ranked_program")


def ending(job: Job, id: str) -> JobState:
    wait(lambda: slurm.state_of(job, id).phase == "ended")
    return slurm.state_of(job, id)


@pytest.mark.system
def test_submitted_job_on_two_nodes_publishes_its_artifact(make_job: MakeJob) -> None:
    job = make_job("write", ranks=1, nodes=2)
    assert ending(job, submit(job)).status == 0, job.log.read_text()
    artifact = Store(job.store).find("policy", job.derivation.key)
    assert artifact is not None
    assert [artifact.file(f"rank-{rank}.txt").read_text() for rank in range(2)] == ["0 of 2", "1 of 2"]


@pytest.mark.system
def test_submitted_job_of_one_process_needs_no_torchrun(make_job: MakeJob) -> None:
    job = make_job("write")
    assert ending(job, submit(job)).status == 0, job.log.read_text()
    assert "torchrun" not in job.log.read_text()


@pytest.mark.system
def test_failed_job_has_its_exit_status_and_its_cause(make_job: MakeJob) -> None:
    job = make_job("rank_1_refuses", ranks=2)
    state = ending(job, submit(job))
    assert state.status not in (0, None) and "FAILED" in state.detail
    assert "expected ln 2" in job.error.read_text()


@pytest.mark.system
def test_find_returns_the_live_job_of_the_same_work_only(make_job: MakeJob) -> None:
    job = make_job("train_for_ever", ranks=2)
    assert slurm.find(job) is None
    id = submit(job)
    assert slurm.find(job) == id
    other = job.model_copy(update={"store": job.store / "other"})
    assert slurm.find(other) is None and name_of(other) != name_of(job)


@pytest.mark.system
def test_canceled_job_leaves_no_process(make_job: MakeJob) -> None:
    job = make_job("train_for_ever", ranks=2)
    id = submit(job)
    note = first_event(job)
    pids = [*note["ranks"], note["torchrun"]]
    assert alive(pids) == pids and slurm.state_of(job, id).phase == "running"
    slurm.cancel(id)
    assert ending(job, id).status != 0
    wait(lambda: not alive(pids))
    slurm.cancel(id)


@pytest.mark.system
def test_second_job_of_the_same_work_waits(make_job: MakeJob) -> None:
    """Slurm itself keeps it off, even if its submitter knows nothing of the first one."""
    job = make_job("train_for_ever")
    first = submit(job)
    wait(lambda: slurm.state_of(job, first).phase == "running")
    second = submit(job)
    assert second != first
    wait(lambda: "Dependency" in slurm.state_of(job, second).detail)
    assert slurm.state_of(job, second).phase == "queued" and slurm.find(job) == first


@pytest.mark.system
def test_held_job_names_the_command_that_lets_it_start(make_job: MakeJob) -> None:
    job = make_job("write")
    id = submit(job, hold="true")
    state = slurm.state_of(job, id)
    assert state.phase == "queued" and "JobHeldUser" in state.detail
    assert f"`scontrol release {id}`" in state.remedy
    subprocess.run(["scontrol", "release", id], check=True)
    assert ending(job, id).status == 0


@pytest.mark.system
def test_job_beyond_the_limit_of_its_partition_has_a_remedy(make_job: MakeJob) -> None:
    job = make_job("write")
    id = submit(job, time="4:00:00")
    wait(lambda: "PartitionTimeLimit" in slurm.state_of(job, id).detail)
    assert "lower `time`" in slurm.state_of(job, id).remedy


@pytest.mark.system
def test_refused_submission_has_the_reason_of_slurm(make_job: MakeJob) -> None:
    job = make_job("write")
    with pytest.raises(EngineError, match=r"nowhere.*\[slurm-refuses\]|[Pp]artition.*\[slurm-refuses\]"):
        submit(job, partition="nowhere")


@pytest.mark.long  # Slurm lets two minutes pass before it starts a requeued job
def test_preempted_job_starts_again(make_job: MakeJob) -> None:
    job = make_job("train_for_ever")
    id = submit(job)
    first_event(job)
    urgent = subprocess.run(
        ["sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 2"],
        capture_output=True,
        text=True,
        check=True,
        cwd=job.folder,
    ).stdout.strip()
    wait(lambda: slurm.state_of(job, id).phase == "queued")
    assert urgent.isdigit()
    wait(lambda: "start number 2" in slurm.state_of(job, id).detail, seconds=180)


@pytest.mark.system
@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_job_at_its_time_limit_is_queued_again_only_after_progress(make_job: MakeJob, has_checkpoint: bool) -> None:
    """Slurm sends SIGUSR1 to the batch script before the limit; here a command sends it."""
    job = make_job("train_for_ever")
    id = submit(job)
    first_event(job)
    if has_checkpoint:
        (job.checkpoints / "a" / "step-00000001").mkdir(parents=True)
    subprocess.run(["scancel", "--batch", "--signal=USR1", id], check=True)
    if has_checkpoint:
        wait(lambda: slurm.state_of(job, id).phase == "queued")
    else:
        assert ending(job, id).status not in (0, None)
        assert "[time-limit]" in job.error.read_text()


@pytest.mark.system
def test_submission_record_survives_and_damage_is_no_record(make_job: MakeJob) -> None:
    job = make_job("write")
    write_job(job)
    assert Submission.read(job) is None
    (record := Submission.of("slurm", "7", job)).write(job)
    assert Submission.read(job) == record
    (job.folder / "engine.json").write_text("{")
    assert Submission.read(job) is None


@pytest.mark.system
def test_run_job_follows_the_job_of_a_killed_launcher(make_job: MakeJob) -> None:
    """The first launcher is killed while the job runs. The second one submits nothing, and gets the events and the result."""
    job = make_job("wait_for_go", nodes=2)
    launcher = subprocess.Popen([sys.executable, "-c", FOLLOW, job.model_dump_json()])
    first_event(job)
    launcher.kill()
    launcher.wait()
    texts: list[str] = []

    def on_event(event: Event) -> None:
        texts.append(event.get("text", ""))
        (job.folder / "go").touch()

    run_job(slurm.SlurmEngine(ENGINE, SlurmProfile(), "ranked_program"), job, on_event)
    assert Store(job.store).find("policy", job.derivation.key) is not None
    [submitted] = {text.split()[1] for text in texts if text.startswith("job ")}
    record = Submission.read(job)
    assert record is not None and submitted == record.id
    assert any("runs on n[1-2]" in text for text in texts)


@pytest.mark.system
def test_run_job_with_other_settings_replaces_the_live_job(make_job: MakeJob) -> None:
    job = make_job("train_for_ever")
    engine = slurm.SlurmEngine(ENGINE, SlurmProfile(), "ranked_program")
    write_job(job)
    handle = engine.submit(job)
    wait(lambda: handle.state() and slurm.state_of(job, handle.id).phase == "running")
    other = job.model_copy(update={"compute": job.compute.model_copy(update={"checkpoint_every": 7})})
    assert engine.find(job) is not None
    assert engine.find(other) is None
    assert slurm.state_of(job, handle.id).phase == "ended"


@pytest.mark.system
def test_run_job_that_is_interrupted_cancels_its_job(make_job: MakeJob) -> None:
    job = make_job("train_for_ever")

    def interrupt(event: Event) -> None:
        if "ranks" in event:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(slurm.SlurmEngine(ENGINE, SlurmProfile(), "ranked_program"), job, interrupt)
    assert slurm.find(job) is None

"""Jobs in the queue of a real Slurm of two nodes on this machine."""

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.launch.living import AnyEvent, alive, all_gone, first_event
from training.contract.errors import EngineError, JobFailed
from training.contract.protocol.job import Job
from training.launch.cluster import slurm
from training.launch.cluster.engine_file import SlurmProfile, SlurmSettings
from training.launch.engine import JobState, Submission
from training.launch.launcher import run_job, write_job

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]
MakeJob = Callable[..., Job]
ENGINE = SlurmSettings(engine="slurm")
SECONDS = 90.0


@pytest.fixture(autouse=True)
def in_cluster(use_slurm: None) -> None:
    """Use the cluster in each test."""


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
def test_variables_with_secrets_do_not_go_to_the_nodes(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job, secrets = (
        make_job("write"),
        ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_URI"),
    )
    for name in (*secrets, "NCCL_DEBUG"):
        monkeypatch.setenv(name, "visible")
    write_job(job)
    profile = SlurmProfile(setup=f"env > {job.folder}/variables")
    id = slurm.submit(job, ENGINE, profile, "ranked_program")
    assert ending(job, id).status == 0
    variables = (job.folder / "variables").read_text()
    assert "NCCL_DEBUG=visible" in variables and [name for name in secrets if name in variables] == []


@pytest.mark.system
def test_job_canceled_by_the_command_of_slurm_leaves_nothing(make_job: MakeJob) -> None:
    job, pids, notes = make_job("train_for_ever", nodes=2), list[int](), list[str]()

    def cancel(event: AnyEvent) -> None:
        notes.append(event.get("text", ""))
        if "ranks" in event:
            pids.extend([*event["ranks"], event["torchrun"]])
            subprocess.run(["scancel", *(slurm.find(job) or "").split()], check=True)

    with pytest.raises(JobFailed, match="the policy job failed"):
        run_job(slurm.SlurmEngine(ENGINE, SlurmProfile(), "ranked_program"), job, cancel)
    assert any("has ended: CANCELLED" in note for note in notes)
    assert pids and all_gone(pids)


@pytest.mark.system
def test_job_whose_usual_port_is_taken_uses_the_next_one(make_job: MakeJob, tmp_path: Path) -> None:
    first = make_job("write")
    id = submit(first)
    assert ending(first, id).status == 0
    job = make_job("write", ranks=2).model_copy(update={"store": tmp_path / "another", "folder": tmp_path / "second"})
    with socket.create_server(("127.0.0.1", 20_000 + int(id) + 1)):
        assert submit(job) == str(int(id) + 1)
        assert ending(job, str(int(id) + 1)).status == 0, job.log.read_text()

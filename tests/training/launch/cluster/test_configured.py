"""Which engine a home uses, without one that runs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.workflows.homes import check_error
from training.contract.config.recipe import Compute
from training.contract.errors import EngineError
from training.contract.protocol.job import Job
from training.launch.cluster.configured import ConfiguredEngine
from training.launch.cluster.engine_file import RayProfile, RaySettings, read_engine
from training.launch.engine import JobState, Submission
from training.launch.launcher import QueueNotes, write_job
from training.launch.live_jobs import live_state, submitted_jobs

MakeJob = Callable[..., Job]
RAY = """
engine: ray
address: http://head:8265
concurrent: 4
profiles:
  default: {resources: {GPU: 8, CPU: 64}}
  big: {resources: {CPU: 32}, env: {NCCL_DEBUG: WARN}}
"""


def test_several_nodes_without_an_engine_name_the_replacement_of_nodes_yaml(make_job: MakeJob, tmp_path: Path) -> None:
    (former := tmp_path / "nodes.yaml").write_text("nodes: []\n")
    with pytest.raises(EngineError) as caught:
        ConfiguredEngine(tmp_path).find(make_job("write", nodes=2))
    check_error(caught.value, "no-engine", "`compute.nodes: 2`", former, "not read any more", "engine: ray")
    former.unlink()
    with pytest.raises(EngineError) as caught:
        ConfiguredEngine(tmp_path).find(make_job("write", nodes=2))
    assert "nodes.yaml" not in str(caught.value)


def test_job_without_a_model_stays_on_this_machine(make_job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_text("engine: nonsense\n")
    job = make_job("write").model_copy(update={"kind": "pairs"})
    assert ConfiguredEngine(tmp_path).find(job) is None


def test_profile_of_ray_adds_to_the_default(tmp_path: Path, make_job: MakeJob) -> None:
    (path := tmp_path / "engine.yaml").write_text(RAY)
    settings = read_engine(path)
    assert isinstance(settings, RaySettings) and settings.concurrent == 4
    big, job = settings.profile("big", path), make_job("write", ranks=8)
    assert big.resources_for(job) == {"GPU": 8.0, "CPU": 32.0} and big.env == {"NCCL_DEBUG": "WARN"}
    assert big.threads_of(job) == 4, "32 cores for 8 processes"


@pytest.mark.parametrize(("device", "reserved"), [("cpu", {"CPU": 2.0}), ("cuda", {"CPU": 2.0, "GPU": 2.0})])
def test_profile_of_ray_without_resources_reserves_a_core_a_process(
    make_job: MakeJob, device: str, reserved: dict[str, float]
) -> None:
    job = make_job("write", ranks=2)
    compute = Compute.model_validate({**job.compute.model_dump(), "device": device})
    assert RayProfile().resources_for(job.model_copy(update={"compute": compute})) == reserved
    assert RayProfile().threads_of(job) is None
    assert RayProfile(env={"OMP_NUM_THREADS": "3"}).threads_of(job) == 3


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ("engine: ray\n", "`address`"),
        ("engine: ray\naddress: x\nprofiles: {a: {resources: {GPU: 0}}}\n", "`profiles.a.resources.GPU`"),
        ("engine: ray\naddress: x\nprofiles: {a: {sbatch: {}}}\n", "`profiles.a.sbatch`"),
        ("engine: slurm\nconcurrent: 0\n", "`concurrent`"),
    ],
)
def test_wrong_engine_file_names_the_field(tmp_path: Path, content: str, value: str) -> None:
    (path := tmp_path / "engine.yaml").write_text(content)
    with pytest.raises(EngineError) as caught:
        read_engine(path)
    check_error(caught.value, "engine-file", path, value)


def test_live_state_without_an_answer_is_unknown(make_job: MakeJob, tmp_path: Path) -> None:
    """So `gc` leaves the files of such a job alone, and `status` says so."""
    (tmp_path / "engine.yaml").write_text("engine: [\n")
    job = make_job("write").model_copy(update={"folder": tmp_path / "jobs" / "policy-1"})
    write_job(job)
    assert list(submitted_jobs(tmp_path)) == [] and live_state(ConfiguredEngine(tmp_path), job) is None
    Submission.of("slurm", "7", job).write(job)
    assert list(submitted_jobs(tmp_path)) == [job]
    state = live_state(ConfiguredEngine(tmp_path), job)
    assert state is not None and state.phase == "unknown" and "engine.yaml cannot be read" in state.detail
    Submission.forget(job)
    assert list(submitted_jobs(tmp_path)) == []


def test_queue_notes_tell_each_reason_once_and_a_moving_start_rarely() -> None:
    now = 0.0
    notes = QueueNotes(lambda: now)

    def told(state: JobState) -> str | None:
        note = notes.note(state)
        return None if note is None else str(note["text"])

    priority = JobState("queued", "job 7 waits: Priority")
    assert told(priority) == "job 7 waits: Priority"
    assert told(priority) is None
    assert told(JobState("queued", "job 7 waits: Resources", "17:33")) == "job 7 waits: Resources, to start about 17:33"
    now = 599.0
    assert told(JobState("queued", "job 7 waits: Resources", "17:40")) is None
    now = 600.0
    assert told(JobState("queued", "job 7 waits: Resources", "17:41")) == "job 7 waits: Resources, to start about 17:41"
    held = JobState("queued", "job 7 waits: JobHeldUser", remedy="`scontrol release 7`")
    assert (note := notes.note(held)) is not None and note["is_stuck"] is True
    assert note["text"] == "job 7 waits: JobHeldUser; it cannot start without help: `scontrol release 7`"
    assert told(JobState("running", "job 7 runs on n1")) == "job 7 runs on n1"


def test_job_that_was_submitted_to_another_engine_is_not_submitted_again(make_job: MakeJob, tmp_path: Path) -> None:
    """It may still run there, and both would write the same artifact."""
    write_job(job := make_job("write"))
    Submission.of("slurm", "7", job).write(job)
    with pytest.raises(EngineError) as caught:
        ConfiguredEngine(tmp_path).find(job)
    check_error(caught.value, "other-engine", "job 7 was submitted to slurm", "names local", job.folder / "engine.json")
    Submission.forget(job)
    assert ConfiguredEngine(tmp_path).find(job) is None

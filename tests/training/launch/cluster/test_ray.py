"""What only Ray does: reserve nodes, authenticate by a token, lose a node or its head. With a real Ray of two nodes."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.training.launch.cluster.ray_cluster import RayCluster, end, ray_cluster
from tests.training.launch.conftest import PYTHONPATH
from tests.training.launch.living import AnyEvent, all_gone, first_event
from training.contract.errors import EngineError, JobFailed
from training.contract.protocol.job import Job
from training.contract.store.store import Store
from training.launch.cluster.configured import ConfiguredEngine
from training.launch.cluster.engine_file import RayProfile, RaySettings
from training.launch.cluster.ray_engine import RayEngine, RayHandle
from training.launch.engine import JobState, name_of
from training.launch.launcher import run_job, write_job

MakeJob = Callable[..., Job]
SECONDS = 90.0
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def engine_of(cluster: RayCluster, **resources: float) -> RayEngine:
    profile = RayProfile(resources=resources, env=ONE_THREAD)
    return RayEngine(RaySettings(engine="ray", address=cluster.address), profile, "ranked_program")


def submit(cluster: RayCluster, job: Job, **resources: float) -> RayHandle:
    write_job(job)
    return engine_of(cluster, **resources).submit(job)


def wait(handle: RayHandle, condition: Callable[[JobState], object], seconds: float = SECONDS) -> JobState:
    deadline = time.monotonic() + seconds
    while not condition(state := handle.state()):
        assert time.monotonic() < deadline, state
        time.sleep(0.1)
    return state


@pytest.mark.system
def test_job_that_no_node_can_hold_names_what_is_missing(use_ray: RayCluster, make_job: MakeJob) -> None:
    handle = submit(use_ray, make_job("write"), GPU=8)
    state = wait(handle, lambda state: state.remedy)
    assert state.phase == "queued" and "1 nodes with 8 GPU each" in state.detail
    assert "0 of 2 nodes have them" in state.remedy and "`resources` in engine.yaml" in state.remedy
    handle.cancel()


@pytest.mark.system
def test_job_waits_for_the_nodes_of_another_one(use_ray: RayCluster, make_job: MakeJob, tmp_path: Path) -> None:
    first = submit(use_ray, make_job("train_for_ever"), CPU=2)
    first_event(make_job("train_for_ever"))
    job = make_job("write", nodes=2).model_copy(update={"folder": tmp_path / "second"})
    second = submit(use_ray, job, CPU=2)
    waiting = wait(second, lambda state: state.detail.startswith("the job waits in Ray"))
    assert waiting.remedy == ""
    first.cancel()
    assert wait(second, lambda state: state.phase == "ended").status == 0, job.log.read_text()


@pytest.mark.system
def test_live_job_is_not_submitted_again(use_ray: RayCluster, make_job: MakeJob) -> None:
    """Ray itself refuses it, even if the submitter knows nothing of the first one."""
    job = make_job("train_for_ever")
    handle = submit(use_ray, job)
    with pytest.raises(EngineError, match=f"Ray runs job {name_of(job)}-1 already.*ray-refuses"):
        engine_of(use_ray).submit(job)
    handle.cancel()


@pytest.mark.system
def test_job_stopped_by_the_command_of_ray_leaves_nothing(use_ray: RayCluster, make_job: MakeJob) -> None:
    job, pids = make_job("train_for_ever", nodes=2), list[int]()

    def stop(event: AnyEvent) -> None:
        if "ranks" in event:
            pids.extend([*event["ranks"], event["torchrun"]])
            subprocess.run(
                [sys.executable, "-m", "ray.scripts.scripts", "job", "stop", "--no-wait", f"{name_of(job)}-1"],
                env={**use_ray.environment, "RAY_ADDRESS": use_ray.address},
                check=True,
                capture_output=True,
            )

    with pytest.raises(JobFailed):
        run_job(engine_of(use_ray), job, stop)
    assert pids and all_gone(pids)


@pytest.mark.system
def test_client_without_the_token_is_told_the_variables(use_ray: RayCluster) -> None:
    program = (
        "from pathlib import Path; from training.launch.cluster.ray_engine import RayEngine, RayProfile, RaySettings;"
        f"RayEngine(RaySettings(engine='ray', address={use_ray.address!r}), RayProfile())._connect()"
    )
    without = {name: value for name, value in use_ray.environment.items() if not name.startswith("RAY_AUTH")}
    done = subprocess.run([sys.executable, "-c", program], env=without, capture_output=True, text=True)
    assert "RAY_AUTH_TOKEN_PATH" in done.stderr and "[ray-refuses]" in done.stderr


@pytest.mark.system
def test_cluster_that_does_not_answer_is_named_with_its_address(make_job: MakeJob) -> None:
    engine = RayEngine(RaySettings(engine="ray", address="http://127.0.0.1:9"), RayProfile())
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9.*`ray start --head`.*\[ray-away\]"):
        engine.find(make_job("write"))


def test_engine_file_with_ray_names_the_extra_if_ray_is_missing(tmp_path: Path, make_job: MakeJob, monkeypatch) -> None:
    (tmp_path / "engine.yaml").write_text("engine: ray\naddress: http://127.0.0.1:9\n")
    monkeypatch.setitem(sys.modules, "ray.job_submission", None)
    monkeypatch.delitem(sys.modules, "training.launch.cluster.ray_engine")
    with pytest.raises(EngineError, match=r"`pip install 'pedigree\[ray\]'`.*\[no-ray\]"):
        ConfiguredEngine(tmp_path).find(make_job("write"))


@pytest.fixture
def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with ray_cluster(tmp_path_factory.mktemp("ray"), {"PYTHONPATH": PYTHONPATH}) as cluster:
        yield cluster


@pytest.mark.system
def test_job_whose_node_is_lost_begins_again_if_it_has_a_new_checkpoint(
    own_cluster: RayCluster, make_job: MakeJob
) -> None:
    job = make_job("wait_for_go", nodes=2)
    with own_cluster.head():
        with own_cluster.node() as node:
            handle = submit(own_cluster, job, CPU=2)
            first_event(job)
            (job.checkpoints / "a" / "step-00000001").mkdir(parents=True)
            end(node)
            waiting = wait(handle, lambda state: state.phase == "queued")
            assert "2 nodes with 2 CPU each" in waiting.detail
        with own_cluster.node():
            (job.folder / "go").touch()
            assert wait(handle, lambda state: state.phase == "ended").status == 0, job.log.read_text()
    assert Store(job.store).find("policy", job.derivation.key) is not None


@pytest.mark.long
def test_job_whose_node_is_lost_before_a_checkpoint_fails(own_cluster: RayCluster, make_job: MakeJob) -> None:
    job = make_job("train_for_ever", nodes=2)
    with own_cluster.head(), own_cluster.node() as node:

        def lose(event: AnyEvent) -> None:
            if "ranks" in event:
                end(node)

        with pytest.raises(JobFailed, match=r"a node of Ray was lost.*\[node-lost\]"):
            run_job(engine_of(own_cluster, CPU=2), job, lose)


@pytest.mark.long  # Ray's nodes wait a minute for a lost head
def test_job_whose_head_is_lost_fails_and_the_next_run_starts_anew(own_cluster: RayCluster, make_job: MakeJob) -> None:
    job, pids = make_job("wait_for_go", nodes=2), list[int]()
    with own_cluster.head() as head, own_cluster.node():

        def lose(event: AnyEvent) -> None:
            if "ranks" in event:
                pids.extend(event["ranks"])
                end(head)

        with pytest.raises(JobFailed, match=r"Ray has not answered for 6\d s.*`ray start --head`.*\[ray-lost\]"):
            run_job(engine_of(own_cluster, CPU=2), job, lose)
        assert pids and all_gone(pids)
    (job.folder / "go").touch()
    with own_cluster.head(), own_cluster.node():
        run_job(engine_of(own_cluster, CPU=2), job, lambda event: None)
    assert Store(job.store).find("policy", job.derivation.key) is not None

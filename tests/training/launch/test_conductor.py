"""Jobs on two nodes, which are real connections to a real ssh server: what they make, how they fail, what they leave."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import training
from tests.training.launch.living import alive, all_gone, first_event
from training.contract.config.recipe import Training
from training.contract.errors import JobFailed, NodesError
from training.contract.protocol.events import Event, read_events
from training.contract.protocol.job import Failure, Job
from training.contract.store.store import Store
from training.launch.conductor import NodesLauncher
from training.launch.launcher import run_job, write_job
from training.launch.nodes_file import take_nodes

IMPATIENT = """
import sys
from pathlib import Path
from training.contract.protocol.job import Job
from training.launch import conductor
from training.launch.nodes_file import Nodes

conductor._ANSWER_SECONDS, conductor._CLOSING_SECONDS = 5.0, 1.0
sys.exit(conductor.conduct(Nodes.model_validate_json(sys.argv[1]), "plain_program", Job.read(Path(sys.argv[2]))))
"""
LAUNCH = Path(__file__).parent / "programs" / "launch_program.py"
MakeJob = Callable[..., Job]
NodesFile = Callable[..., Path]
slow = pytest.mark.slow


@pytest.fixture
def nodes_file(tmp_path: Path, free_port: Callable[[], int]) -> NodesFile:
    """Writes a nodes.yaml of nodes with these prefixes, the last one with `options`, and gives its path."""

    def write(*prefixes: list[str], **options: Any) -> Path:
        nodes: list[dict[str, Any]] = [{"run": prefix, "address": "127.0.0.1"} for prefix in prefixes]
        nodes[-1].update(options)
        path = tmp_path / "nodes.yaml"
        path.write_text(json.dumps({"port": free_port(), "nodes": nodes}))  # JSON is YAML
        return path

    return write


def failure(file: Path, job: Job, on_event: Callable[[Event], None] = lambda event: None) -> str:
    with pytest.raises(JobFailed) as caught:
        run_job(NodesLauncher(file, "plain_program"), job, on_event)
    return str(caught.value)


@pytest.mark.system
@slow
def test_two_nodes_of_two_ranks_train_like_one_process(
    tiny_world: Any, forker: Any, ssh: list[str], nodes_file: NodesFile
):
    """To 1e-5 in each step's loss; the sharded weights are whole on each node, which so must have been two."""
    settings = Training.model_validate({"batch_size": 8, "max_steps": 4, "optimizer": {"learning_rate": 3e-3}})
    alone = tiny_world.job("policy", settings.model_dump(mode="json"), "alone")
    assert forker.run(alone) == [0]
    compute = {"nodes": 2, "processes_per_node": 2, "parallel": "hsdp"}
    job = tiny_world.job("policy", settings.model_dump(mode="json"), "nodes", **compute)
    run_job(NodesLauncher(nodes_file(ssh, ssh)), job, lambda event: None)
    told = []
    for one in (alone, job):
        found = Store(one.store).find("policy", one.derivation.key)
        assert found is not None
        told.append(list(read_events(found.folder / "events.jsonl")))
    assert "4 processes, weights in 2 shards, 2 copies (hsdp: set by the recipe)" in [e.get("text") for e in told[1]]
    losses = [[event["loss"] for event in events if event["event"] == "step"] for events in told]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.system
@slow
@pytest.mark.parametrize("victim", ["launcher", "conductor"])
def test_nothing_is_left_when_who_leads_is_killed(
    make_job: MakeJob, ssh: list[str], nodes_file: NodesFile, victim: str
):
    """Whoever then gets the lock finds nobody at work on any node."""
    job = make_job("sleep_on_nodes", nodes=2)
    write_job(job)
    command = [sys.executable, str(LAUNCH), str(job.path), "plain_program", str(nodes_file(ssh, [*ssh]))]
    launcher = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    pids = [pid for node in first_event(job)["pids"] for pid in node]
    assert len(alive(pids)) == 6  # on each node the rank, torchrun, and what was started there
    (conductor,) = psutil.Process(launcher.pid).children()
    os.kill(launcher.pid if victim == "launcher" else conductor.pid, signal.SIGKILL)
    with Store(job.store).lock(job.artifact, job.derivation.key):
        assert alive(pids) == []
    launcher.wait(timeout=30)


@pytest.mark.system
@slow
def test_a_rank_that_is_killed_ends_the_other_node_and_is_named(
    make_job: MakeJob, ssh: list[str], nodes_file: NodesFile
):
    """Its node is reached over ssh, the other is this machine."""
    job = make_job("sleep_on_nodes", nodes=2)
    pids: list[int] = []

    def kill(note: Event) -> None:
        pids.extend(pid for node in note["pids"] for pid in node)
        os.kill(note["pids"][1][0], signal.SIGKILL)

    message = failure(nodes_file([], ssh), job, kill)
    assert message.startswith("the policy job failed: rank 1 (node 1) was ended by SIGKILL")
    assert "the first to end badly was node 1 (`ssh " in message
    assert alive(pids) == []


@pytest.mark.system
@slow
def test_a_connection_that_breaks_ends_both_sides(make_job: MakeJob, ssh: list[str], nodes_file: NodesFile):
    job = make_job("sleep_on_nodes", nodes=2)
    pids: list[int] = []

    def cut(note: Event) -> None:
        pids.extend(pid for node in note["pids"] for pid in node)
        (client,) = [p for p in psutil.Process().children(recursive=True) if p.name() == "ssh"]
        client.kill()

    message = failure(nodes_file([], ssh), job, cut)
    assert message.startswith("node 1 (`ssh ")
    assert "the connection broke, or what ran there was killed" in message
    assert all_gone(pids), "the other end of what was cut ends by itself"


# What is wrong with the second node: its prefix, made of the words for ssh and a port where nobody listens; its other
# options; and what is told.
UNUSABLE: dict[str, tuple[Callable[[list[str], int], list[str]], dict[str, str], str]] = {
    "unreachable": (
        lambda ssh, port: ["ssh", "-F", "none", "-p", str(port), "127.0.0.1"],
        {},
        "ended with status 255 before it answered; it said: ssh: connect to host 127.0.0.1",
    ),
    "no such command": (lambda ssh, port: ["no-such-command"], {}, "ended with status 127 before it answered"),
    "no such python": (lambda ssh, port: ssh, {"python": "/no/such/python"}, "env: '/no/such/python': No such file"),
    "runs nothing": (lambda ssh, port: ["true"], {}, "ended with status 0 before it answered; it said: nothing."),
    "no input": (lambda ssh, port: ["ssh", "-n", *ssh[1:]], {}, "the command does not connect standard input"),
    "a terminal": (
        lambda ssh, port: [word.replace("-T", "-tt") for word in ssh],
        {},
        "the command gives its process a terminal",
    ),
    "another address": (
        lambda ssh, port: ssh,
        {"address": "192.0.2.1"},
        "`address: 192.0.2.1` belongs to no interface",
    ),
}


@pytest.mark.system
@pytest.mark.parametrize("fault", UNUSABLE)
def test_a_node_that_cannot_be_used_is_named_before_torchrun_starts(
    make_job: MakeJob, ssh: list[str], nodes_file: NodesFile, free_port: Callable[[], int], fault: str
):
    prefix, options, said = UNUSABLE[fault]
    job = make_job("status", nodes=2)
    message = failure(nodes_file([], prefix(ssh, free_port()), **options), job)
    assert message.startswith("node 1")
    assert said in message
    assert "started" not in job.log.read_text()


@pytest.mark.system
def test_a_node_that_never_answers_is_not_waited_for(make_job: MakeJob, nodes_file: NodesFile):
    """A prefix that waits for something, a host key to be confirmed say; in a process of its own, with less patience."""
    job, silent = make_job("status", nodes=2), ["sh", "-c", "exec sleep 600"]
    write_job(job)
    nodes = take_nodes(nodes_file([], silent), 2).model_dump_json()
    program = [sys.executable, "-P", "-c", IMPATIENT, nodes, str(job.path)]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as conductor:  # closing its input would cancel the job
        try:
            assert conductor.wait(60) == 1
        finally:
            conductor.kill()
    told = Failure.model_validate_json(job.error.read_bytes()).message
    assert told.startswith("node 1: `sh -c 'exec sleep 600' ") and "has not answered; it said: nothing." in told


def test_what_is_secret_here_stays_here(
    make_job: MakeJob, nodes_file: NodesFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The second node writes down its order and does no more; only variables for computing may be part of it."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    order = tmp_path / "order.json"
    failure(nodes_file([], ["sh", "-c", f"head -n 1 > {order}; exit 9"]), make_job("status", nodes=2))
    environment = json.loads(order.read_text())["environment"]
    assert environment["NCCL_DEBUG"] == "INFO" and "hf_secret" not in order.read_text()
    assert not environment.keys() & {"HF_TOKEN", "PATH", "HOME"}


@pytest.mark.system
def test_another_version_of_the_package_is_refused(
    make_job: MakeJob, ssh: list[str], nodes_file: NodesFile, tmp_path: Path
):
    copy = tmp_path / "other" / "training"
    shutil.copytree(Path(training.__file__).parent, copy)
    with open(copy / "main.py", "a") as file:
        file.write("\n")
    message = failure(nodes_file([], [*ssh, f"PYTHONPATH={copy.parent}"]), make_job("status", nodes=2))
    assert "the software differs from that where the job was launched: the source of Pedigree " in message


def test_without_machines_nothing_is_started(make_job: MakeJob, tmp_path: Path):
    job = make_job("status", nodes=2)
    with pytest.raises(NodesError, match=r"`compute.nodes: 2` needs machines"):
        run_job(NodesLauncher(tmp_path / "nodes.yaml", "plain_program"), job, lambda event: None)
    assert not job.log.exists()


def test_one_node_is_this_machine_whatever_is_listed(make_job: MakeJob, nodes_file: NodesFile):
    assert "exit status 3" in failure(nodes_file(["no-such-command"]), make_job("status"))


def test_data_work_stays_on_this_machine(make_job: MakeJob):
    assert make_job("status", nodes=2).nodes == 2
    assert make_job("status", nodes=2).model_copy(update={"kind": "pairs"}).nodes == 1

"""A real `mlflow server`: tracking and registering through HTTP, and a crash of the server during a training."""

import re
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from assets.inputs.resolve import locate_champion
from model_registry.files import VersionFiles
from model_registry.registry import Registry
from model_registry.tracking import Tracker
from tests.workflows.homes import ATTRIBUTES, flip
from training.contract.config.recipe import Recipe
from training.contract.errors import RegistryError, RegistryUnavailable
from training.contract.identity.model_identity import weights_identity
from training.contract.protocol.events import EventWriter, Follower, read_events

pytestmark = [pytest.mark.slow, pytest.mark.system]
ABOUT: dict[str, Any] = {"experiment": "remote", "name": "policy", "params": {"seed": 0}, "tags": {}}


@pytest.fixture
def events(tmp_path: Path) -> EventWriter:
    """The writer of a training job's `events.jsonl`."""
    return EventWriter(tmp_path / "events.jsonl")


def steps(client: MlflowClient, run_id: str) -> list[tuple[int, float]]:
    return sorted((point.step, point.value) for point in client.get_metric_history(run_id, "loss"))


def test_run_and_version_through_http(
    server, policy: Path, tmp_path: Path, warnings: list[str], capfd: pytest.CaptureFixture[str]
):
    """Artifacts also go through the server, so the version is downloaded: once, and byte for byte."""
    tracker = Tracker(server.uri, tmp_path / "not used", warnings.append)
    with tracker.run(key="a", **ABOUT) as run:
        run.record({"event": "step", "time": 1.0, "step": 1, "loss": 0.5})
    client = MlflowClient(server.uri)
    experiment_id = client.get_run(run.run_id).info.experiment_id
    assert steps(client, run.run_id) == [(1, 0.5)]
    assert client.get_run(run.run_id).info.artifact_uri.startswith("mlflow-artifacts:/")
    assert tracker.log_evaluation(run.run_id, "e", {"eval/loss": 0.25}, 1, policy / "training.json")
    assert [entry.path for entry in client.list_artifacts(run.run_id, "evaluation")] == ["evaluation/training.json"]
    runs = f"{server.uri}/#/experiments/{experiment_id}/runs"
    assert tracker.run_link(run.run_id) == f"{runs}/{run.run_id}/model-metrics?workflowType=machine_learning"
    assert tracker.is_served
    registry = Registry(server.uri, tmp_path / "downloads")
    (evaluation := tmp_path / "evaluated").mkdir()
    (evaluation / "pairs.parquet").write_bytes(b"pairs")
    identity = {"pedigree.policy": "a"}
    version = registry.register("remote", policy, run.run_id, identity=identity, tags={}, evaluation=evaluation)
    assert registry.promote(version, over=None)
    (fetched := tmp_path / "fetched").mkdir()
    assert (registry.fetch(version, "evaluation", fetched) / "pairs.parquet").read_bytes() == b"pairs"
    with pytest.raises(RegistryError, match=r"raw_preferences of remote/1.*\[registry-request\]") as missing:
        registry.fetch(version, "raw_preferences", fetched)
    assert not isinstance(missing.value, RegistryUnavailable)
    with ThreadPoolExecutor(3) as many:
        folders = [many.submit(registry.resolve, "models:/remote@champion") for _ in range(3)]
        inodes = [found.result().stat().st_ino for found in folders]
    assert len(set(inodes)) == 1, "only one downloads it"
    folder = registry.resolve("models:/remote@champion")
    assert weights_identity(folder) == weights_identity(policy)
    assert registry.resolve("models:/remote/1") == folder and folder.stat().st_ino == inodes[0], "not fetched again"
    assert registry.outdated_downloads() == [], "the champion is current"
    [name] = [path.name for path in (tmp_path / "downloads" / "remote").iterdir()]
    found = {path.name for path in (tmp_path / "downloads").iterdir()}
    assert found == {"remote", ".staging", f".remote-{name}.lock"}
    assert list((tmp_path / "downloads" / ".staging").iterdir()) == []
    assert warnings == []
    assert capfd.readouterr().out == "", "stdout is for results of commands"
    assert not (tmp_path / "not used").exists()


@pytest.mark.usefixtures("packaged_here")
def test_store_files_restores_missing_files(server, policy: Path, tmp_path: Path):
    """It also works after the deletion of their run."""
    tracker, registry = Tracker(server.uri, None), Registry(server.uri, tmp_path / "downloads")
    with tracker.run(key="missing", **ABOUT) as run:
        version = registry.register("missing", policy, run.run_id, identity={"pedigree.policy": "a"}, tags={})
    assert registry.has_files(version)
    MlflowClient(server.uri).delete_run(run.run_id)
    shutil.rmtree(server.artifacts)
    assert not registry.has_files(version)
    with pytest.raises(RegistryError, match=r"mlflow-artifacts:/.*/model.*config\.json.*\[version-without-files\]"):
        registry.resolve("models:/missing/1")
    registry.store_files("missing", version.source, VersionFiles(policy, policy, policy))
    assert registry.has_files(version)
    assert weights_identity(registry.resolve("models:/missing/1")) == weights_identity(policy)


@pytest.mark.usefixtures("packaged_here")
def test_locate_champion_corrupt_download_is_fetched_again(server, policy: Path, tmp_path: Path):
    """No other check would do so: the version's files on the server are intact."""
    tracker, registry = Tracker(server.uri, None), Registry(server.uri, tmp_path / "downloads")
    weights = weights_identity(policy).fingerprint
    with tracker.run(key="corrupt", **ABOUT) as run:
        version = registry.register("small", policy, run.run_id, identity={"pedigree.policy": weights}, tags={})
    registry.promote(version, over=None)
    flip(next(registry.folder(version).glob("*.safetensors")))
    assert weights_identity(registry.folder(version)).fingerprint != weights
    found = locate_champion(Recipe.model_validate(ATTRIBUTES), registry)
    assert found is not None and found.fingerprint == weights


@pytest.mark.usefixtures("packaged_here")
def test_resolve_recreated_model_is_not_the_deleted_one(server, policy: Path, tmp_path: Path):
    """The versions of the new model have the same numbers, and other weights. The same holds for another server."""
    shutil.copytree(policy, retrained := tmp_path / "retrained")
    shard = next(retrained.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-2] + b"\x00\x3c")
    tracker, registry = Tracker(server.uri, None), Registry(server.uri, tmp_path / "downloads")
    client = MlflowClient(server.uri)
    for trained in (policy, retrained):
        if trained is retrained:
            client.delete_registered_model("anew")
        with tracker.run(key=trained.name, **ABOUT) as run:
            version = registry.register(
                "anew", trained, run.run_id, identity={"pedigree.policy": trained.name}, tags={}
            )
        assert version.number == 1
        assert weights_identity(registry.resolve("models:/anew/1")) == weights_identity(trained)
    assert weights_identity(policy) != weights_identity(retrained)
    assert len(registry.outdated_downloads()) == 2, "neither has an alias"
    assert registry.promote(version, over=None)
    [outdated] = registry.outdated_downloads()
    assert registry.remove_download(outdated) and not registry.remove_download(outdated)
    assert weights_identity(registry.resolve("models:/anew@champion")) == weights_identity(retrained)
    assert registry.outdated_downloads() == []


def test_run_survives_a_crash_of_the_server_and_is_replayed(
    server, events: EventWriter, tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
):
    """Steps 1 and 2 reach the server before it is killed, 3 to 5 do not. A replay completes the run."""
    tracker, follower = Tracker(server.uri, None, warnings.append), Follower(tmp_path / "events.jsonl")

    def train(numbers: range) -> None:
        for number in numbers:
            events.emit("step", step=number, loss=1 / number)

    def evaluated() -> bool:
        return tracker.log_evaluation(run.run_id, "e", {"eval/loss": 0.5}, 5, tmp_path / "events.jsonl")

    with tracker.run(key="b", **ABOUT) as run:
        train(range(1, 3))
        run.replay(follower.new())
        server.kill()
        train(range(3, 6))
        for event in follower.new():
            run.record(event)
        run.flush()
    assert server.uri in warnings[0]
    assert len(warnings) <= 2, "an outage is warned of once, and perhaps once more at the end"
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert tracker.find_run("remote", "b") is None
    assert not evaluated()
    assert tracker.run_link(run.run_id) == f"{server.uri}/#/?workflowType=machine_learning"
    with pytest.raises(RegistryError, match=r"champion of remote.*\[registry-unavailable\]"):
        Registry(server.uri, tmp_path).champion("remote")
    monkeypatch.undo()
    server.start()
    client = MlflowClient(server.uri)
    assert steps(client, run.run_id) == [(1, 1.0), (2, 0.5)]
    assert client.get_run(run.run_id).info.status == "RUNNING"
    assert tracker.find_run("remote", "b") is None, "a run without all steps is incomplete"
    for _ in range(2):
        with tracker.run(key="b", **ABOUT) as again:
            again.replay(read_events(tmp_path / "events.jsonl"))
        assert evaluated()
    assert again.run_id == run.run_id == tracker.find_run("remote", "b")
    assert steps(client, run.run_id) == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25), (5, 0.2)]
    assert [(point.step, point.value) for point in client.get_metric_history(run.run_id, "eval/loss")] == [(5, 0.5)]


def test_run_without_server_keeps_events(warnings: list[str]):
    """Port 9 of loopback refuses at once."""
    with Tracker("http://user:secret@127.0.0.1:9", None, warnings.append).run(key="c", **ABOUT) as run:
        for number in range(1, 1000):
            run.record({"event": "step", "time": 1.0, "step": number, "loss": 0.5})
    assert run.run_id is None
    assert 1 <= len(warnings) <= 2
    assert "secret" not in "".join(warnings)


class Wire:
    """A connection to the server, cut once after the answer to each request with one of `lost` in its head."""

    def __init__(self, port: int, lost: list[bytes]) -> None:
        self._port, self._lost = port, lost
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            client, _ = self._listener.accept()
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        """Carry one request per connection. The server's answer ends it, as the request asks to close."""
        with client, socket.create_connection(("127.0.0.1", self._port)) as upstream:
            request = _read_request(client)
            upstream.sendall(request.replace(b"keep-alive", b"close"))
            answer = b"".join(iter(lambda: upstream.recv(65536), b""))
            for part in self._lost:
                if part in request.partition(b"\r\n")[0]:
                    self._lost.remove(part)
                    return
            client.sendall(answer)


def _read_request(connection: socket.socket) -> bytes:
    head = b""
    while b"\r\n\r\n" not in head:
        head += connection.recv(65536)
    length = re.search(rb"(?i)content-length: *([0-9]+)", head)
    while length and len(head.partition(b"\r\n\r\n")[2]) < int(length[1]):
        head += connection.recv(65536)
    return head


@pytest.mark.usefixtures("packaged_here")
def test_lost_answers_make_one_run_and_one_version(server, policy: Path, tmp_path: Path, warnings: list[str]):
    """MLflow's client repeats a request after a lost answer: that made two runs, and two versions, of one policy."""
    lost = [b"runs/create", b"runs/set-tag", b"model-versions/create"]
    wire = Wire(server.port, lost)
    tracker = Tracker(wire.uri, None, warnings.append)
    with tracker.run(key="d", **ABOUT) as run:
        pass
    for _ in range(2):
        assert tracker.log_evaluation(run.run_id, "e", {"eval/loss": 0.5}, 1, policy / "training.json")
    version = Registry(wire.uri, tmp_path).register(
        "lost", policy, run.run_id, identity={"pedigree.policy": "d"}, tags={}
    )
    assert lost == []
    client = MlflowClient(server.uri)
    experiment_id = client.get_experiment_by_name("remote").experiment_id
    assert len(client.search_runs([experiment_id], "tags.`pedigree.key` = 'd'")) == 1
    assert len(client.get_metric_history(run.run_id, "eval/loss")) == 1
    assert [found.version for found in client.search_model_versions("name = 'lost'")] == [str(version.number)] == ["1"]

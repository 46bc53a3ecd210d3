"""Materialization: the lock during a job, jobs without an artifact, and corrupt artifacts."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from assets.execution.materialize import JobSpec, find_intact, make
from assets.execution.rescore import rescore
from assets.pipeline.pipeline import Pipeline, Services
from tests.workflows.homes import ATTRIBUTES, flip, write_recipe
from tests.workflows.in_process import EndedJob, services_in
from training.contract.config.key_settings import key_settings
from training.contract.errors import CorruptArtifact, StoreError
from training.contract.protocol.artifacts import KINDS, MERGED_POLICY
from training.contract.protocol.details import RescoredDetails
from training.contract.protocol.events import Event
from training.contract.protocol.job import Job
from training.contract.protocol.settings import NoSettings
from training.contract.store.artifact import JobResult, write_json
from training.contract.store.manifest import Derivation
from training.contract.store.store import Store
from training.contract.system.locks import is_held
from workflows.recipes.discovery import load_recipe

LOG = logging.getLogger(__name__)


class RecordingEngine:
    """An engine that publishes `content(job)` unless None. Records all jobs, and those started with their key's lock held."""

    def __init__(self, content: Callable[[Job], Any]):
        self._content = content
        self.jobs: list[Job] = []
        self.locked: list[Job] = []

    def find(self, job: Job) -> None:
        return None

    def submit(self, job: Job, lock: BinaryIO | None = None) -> EndedJob:
        store = Store(job.store)
        if (
            lock is not None
            and store.lock_file(job.artifact, job.derivation.key).samefile(lock.name)
            and is_held(Path(lock.name))
        ):
            self.locked.append(job)
        self.jobs.append(job)
        job.log.touch()
        if (content := self._content(job)) is not None:
            with store.staging() as staging:
                write_json(staging / "rescored.json", content)
                store.publish(staging, job.derivation, JobResult("f" * 64, RescoredDetails(tolerance=0.5)))
        return EndedJob(job.log, 0)


@pytest.fixture
def services(tmp_path: Path) -> Services:
    return services_in(tmp_path)


def pipeline_on(nodes: int, folder: Path) -> Pipeline:
    compute = {**ATTRIBUTES["compute"], "nodes": nodes}
    return load_recipe(write_recipe(folder / "small", {**ATTRIBUTES, "compute": compute})).pipeline


def test_make_passes_the_held_lock_of_the_key_to_the_job(services, tmp_path):
    """So other processes wait for the job, even if its launching process has died."""
    engine = RecordingEngine(lambda job: "merged")
    results = [
        make(
            pipeline_on(1, tmp_path),
            replace(services, engine=engine),
            MERGED_POLICY,
            JobSpec("merge", NoSettings()),
            {},
            LOG,
        )
        for _ in range(2)
    ]
    assert [result.reused for result in results] == [False, True]
    assert engine.locked == engine.jobs and len(engine.jobs) == 1
    assert not is_held(services.store.lock_file(MERGED_POLICY.name, engine.jobs[0].derivation.key))


def test_make_with_a_job_that_publishes_nothing_raises(services, tmp_path):
    engine = RecordingEngine(lambda job: None)
    with pytest.raises(StoreError, match=r"merged_policy .*\[nothing-published\]") as raised:
        make(
            pipeline_on(1, tmp_path),
            replace(services, engine=engine),
            MERGED_POLICY,
            JobSpec("merge", NoSettings()),
            {},
            LOG,
        )
    assert str(engine.jobs[0].log) in str(raised.value)


def test_rescore_runs_one_process_on_one_node(services, tmp_path):
    """Rescoring a pair must not need a cluster, even if the recipe trains on three nodes."""
    side = {"stored": -5.0, "live": -5.0, "allowed": 0.5}
    engine = RecordingEngine(
        lambda job: [{"row": row, "chosen": side, "rejected": side} for row in key_settings(job.settings)["rows"]]
    )
    rescored = rescore(pipeline_on(3, tmp_path), replace(services, engine=engine), {}, [7])
    assert ([pair.row for pair in rescored.rows], rescored.tolerance) == ([7], 0.5)
    [job] = engine.locked
    assert (job.nodes, job.processes) == (1, 1)


@pytest.mark.parametrize(
    ("kind", "settings", "refused"),
    [
        ("policy", {}, True),
        ("reference_model", {"epochs": 1}, True),
        ("reference_model", {}, False),
        ("tokenized_pairs", {}, False),
    ],
    ids=["policy", "tuned reference", "pointer to the base model", "pairs"],
)
def test_find_intact_raises_only_for_corrupt_trained_models(services, kind, settings, refused):
    """Hours of training are not repeated without consent. Other corrupt artifacts are set aside and recomputed."""
    store, derivation = services.store, Derivation(kind=kind, code_version="1", inputs={}, settings=settings)
    with store.staging() as staging:
        (staging / "content").write_bytes(b"what was made")
        artifact = store.publish(staging, derivation, JobResult("f" * 64)).of_kind(KINDS[kind])
    events: list[Event] = []
    services = replace(services, listener=events.append)
    assert find_intact(services, KINDS[kind], derivation, LOG) == artifact and events == []
    flip(artifact.file("content"))
    if refused:
        with pytest.raises(CorruptArtifact, match=r"\[corrupt-model\]") as raised:
            find_intact(services, KINDS[kind], derivation, LOG)
        assert str(artifact.folder) in str(raised.value)
    else:
        assert find_intact(services, KINDS[kind], derivation, LOG) is None
        [note] = events
        assert (note["event"], note["asset"]) == ("note", kind)
        assert "content" in note["text"] and str(store.root / "corrupt") in note["text"]
    assert artifact.folder.exists() is refused

"""How an artifact comes about: what is locked meanwhile, what a job has to leave, and what is not made again unasked."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from assets.execution.materialize import JobSpec, find_intact, make
from assets.execution.rescore import rescore
from assets.pipeline.pipeline import Pipeline, Services
from model_registry.model_version import MERGED
from tests.workflows.homes import ATTRIBUTES, flip, write_recipe
from tests.workflows.in_process import Ended, services_in
from training.contract.errors import CorruptArtifact, StoreError
from training.contract.protocol.events import Event
from training.contract.protocol.job import Job
from training.contract.store.manifest import Derivation
from training.contract.store.store import JobResult, Store, write_json
from training.contract.system.locks import is_held
from workflows.recipes.discovery import load_recipe

LOG = logging.getLogger(__name__)


class Noting:
    """Publishes what `content` gives for a job, if anything; keeps the jobs, and those that got the lock of their key, held."""

    def __init__(self, content: Callable[[Job], Any]):
        self._content = content
        self.jobs: list[Job] = []
        self.locked: list[Job] = []

    def start(self, job: Job, lock: BinaryIO | None = None) -> Ended:
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
                store.publish(staging, job.derivation, JobResult("f" * 64, {"tolerance": 0.5}))
        return Ended(job.log, 0)


@pytest.fixture
def services(tmp_path: Path) -> Services:
    return services_in(tmp_path)


def pipeline_on(nodes: int, folder: Path) -> Pipeline:
    compute = {**ATTRIBUTES["compute"], "nodes": nodes}
    return load_recipe(write_recipe(folder / "small", {**ATTRIBUTES, "compute": compute})).pipeline


def test_a_job_gets_the_lock_of_its_key(services, tmp_path):
    """So whoever wants the same artifact waits for the job, though the process that launched it may be gone by then."""
    launcher = Noting(lambda job: "merged")
    works = [
        make(pipeline_on(1, tmp_path), replace(services, launcher=launcher), MERGED, JobSpec("merge", {}), {}, LOG)
        for _ in range(2)
    ]
    assert [work.reused for work in works] == [False, True]
    assert launcher.locked == launcher.jobs and len(launcher.jobs) == 1
    assert not is_held(services.store.lock_file(MERGED, launcher.jobs[0].derivation.key))


def test_a_job_that_publishes_nothing_has_failed(services, tmp_path):
    given = replace(services, launcher=Noting(lambda job: None))
    with pytest.raises(StoreError, match="the job of merged_policy ended well but published nothing; its log is "):
        make(pipeline_on(1, tmp_path), given, MERGED, JobSpec("merge", {}), {}, LOG)


def test_pairs_are_scored_again_by_one_process_on_one_machine(services, tmp_path):
    """However many the recipe trains on: nobody waits for a cluster to see a pair."""
    launcher = Noting(lambda job: [job.settings["rows"]])
    found = rescore(pipeline_on(3, tmp_path), replace(services, launcher=launcher), {}, [7])
    assert (found.rows, found.tolerance) == ([[7]], 0.5)
    [job] = launcher.locked
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
def test_only_what_was_trained_is_refused_when_it_is_corrupt(services, kind, settings, refused):
    """Hours of training are not repeated unasked; the rest is set aside and made again."""
    store, how = services.store, Derivation(kind=kind, code_version="1", inputs={}, settings=settings)
    with store.staging() as staging:
        (staging / "content").write_bytes(b"what was made")
        made = store.publish(staging, how, JobResult("f" * 64))
    told: list[Event] = []
    services = replace(services, listener=told.append)
    assert find_intact(services, how, LOG) == made and told == []
    flip(made.file("content"))
    if refused:
        with pytest.raises(CorruptArtifact, match="What was trained is not made again unasked"):
            find_intact(services, how, LOG)
    else:
        assert find_intact(services, how, LOG) is None
        [note] = told
        assert (note["event"], note["asset"]) == ("note", kind)
        assert "content" in note["text"] and note["text"].endswith("; it is made again.")
    assert made.folder.exists() is refused

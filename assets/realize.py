"""Ask the store, else launch a job: the one way an asset comes to its artifact.

Dagster executes every explicit materialization, so it is the body that must find out whether there is anything to do.
The key's lock is held from the question to the answer, and by the job's own processes as long as one of them lives.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import dagster as dg

from assets.changes import changes_since, input_changes, shown_changes
from assets.event_log import EventLog, Log
from assets.graph import GRAPH
from assets.locate import locate_base_model
from assets.metadata import artifact_metadata
from assets.pipeline import Listener, Pipeline, Services, ignore
from assets.process import sign
from assets.recorded import data_version
from assets.world import Found, count_source_rows
from training.contract.errors import CorruptArtifact, StoreError, UsageError
from training.contract.events import Event
from training.contract.fingerprint import short
from training.contract.hub import check_files
from training.contract.job import Input, Job, JobKind
from training.contract.manifest import Derivation
from training.contract.store import Artifact, Made, Store
from training.contract.weights import weight_files
from training.launch.launcher import run_job

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Realized:
    """An artifact, whether it was there already, and the seconds it took to have it.

    `changes`: in words, what is not as it was at the latest materialization; None for the first one.
    """

    artifact: Artifact
    reused: bool
    seconds: float
    changes: Sequence[str] | None = None

    def result(
        self, metadata: dict[str, Any] | None = None, checks: list[dg.AssetCheckResult] | None = None
    ) -> dg.MaterializeResult:
        """What Dagster is told: the data version, where the files are, and whatever the asset has to show."""
        why = {"outcome": "reused" if self.reused else "computed", "changes": shown_changes(self.changes)}
        return dg.MaterializeResult(
            data_version=dg.DataVersion(self.artifact.fingerprint),
            metadata={**why, **(metadata or {}), **artifact_metadata(self.artifact, self.seconds)},
            check_results=checks or [],
        )


@dataclass(frozen=True)
class Work:
    """A job to launch if the artifact is not there; `during` gives what listens to the job's events while it runs."""

    kind: JobKind
    settings: dict[str, Any]
    locations: dict[str, Any] = field(default_factory=dict)
    during: Callable[[Job], AbstractContextManager[Listener]] | None = None


def latest_metadata(instance: dg.DagsterInstance, key: dg.AssetKey) -> dict[str, Any]:
    """The plain values that the latest materialization of `key` showed; empty if there is none."""
    event = instance.get_latest_materialization_event(key)
    if event is None or event.asset_materialization is None:
        return {}
    return {name: value.value for name, value in event.asset_materialization.metadata.items()}


def latest_key(instance: dg.DagsterInstance, key: dg.AssetKey) -> str | None:
    """The key of the derivation that the latest materialization of `key` gave; None if there is none."""
    found = latest_metadata(instance, key).get("key")
    return None if found is None else str(found)


def latest_derivation(
    instance: dg.DagsterInstance, pipeline: Pipeline, store: Store, asset: str, fingerprint: str
) -> Derivation:
    """How the artifact `fingerprint` of `asset` was made when it was last materialized.

    Its manifest tells the first way to its content only. That is the answer where the last way is not known: another
    artifact was materialized since, or its record is gone. Raises StoreError if there is no such artifact either.
    """
    key = pipeline.key(asset)
    if data_version(instance, key) == fingerprint and (latest := latest_key(instance, key)) is not None:
        told = store.derivation(asset, latest)
        if told is not None:
            return told
    return store.open(asset, fingerprint, hashes=False).manifest.made_from


def upstream(context: dg.AssetExecutionContext, pipeline: Pipeline, services: Services, asset: str) -> Artifact:
    """The artifact of `asset` as last materialized, verified. Raises UsageError if it never was."""
    key = pipeline.key(asset)
    found = data_version(context.instance, key)
    if found is None:
        raise UsageError(f"{key.to_user_string()} was never materialized; materialize it first")
    return services.store.open(asset, found)


def realize(
    context: dg.AssetExecutionContext,
    pipeline: Pipeline,
    services: Services,
    work: Work,
    changes: Sequence[str] | None = None,
) -> Realized:
    """The artifact of the asset in `context`: from the store if its derivation is known, else by a job.

    Unless `changes` are given, those of the inputs as Dagster recorded them are told.
    """
    sign(context, services.home)
    asset = context.asset_key.path[-1]
    inputs = {name: upstream(context, pipeline, services, name) for name in GRAPH[asset].needed_by(pipeline.recipe)}
    made = make(pipeline, services, asset, work, inputs, context.log)
    return replace(made, changes=changes if changes is not None else input_changes(context.instance, pipeline, asset))


def make(
    pipeline: Pipeline, services: Services, asset: str, work: Work, inputs: Mapping[str, Artifact], log: Log
) -> Realized:
    """`asset` made from `inputs`, in the store: nothing of it is known to Dagster, which is for the caller to tell."""
    started = time.monotonic()
    job = describe_job(pipeline, services, asset, work, inputs)
    derivation = job.derivation
    with services.store.lock(derivation.kind, derivation.key) as lock:
        found = find_sound(services, derivation, log)
        if found is None:
            log.info(f"{derivation.kind}: nothing of key {short(derivation.key)} in the store; job in {job.folder}")
            run_work(services, job, work, lock, log)
    artifact = found or services.store.find(derivation.kind, derivation.key, hashes=False)
    if artifact is None:
        raise StoreError(f"the job of {derivation.kind} ended well but published nothing; its log is {job.log}")
    return Realized(artifact, reused=found is not None, seconds=time.monotonic() - started)


def record_found(
    services: Services, found: Found, instance: dg.DagsterInstance | None = None, pipeline: Pipeline | None = None
) -> Realized:
    """The artifact of a source or a spec that no job has to make.

    With an instance and a pipeline it is told what changed since the latest materialization.
    """
    assert found.fingerprint is not None, f"{found.asset} is made by a job"
    known = None if instance is None or pipeline is None else latest_key(instance, pipeline.key(found.asset))
    changes = None if known is None else changes_since(services.store, known, found)
    made = record(services, found.derivation, found.fingerprint, found.files, lambda: _facts(found))
    return replace(made, changes=changes)


def _facts(found: Found) -> dict[str, Any]:
    """What is told of a source that is recorded for the first time; a new model of the hub is what the hub promised."""
    if found.asset == "base_model":
        if found.places["commit"] is not None:
            check_files([*weight_files(found.places["folder"]), found.places["folder"] / "config.json"])
        weights = found.derivation.settings["weights"]
        return {name: weights[name] for name in ("tensors", "bytes")}
    if found.asset != "preference_source":
        return {}
    files = found.places["files"].values()
    return {
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "rows": count_source_rows(found),
    }


def record(
    services: Services,
    derivation: Derivation,
    fingerprint: str,
    files: dict[str, Any],
    details: Callable[[], dict[str, Any]] = dict,
) -> Realized:
    """An artifact of a few small JSON files whose content is known already: no job is needed."""
    started = time.monotonic()
    with services.store.lock(derivation.kind, derivation.key):
        found = find_sound(services, derivation, _LOG)
        if found is not None:
            return Realized(found, reused=True, seconds=time.monotonic() - started)
        with services.store.staging() as staging:
            for name, content in files.items():
                (staging / name).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
            artifact = services.store.publish(staging, derivation, Made(fingerprint, details()))
    return Realized(artifact, reused=False, seconds=time.monotonic() - started)


def find_sound(services: Services, derivation: Derivation, log: Log) -> Artifact | None:
    """What the store has for `derivation`; a corrupt cache is set aside, with a warning, as if it had never been."""
    try:
        return services.store.find(derivation.kind, derivation.key)
    except CorruptArtifact as error:
        if is_irreplaceable(derivation):
            raise
        place = services.store.set_aside_key(derivation.kind, derivation.key)
        log.warning(f"{error}. Set aside in {place}; it is made again.")
        return None


def is_irreplaceable(derivation: Derivation) -> bool:
    """Whether it gives a trained model, which is refused where it is not what was published: a person has to know.

    Anything else can be made again without loss, a pointer to the base model too.
    """
    return derivation.kind == "policy" or (derivation.kind == "reference_model" and bool(derivation.settings))


def describe_job(pipeline: Pipeline, services: Services, asset: str, work: Work, inputs: Mapping[str, Artifact]) -> Job:
    """The job that makes `asset`, which may be no asset of the graph but something made from some of them."""
    job = Job(
        kind=work.kind,
        artifact=asset,
        code_version=GRAPH[asset].version if asset in GRAPH else "1",
        inputs={name: _input(pipeline, services, name, artifact) for name, artifact in inputs.items()},
        settings=work.settings,
        locations=work.locations,
        compute=pipeline.recipe.compute,
        recipe=pipeline.recipe.model_dump(mode="json"),
        store=services.store.root,
        folder=services.home / "jobs",
    )
    return job.model_copy(update={"folder": job.folder / f"{asset}-{short(job.derivation.key)}"})


def _input(pipeline: Pipeline, services: Services, name: str, artifact: Artifact) -> Input:
    folder = artifact.folder
    if name == "base_model" or "pointer.json" in artifact.manifest.files:
        folder = _base_model_folder(pipeline, services, artifact)
    return Input(kind=name, fingerprint=artifact.fingerprint, folder=folder)


def _base_model_folder(pipeline: Pipeline, services: Services, artifact: Artifact) -> Path:
    """Where the base model lies now, after making sure that it still is the one that `artifact` was made of."""
    located = locate_base_model(pipeline.recipe, services.registry)
    if located.fingerprint != artifact.fingerprint:
        raise StoreError(
            f"the weights in {located.folder} are {short(located.fingerprint)}, but {artifact.manifest.kind} was "
            f"materialized from {short(artifact.fingerprint)}; materialize {pipeline.name}/base_model and what follows it"
        )
    return located.folder


def run_work(services: Services, job: Job, work: Work, lock: BinaryIO, log: Log) -> None:
    """Run `job` to its end, with its events told to the log, the services' listener and whoever `work` names."""
    events = EventLog(log, job.artifact)
    with work.during(job) if work.during else nullcontext(ignore) as listener:

        def hear(event: Event) -> None:
            events.hear(event)
            services.listener({**event, "asset": job.artifact})
            listener(event)

        run_job(services.launcher, job, hear, lock)

"""Ask the store, else launch a job: the one way an asset comes to its artifact.

Dagster executes every explicit materialization, so it is the body that must find out whether there is anything to do.
The key's lock is held from the question to the answer, and by the job's own processes as long as one of them lives.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from logging import Logger
from pathlib import Path
from typing import Any, BinaryIO

import dagster as dg

from assets.execution.asset_context import AssetContext
from assets.execution.changes import input_changes, resolved_changes
from assets.execution.interruption import naming_checkpoint
from assets.execution.job_log import log_message, with_log
from assets.inputs.current import ResolvedInput
from assets.inputs.resolve import LocatedModel, locate_base_model, peek_base_model
from assets.pipeline.graph import derive
from assets.pipeline.pipeline import Listener, Pipeline, Services, ignore
from assets.views.metadata import artifact_metadata, shown_changes
from training.contract.errors import CorruptArtifact, CorruptRecord, PedigreeError, StoreError
from training.contract.identity.file_stamps import Stamps, artifact_stamps, model_stamps, settled
from training.contract.identity.fingerprint import short
from training.contract.protocol.events import Event, read_events
from training.contract.protocol.job import Input, Job, JobKind, job_folder
from training.contract.store.manifest import Derivation
from training.contract.store.store import Artifact, JobResult, write_json
from training.launch.launcher import run_job


@dataclass(frozen=True)
class MaterializedArtifact:
    """An artifact, and whether it was there already.

    `changes`: in words, what differs from the latest materialization; None for the first one.
    """

    artifact: Artifact
    reused: bool
    changes: Sequence[str] | None = None

    def result(self, metadata: Mapping[str, Any], checks: Sequence[dg.AssetCheckResult] = ()) -> dg.MaterializeResult:
        """What Dagster is told: the data version, where the files are, and whatever the asset has to show."""
        why = {"outcome": "reused" if self.reused else "computed", "changes": shown_changes(self.changes)}
        return dg.MaterializeResult(
            data_version=dg.DataVersion(self.artifact.fingerprint),
            metadata={**why, **metadata, **artifact_metadata(self.artifact)},
            check_results=checks,
        )


@dataclass(frozen=True)
class JobSpec:
    """A job to launch if the artifact is not there; `during` gives a further listener to the job's events."""

    kind: JobKind
    settings: dict[str, Any]
    locations: dict[str, Any] = field(default_factory=dict)
    during: Callable[[Job], AbstractContextManager[Listener]] | None = None


def materialize(step: AssetContext, work: JobSpec, found: ResolvedInput | None = None) -> MaterializedArtifact:
    """The artifact of an asset: from the store if its derivation is known, else by a job.

    `found` is given for a spec, whose changes are told by what was found; else those of the inputs are told.
    """
    made = make(step.pipeline, step.services, step.asset, work, step.inputs(), step.context.log)
    return replace(made, changes=input_changes(step) if found is None else resolved_changes(step, found))


def materialize_resolved(step: AssetContext, found: ResolvedInput) -> MaterializedArtifact:
    """The artifact of a source or a spec that no job has to make."""
    return replace(publish_resolved(step.services, found, step.context.log), changes=resolved_changes(step, found))


def make(
    pipeline: Pipeline, services: Services, asset: str, work: JobSpec, inputs: Mapping[str, str], log: Logger
) -> MaterializedArtifact:
    """`asset` made from `inputs` (fingerprints by name), in the store; Dagster is told nothing.

    Inputs, and the base model where it lies, are read and hashed only if a job is to read them.
    """
    how = derive(asset, dict(inputs), work.settings)
    with services.store.lock(asset, how.key) as lock:
        known = artifact = find_intact(services, how, log)
        if artifact is None:
            job = describe_job(pipeline, services, asset, work, inputs)
            log.info(f"{asset}: nothing of key {short(how.key)} in the store; job in {job.folder}")
            with naming_checkpoint(pipeline, job):
                artifact = run_work(services, job, work, lock, log)
    return MaterializedArtifact(artifact, reused=known is not None)


def publish_resolved(services: Services, found: ResolvedInput, log: Logger) -> MaterializedArtifact:
    """What was found as an artifact of a few small JSON files, without a job; Dagster is told nothing."""
    assert found.fingerprint is not None, f"{found.asset} is made by a job"
    derivation = found.derivation
    with services.store.lock(derivation.kind, derivation.key):
        known = artifact = find_intact(services, derivation, log)
        if artifact is None:
            with services.store.staging() as staging:
                for name, content in found.files.items():
                    write_json(staging / name, content)
                artifact = services.store.publish(staging, derivation, JobResult(found.fingerprint, found.details()))
    return MaterializedArtifact(artifact, reused=known is not None)


def find_intact(services: Services, derivation: Derivation, log: Logger) -> Artifact | None:
    """What the store has for `derivation`. A corrupt artifact that can be made again is set aside, and people are told.

    A corrupt record is no reason to train again for hours: the manifest says the same.
    """
    store, kind, key = services.store, derivation.kind, derivation.key
    try:
        return store.reuse(kind, key)
    except CorruptRecord as error:
        place = store.repair_record(kind, key)
        log_message(services, log, kind, f"{error}. Set aside in {place}; the manifest of its artifact is used.")
        return find_intact(services, derivation, log)
    except CorruptArtifact as error:
        made = store.record(kind, key)
        assert made is not None, f"{kind} {key} was never made"
        if is_irreplaceable(derivation):
            raise CorruptArtifact(
                f"{error}. What was trained is not made again unasked: restore {store.folder(kind, made.fingerprint)} from a "
                "backup, or move it away, and the next run trains it again"
            ) from error
        place = store.set_aside(kind, made.fingerprint)
        log_message(services, log, kind, f"{error}. Set aside in {place}; it is made again.")
        return None


def is_irreplaceable(derivation: Derivation) -> bool:
    """Whether it gives a trained model, which is refused where it is not what was published: a person has to know.

    Anything else can be made again without loss, a pointer to the base model too.
    """
    return derivation.kind == "policy" or (derivation.kind == "reference_model" and bool(derivation.settings))


def describe_job(pipeline: Pipeline, services: Services, asset: str, work: JobSpec, inputs: Mapping[str, str]) -> Job:
    """The job that makes `asset` from `inputs` (fingerprints by name): one of the graph, or another kind of artifact.

    The inputs are verified here. What the job reads is compared with that: a location in `work` is verified by the job itself.
    """
    how = derive(asset, dict(inputs), work.settings)
    given = {name: _input(pipeline, services, name, found) for name, found in inputs.items()}
    return Job(
        kind=work.kind,
        artifact=asset,
        code_version=how.code_version,
        inputs={name: found for name, (found, _) in given.items()},
        settings=work.settings,
        locations=work.locations,
        compute=pipeline.recipe.compute,
        recipe=pipeline.recipe.model_dump(mode="json"),
        store=services.store.root,
        folder=job_folder(services.home, how),
        stamps={name: stamps for name, (_, stamps) in given.items()},
    )


def _input(pipeline: Pipeline, services: Services, name: str, fingerprint: str) -> tuple[Input, Stamps]:
    """The verified input, and the stamps of its files from before they were hashed."""
    folder = services.store.folder(name, fingerprint)
    stamps = settled(artifact_stamps(folder))
    artifact = services.store.open(name, fingerprint)
    if name == "base_model" or "pointer.json" in artifact.manifest.files:
        folder, stamps = _base_model_folder(pipeline, services, artifact)
    return Input(kind=name, fingerprint=artifact.fingerprint, folder=folder), stamps


def _base_model_folder(pipeline: Pipeline, services: Services, artifact: Artifact) -> tuple[Path, Stamps]:
    """Where the base model lies now. Raises StoreError if it is no longer the one that `artifact` was made from."""
    glimpsed = _peeked_folder(pipeline, services)
    stamps = settled(model_stamps(glimpsed)) if glimpsed else {}
    located = locate_base_model(pipeline, services.registry, weights=artifact.fingerprint)
    if located.fingerprint != artifact.fingerprint:
        raise StoreError(
            f"the weights in {located.folder} are {short(located.fingerprint)}, but {artifact.manifest.kind} was "
            f"materialized from {short(artifact.fingerprint)}: they changed since; materialize {pipeline.name}/base_model and "
            "what follows it, once they are written (`pedigree run` does all of it)"
        )
    return located.folder, stamps if glimpsed == located.folder else {}


def _peeked_folder(pipeline: Pipeline, services: Services) -> Path | None:
    """Where the base model seems to lie, before it is hashed; None where that cannot be said so soon."""
    with suppress(PedigreeError, OSError):
        glimpsed = peek_base_model(pipeline, services.registry, services.hashes)
        return glimpsed.folder if isinstance(glimpsed, LocatedModel) else None
    return None


def run_work(services: Services, job: Job, work: JobSpec, lock: BinaryIO, log: Logger) -> Artifact:
    """Run `job` to its end and give what it published; the log, the services' listener and that of `work` hear its events.

    A job that resumes repeats the events of its earlier attempts, which people have seen already. Times are compared with
    theirs, since the clock of the machine that writes them may be behind ours.
    """
    told = with_log(services, log, job.artifact).listener
    last_seen = max((event["time"] for event in read_events(job.events)), default=0.0)
    with work.during(job) if work.during else nullcontext(ignore) as listener:

        def hear(event: Event) -> None:
            if event["time"] > last_seen:
                told(event)
            listener(event)

        run_job(services.launcher, job, hear, lock)
    artifact = services.store.find(job.artifact, job.derivation.key, hashes=False)
    if artifact is None:
        raise StoreError(f"the job of {job.artifact} ended well but published nothing; its log is {job.log}")
    return artifact

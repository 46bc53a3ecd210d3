"""Materialize an asset: look up its derivation in the store, and launch a job only if it is missing.

Dagster executes every explicit materialization, so the body must find out if there is work to do. The key's lock is held from
the lookup until the artifact is published, and by the job's processes as long as one of them lives.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from logging import Logger
from pathlib import Path
from typing import Any, BinaryIO, Generic

import dagster as dg

from assets.execution.asset_context import AssetContext
from assets.execution.changes import input_changes, resolved_changes
from assets.execution.interruption import is_canceled, naming_checkpoint, noting_sigterm
from assets.execution.job_log import log_message, with_log
from assets.inputs.current import ResolvedInput
from assets.inputs.resolve import LocatedModel, locate_base_model, peek_base_model
from assets.pipeline.graph import Fingerprints, derive, kind_of
from assets.pipeline.pipeline import Listener, Pipeline, Services, ignore
from assets.views.metadata import artifact_metadata, rounded, shown_changes
from training.contract.config.key_settings import Settings
from training.contract.errors import CorruptArtifact, CorruptRecord, PedigreeError, StoreError, without_code
from training.contract.identity.file_stamps import Stamps, artifact_stamps, model_stamps, settled
from training.contract.identity.fingerprint import short
from training.contract.protocol.artifacts import AssetName
from training.contract.protocol.events import Event, read_events
from training.contract.protocol.job import JOB_MODELS, Input, Job, JobKind, job_folder
from training.contract.protocol.locations import Locations
from training.contract.store.artifact import Artifact, JobResult, write_json
from training.contract.store.artifact_kind import ArtifactKind, DetailsT
from training.contract.store.manifest import Derivation
from training.launch.launcher import run_job


@dataclass(frozen=True)
class MaterializedArtifact(Generic[DetailsT]):
    """An artifact. `reused`: it was in the store already.

    `changes`: texts of the changes since the latest materialization; None for the first one.
    """

    artifact: Artifact[DetailsT]
    reused: bool
    changes: Sequence[str] | None = None

    def result(
        self,
        sentence: str,
        links: Mapping[str, Any],
        figures: Mapping[str, Any],
        checks: Sequence[dg.AssetCheckResult] = (),
    ) -> dg.MaterializeResult:
        """Return Dagster's result: data version, metadata in the order of the page, and checks.

        The page begins with the `sentence` of result, then pictures and `links`. Figures and the artifact's identity follow.
        """
        outcome = {"outcome": "reused" if self.reused else "computed", "changes": shown_changes(self.changes)}
        shown = {"result": dg.MetadataValue.text(sentence), **links, **outcome}
        return dg.MaterializeResult(
            data_version=dg.DataVersion(self.artifact.fingerprint),
            metadata={**shown, **rounded(figures), **artifact_metadata(self.artifact)},
            check_results=checks,
        )


@dataclass(frozen=True)
class JobSpec:
    """A job to launch if the artifact is missing. `during` opens a further listener for the job's events."""

    kind: JobKind
    settings: Settings
    locations: Locations | None = None
    during: Callable[[Job], AbstractContextManager[Listener]] | None = None


def materialize(
    context: AssetContext, kind: ArtifactKind[DetailsT], work: JobSpec, found: ResolvedInput | None = None
) -> MaterializedArtifact[DetailsT]:
    """Return the artifact of an asset, of this `kind`: from the store if its derivation is known, else from a job.

    `found`: the resolved input of a spec, whose changes are reported. For other assets, changes of their inputs are reported.
    """
    services = observe_queue(context)
    materialized = make(context.pipeline, services, kind, work, context.inputs(), context.dagster.log)
    return replace(materialized, changes=input_changes(context) if found is None else resolved_changes(context, found))


def observe_queue(context: AssetContext) -> Services:
    """Return services that report the state of a job in a queue on the asset's page, too."""
    listener, key = context.services.listener, context.pipeline.key(context.asset)

    def on_event(event: Event) -> None:
        if phase := event.get("queue"):
            context.dagster.log_event(dg.AssetObservation(key, description=event["text"], metadata={"job": phase}))
        listener(event)

    return replace(context.services, listener=on_event, is_canceled=partial(is_canceled, context))


def materialize_resolved(
    context: AssetContext, kind: ArtifactKind[DetailsT], found: ResolvedInput
) -> MaterializedArtifact[DetailsT]:
    """Return the artifact of a source or a spec without a job."""
    published = publish_resolved(context.services, kind, found, context.dagster.log)
    return replace(published, changes=resolved_changes(context, found))


def make(
    pipeline: Pipeline,
    services: Services,
    kind: ArtifactKind[DetailsT],
    work: JobSpec,
    inputs: Fingerprints,
    log: Logger,
) -> MaterializedArtifact[DetailsT]:
    """Make an artifact of `kind` from `inputs` (fingerprints by name) in the store, without a report to Dagster.

    Inputs, and the base model in its folder, are read and hashed only for a job.
    """
    derivation = derive(kind.name, inputs, work.settings)
    with services.store.lock(kind.name, derivation.key) as lock:
        stored = artifact = find_intact(services, kind, derivation, log)
        if artifact is None:
            job = describe_job(pipeline, services, kind.name, work, inputs)
            log.info(f"{kind.name}: nothing with key {short(derivation.key)} in the store; job in {job.folder}")
            with naming_checkpoint(pipeline, job):
                artifact = run_work(services, kind, job, work, lock, log)
    return MaterializedArtifact(artifact, reused=stored is not None)


def publish_resolved(
    services: Services, kind: ArtifactKind[DetailsT], found: ResolvedInput, log: Logger
) -> MaterializedArtifact[DetailsT]:
    """Publish a resolved input as an artifact of a few small JSON files, without a job or a report to Dagster."""
    assert found.fingerprint is not None, f"{found.asset} is made by a job"
    derivation = found.derivation
    with services.store.lock(derivation.kind, derivation.key):
        stored = artifact = find_intact(services, kind, derivation, log)
        if artifact is None:
            with services.store.staging() as staging:
                for name, content in found.files.items():
                    write_json(staging / name, content)
                result = JobResult(found.fingerprint, found.details())
                artifact = services.store.publish(staging, derivation, result).of_kind(kind)
    return MaterializedArtifact(artifact, reused=stored is not None)


def find_intact(
    services: Services, artifact_kind: ArtifactKind[DetailsT], derivation: Derivation, log: Logger
) -> Artifact[DetailsT] | None:
    """Return the artifact of `derivation` in the store, or None.

    Repair a corrupt record from the manifest: it has the same content, so training again is unnecessary. Set a corrupt artifact
    aside with a message if it can be recomputed. Raise CorruptArtifact if it is irreplaceable.
    """
    store, kind, key = services.store, derivation.kind, derivation.key
    try:
        return store.reuse(artifact_kind, key)
    except CorruptRecord as error:
        path = store.repair_record(kind, key)
        text = f"{without_code(str(error))}. Set aside in {path}; the manifest of its artifact is used."
        log_message(services, log, kind, text)
        return find_intact(services, artifact_kind, derivation, log)
    except CorruptArtifact as error:
        record = store.record(kind, key)
        assert record is not None, f"{kind} {key} was never made"
        text = without_code(str(error))
        if is_irreplaceable(derivation):
            raise CorruptArtifact(
                f"{text}. A trained model is not trained again without your consent: restore "
                f"{store.folder(kind, record.fingerprint)} from a backup, or move it away to train it again in the next run",
                "corrupt-model",
            ) from error
        path = store.set_aside(kind, record.fingerprint)
        log_message(services, log, kind, f"{text}. Set aside in {path}; it is made again.")
        return None


def is_irreplaceable(derivation: Derivation) -> bool:
    """Return whether it makes a trained model. If one is corrupt, the user has to decide.

    All other artifacts can be recomputed without loss, including a pointer to the base model.
    """
    return derivation.kind == AssetName.POLICY or (
        derivation.kind == AssetName.REFERENCE_MODEL and bool(derivation.settings)
    )


def describe_job(pipeline: Pipeline, services: Services, asset: str, work: JobSpec, inputs: Fingerprints) -> Job:
    """Return the job that makes `asset`, or another kind of artifact, from `inputs` (fingerprints by name).

    The inputs are verified here, and the job compares its reads with them. The job itself verifies the locations in `work`.
    """
    derivation = derive(asset, inputs, work.settings)
    verified = {name: _verify_input(pipeline, services, name, fingerprint) for name, fingerprint in inputs.items()}
    return Job(
        kind=work.kind,
        artifact=asset,
        code_version=derivation.code_version,
        inputs={name: job_input for name, (job_input, _) in verified.items()},
        settings=work.settings,
        locations=work.locations or JOB_MODELS[work.kind].locations(),
        compute=pipeline.recipe.compute,
        recipe=pipeline.recipe,
        store=services.store.root,
        folder=job_folder(services.home, derivation),
        stamps={name: stamps for name, (_, stamps) in verified.items()},
    )


def _verify_input(pipeline: Pipeline, services: Services, name: str, fingerprint: str) -> tuple[Input, Stamps]:
    """Return the verified input, and its files' stamps taken before hashing."""
    kind = kind_of(name)
    folder = services.store.folder(kind, fingerprint)
    stamps = settled(artifact_stamps(folder))
    artifact = services.store.open(kind, fingerprint)
    if kind == AssetName.BASE_MODEL or "pointer.json" in artifact.manifest.files:
        folder, stamps = _verify_base_model(pipeline, services, artifact)
    return Input(kind=kind, fingerprint=artifact.fingerprint, folder=folder), stamps


def _verify_base_model(pipeline: Pipeline, services: Services, artifact: Artifact) -> tuple[Path, Stamps]:
    """Return the base model's current folder and stamps. Raise StoreError if its weights differ from `artifact`'s."""
    peeked = _peek_folder(pipeline, services)
    stamps = settled(model_stamps(peeked)) if peeked else {}
    located = locate_base_model(pipeline, services.registry, weights=artifact.fingerprint)
    if located.fingerprint != artifact.fingerprint:
        raise StoreError(
            f"the weights in {located.folder} are {short(located.fingerprint)}, but {artifact.manifest.kind} was "
            f"materialized from {short(artifact.fingerprint)}: they changed since; materialize {pipeline.name}/base_model and "
            "the assets after it, once they are written (`pedigree run` does all of it)",
            "base-model-changed",
        )
    return located.folder, stamps if peeked == located.folder else {}


def _peek_folder(pipeline: Pipeline, services: Services) -> Path | None:
    """Return the likely folder of the base model, before hashing it; None if it is not known yet."""
    with suppress(PedigreeError, OSError):
        peeked = peek_base_model(pipeline, services.registry, services.hashes)
        return peeked.folder if isinstance(peeked, LocatedModel) else None
    return None


def run_work(
    services: Services, kind: ArtifactKind[DetailsT], job: Job, work: JobSpec, lock: BinaryIO, log: Logger
) -> Artifact[DetailsT]:
    """Run `job` and return its artifact. Pass its events to the log, to the services' listener and to the listener of `work`.

    A resumed job repeats the events of earlier attempts. Log and services get only newer ones. The threshold is the time of the
    last event, because the clock of the job's machine may be behind this one.
    """
    log_event = with_log(services, log, job.artifact).listener
    last_seen = max((event["time"] for event in read_events(job.events)), default=0.0)
    with work.during(job) if work.during else nullcontext(ignore) as listener:

        def on_event(event: Event) -> None:
            if event["time"] > last_seen:
                log_event(event)
            listener(event)

        with noting_sigterm():
            run_job(services.engine, job, on_event, lock, services.is_canceled)
    artifact = services.store.find(kind, job.derivation.key, hashes=False)
    if artifact is None:
        raise StoreError(
            f"the job of {job.artifact} succeeded without publishing an artifact; see its log {job.log}",
            "nothing-published",
        )
    return artifact

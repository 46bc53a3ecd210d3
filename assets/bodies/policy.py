"""Body of the policy: a torchrun job, with live events in Dagster's log and in an MLflow run."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import dagster as dg

from assets.bodies import checks
from assets.execution.asset_context import AssetContext
from assets.execution.materialize import JobSpec, materialize
from assets.inputs.resolve import locate_champion
from assets.pipeline.pipeline import Listener
from assets.views.metadata import reward_curves
from model_registry.mlflow_types import DatasetRef
from model_registry.tracked_run import TrackedRun
from training.contract.errors import StoreError
from training.contract.identity.fingerprint import short
from training.contract.protocol.events import Event, read_events
from training.contract.protocol.job import Job
from training.contract.store.manifest import Derivation
from training.contract.store.store import Artifact


def policy(context: AssetContext) -> dg.MaterializeResult:
    settings = context.settings
    start = _locate_start(context, settings["champion"]) if settings.get("champion") else {}
    materialized = materialize(context, JobSpec("policy", settings, start, during=partial(_track_job, context)))
    artifact = materialized.artifact
    details = artifact.details
    metadata = {
        "rewards": context.picture("rewards", artifact, lambda: reward_curves(details["series"])),
        "steps": details["steps"],
        **details["train"],
        **details.get("eval", {}),
        "seconds_by_phase": dg.MetadataValue.json(details["seconds"]),
        "provenance": dg.MetadataValue.json(details["provenance"]),
        **_tracking_links(context, artifact),
    }
    return materialized.result(metadata, [checks.step0(artifact), checks.rewards(artifact)])


def _locate_start(context: AssetContext, champion: str) -> dict[str, Any]:
    """Return the location of the spec's champion. Raise StoreError if no version has its weights any more."""
    located = locate_champion(context.pipeline.recipe, context.services.registry, weights=champion)
    if located is None or located.fingerprint != champion:
        current = "there is none" if located is None else f"it has the weights {short(located.fingerprint)}"
        spec = f"{context.pipeline.name}/training_spec"
        raise StoreError(
            f"{spec} starts from the champion with the weights {short(champion)}, and now {current}; "
            f"materialize {spec} and the assets after it",
            "champion-changed",
        )
    return {"champion": str(located.folder)}


def delivered_run(context: AssetContext, policy: Artifact) -> str | None:
    """Log missing events to the MLflow run of a policy, and return its id; None without a server."""
    derivation = context.history.derivation("policy", policy.fingerprint)
    return _deliver(context, replace(policy, derivation=derivation), policy.json("recipe.json"))


def _read_events(policy: Artifact) -> Iterator[Event]:
    """Yield the events of the training. Skip held-out metrics if another training wrote them, perhaps with other pairs."""
    is_first = policy.manifest.made_from.key == policy.derivation.key
    events = read_events(policy.file("events.jsonl"))
    return (event for event in events if is_first or event["event"] != "eval")


def _deliver(context: AssetContext, policy: Artifact, recipe: dict[str, Any]) -> str | None:
    """Return the id of the policy's MLflow run. Replay a missing or incomplete run. Return None without a server.

    `recipe`: the parameters of the run. The recipe in the artifact is the first one that led to these weights.
    """
    derivation = policy.derivation
    if (run_id := context.services.tracker.find_run(context.pipeline.family, derivation.key)) is not None:
        return run_id
    with _open_run(context, derivation, recipe) as run:
        run.replay(_read_events(policy))
    return run.run_id


def _tracking_links(context: AssetContext, policy: Artifact) -> dict[str, Any]:
    tracker, run_id = (
        context.services.tracker,
        _deliver(context, policy, context.pipeline.recipe.model_dump(mode="json")),
    )
    if run_id is None:
        return {}
    tracker.tag(run_id, {"policy": policy.fingerprint})
    return {"mlflow_run_id": run_id, "mlflow": dg.MetadataValue.url(tracker.run_link(run_id))}


@contextmanager
def _track_job(context: AssetContext, job: Job) -> Iterator[Listener]:
    """Open an MLflow run when the job starts. Yield its listener for the job's events."""
    with _open_run(context, job.derivation, job.recipe) as run:
        yield run.record


def _open_run(
    context: AssetContext, derivation: Derivation, recipe: dict[str, Any]
) -> AbstractContextManager[TrackedRun]:
    pipeline, pairs_fingerprint = context.pipeline, derivation.inputs["tokenized_pairs"].fingerprint
    pairs = context.services.store.open("tokenized_pairs", pairs_fingerprint, hashes=False)  # not always the latest
    lineage = context.history.lineage({name: source.fingerprint for name, source in derivation.inputs.items()})
    return context.services.tracker.run(
        experiment=pipeline.family,  # shared by a recipe and its variants
        key=derivation.key,
        name=f"{pipeline.name}-{short(derivation.key)}",
        params=recipe,
        tags={**lineage, "recipe": pipeline.name, "dagster_run_id": context.dagster.run.run_id},
        dataset=DatasetRef(
            name="tokenized_pairs",
            fingerprint=pairs.fingerprint,
            source=pairs.folder.as_uri(),
            rows={split: pairs.details["counts"][split] for split in ("train", "validation")},
        ),
    )

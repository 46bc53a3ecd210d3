"""The trained policy: a torchrun job whose events are followed, live, into the Dagster log and an MLflow run."""

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


def policy(step: AssetContext) -> dg.MaterializeResult:
    settings = step.settings
    start = _start(step, settings["champion"]) if settings.get("champion") else {}
    made = materialize(step, JobSpec("policy", settings, start, during=partial(_follow, step)))
    details = made.artifact.details
    metadata = {
        "rewards": step.picture("rewards", made.artifact, lambda: reward_curves(details["series"])),
        "steps": details["steps"],
        **details["train"],
        **details.get("eval", {}),
        "seconds_by_phase": dg.MetadataValue.json(details["seconds"]),
        "provenance": dg.MetadataValue.json(details["provenance"]),
        **_links(step, made.artifact),
    }
    return made.result(metadata, [checks.step0(made.artifact), checks.rewards(made.artifact)])


def _start(step: AssetContext, champion: str) -> dict[str, Any]:
    """The location of the champion that the spec starts from. Raises StoreError if no version has its weights any more."""
    located = locate_champion(step.pipeline.recipe, step.services.registry, weights=champion)
    if located is None or located.fingerprint != champion:
        found = "there is none" if located is None else f"it has the weights {short(located.fingerprint)}"
        spec = f"{step.pipeline.name}/training_spec"
        raise StoreError(
            f"{spec} starts from the champion with the weights {short(champion)}, and now {found}; "
            f"materialize {spec} and what follows it"
        )
    return {"champion": str(located.folder)}


def delivered_run(step: AssetContext, policy: Artifact) -> str | None:
    """The MLflow run of a policy that was trained before, after what it misses was delivered; None if there is none."""
    derivation = step.history.derivation("policy", policy.fingerprint)
    return _deliver(step, replace(policy, derivation=derivation), policy.json("recipe.json"))


def _events(policy: Artifact) -> Iterator[Event]:
    """What training had to tell. Held-out metrics only of the training that wrote it: another may have had other such pairs."""
    is_its_own = policy.manifest.made_from.key == policy.derivation.key
    told = read_events(policy.file("events.jsonl"))
    return (event for event in told if is_its_own or event["event"] != "eval")


def _deliver(step: AssetContext, policy: Artifact, recipe: dict[str, Any]) -> str | None:
    """The id of the policy's MLflow run; one that does not exist, or lacks events, is replayed. None where no server answers.

    `recipe`: what the run shows as its own. That of the artifact is of the first recipe which led to these weights.
    """
    derivation = policy.derivation
    if (known := step.services.tracker.find_run(step.pipeline.family, derivation.key)) is not None:
        return known
    with _run(step, derivation, recipe) as run:
        run.replay(_events(policy))
    return run.run_id


def _links(step: AssetContext, policy: Artifact) -> dict[str, Any]:
    tracker, run_id = step.services.tracker, _deliver(step, policy, step.pipeline.recipe.model_dump(mode="json"))
    if run_id is None:
        return {}
    tracker.tag(run_id, {"policy": policy.fingerprint})
    return {"mlflow_run_id": run_id, "mlflow": dg.MetadataValue.url(tracker.run_link(run_id))}


@contextmanager
def _follow(step: AssetContext, job: Job) -> Iterator[Listener]:
    """The run is made when the job starts, and hears its events."""
    with _run(step, job.derivation, job.recipe) as run:
        yield run.record


def _run(step: AssetContext, derivation: Derivation, recipe: dict[str, Any]) -> AbstractContextManager[TrackedRun]:
    pipeline, trained_on = step.pipeline, derivation.inputs["tokenized_pairs"].fingerprint
    pairs = step.services.store.open("tokenized_pairs", trained_on, hashes=False)  # not always the latest
    lineage = step.history.lineage({name: source.fingerprint for name, source in derivation.inputs.items()})
    return step.services.tracker.run(
        experiment=pipeline.family,  # the runs of a recipe and of its variants stand beside each other
        key=derivation.key,
        name=f"{pipeline.name}-{short(derivation.key)}",
        params=recipe,
        tags={**lineage, "recipe": pipeline.name, "dagster_run_id": step.context.run.run_id},
        dataset=DatasetRef(
            name="tokenized_pairs",
            fingerprint=pairs.fingerprint,
            source=pairs.folder.as_uri(),
            rows={split: pairs.details["counts"][split] for split in ("train", "validation")},
        ),
    )

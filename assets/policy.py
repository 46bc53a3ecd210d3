"""The trained policy: a torchrun job whose events are followed, live, into the Dagster log and an MLflow run."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import dagster as dg

from assets import checks
from assets.locate import locate_champion
from assets.metadata import reward_curves
from assets.pipeline import Listener
from assets.realize import Work, realize
from assets.step import Step
from model_registry.records import DatasetUsed
from model_registry.run import TrackedRun
from training.contract.errors import StoreError
from training.contract.events import Event, read_events
from training.contract.fingerprint import short
from training.contract.job import Job
from training.contract.manifest import Derivation
from training.contract.store import Artifact


def policy(step: Step) -> dg.MaterializeResult:
    settings = step.settings
    tracking = _Tracking(step)
    start = _start(step, settings["champion"]) if settings.get("champion") else {}
    made = realize(step, Work("policy", settings, start, during=tracking.follow))
    details = made.artifact.details
    metadata = {
        "rewards": step.picture("rewards", made.artifact, lambda: reward_curves(details["series"])),
        "steps": details["steps"],
        **details["train"],
        **details.get("eval", {}),
        "seconds_by_phase": dg.MetadataValue.json(details["seconds"]),
        "provenance": dg.MetadataValue.json(details["provenance"]),
        **tracking.links(made.artifact),
    }
    return made.result(metadata, [checks.step0(made.artifact), checks.rewards(made.artifact)])


def _start(step: Step, champion: str) -> dict[str, Any]:
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


def delivered_run(step: Step, policy: Artifact) -> str | None:
    """The MLflow run of a policy that was trained before, after what it misses was delivered; None if there is none."""
    derivation = step.history.derivation("policy", policy.fingerprint)
    return _Tracking(step).deliver(replace(policy, derivation=derivation), policy.json("recipe.json"))


def _events(policy: Artifact) -> Iterator[Event]:
    """What training had to tell. Held-out metrics only of the training that wrote it: another may have had other such pairs."""
    is_its_own = policy.manifest.made_from.key == policy.derivation.key
    told = read_events(policy.file("events.jsonl"))
    return (event for event in told if is_its_own or event["event"] != "eval")


class _Tracking:
    """The policy's MLflow run: made when the job starts, or afterwards from the events that the artifact keeps."""

    def __init__(self, step: Step):
        self._step, self._tracker = step, step.services.tracker
        self._followed: TrackedRun | None = None

    @contextmanager
    def follow(self, job: Job) -> Iterator[Listener]:
        with self._run(job.derivation, job.recipe) as run:
            self._followed = run
            yield run.record

    def deliver(self, policy: Artifact, recipe: dict[str, Any]) -> str | None:
        """The run's id; a run that does not exist, or lacks events, is replayed first. None where no server answers.

        `recipe`: what the run shows as its own. That of the artifact is of the first recipe which led to these weights.
        """
        derivation = policy.derivation
        if (known := self._tracker.find_run(self._step.pipeline.family, derivation.key)) is not None:
            return known
        with self._run(derivation, recipe) as run:
            run.replay(_events(policy))
        if run.run_id is None and self._followed is not None:
            return self._followed.run_id  # the server went away meanwhile: for the release it may be back
        return run.run_id

    def links(self, policy: Artifact) -> dict[str, Any]:
        run_id = self.deliver(policy, self._step.pipeline.recipe.model_dump(mode="json"))
        if run_id is None:
            return {}
        self._tracker.tag(run_id, {"policy": policy.fingerprint})
        return {"mlflow_run_id": run_id, "mlflow": dg.MetadataValue.url(self._tracker.run_link(run_id))}

    def _run(self, derivation: Derivation, recipe: dict[str, Any]) -> AbstractContextManager[TrackedRun]:
        pipeline, trained_on = self._step.pipeline, derivation.inputs["tokenized_pairs"].fingerprint
        pairs = self._step.services.store.open("tokenized_pairs", trained_on, hashes=False)  # not always the latest
        lineage = self._step.history.lineage({name: source.fingerprint for name, source in derivation.inputs.items()})
        return self._tracker.run(
            experiment=pipeline.family,  # the runs of a recipe and of its variants stand beside each other
            key=derivation.key,
            name=f"{pipeline.name}-{short(derivation.key)}",
            params=recipe,
            tags={**lineage, "recipe": pipeline.name, "dagster_run_id": self._step.context.run.run_id},
            dataset=DatasetUsed(
                name="tokenized_pairs",
                fingerprint=pairs.fingerprint,
                source=pairs.folder.as_uri(),
                rows={split: pairs.details["counts"][split] for split in ("train", "validation")},
            ),
        )

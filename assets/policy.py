"""The trained policy: a torchrun job whose events are followed, live, into the Dagster log and an MLflow run."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import dagster as dg

from assets import checks
from assets.locate import locate_champion
from assets.metadata import reward_curves
from assets.pipeline import Listener, Pipeline, Services, declare
from assets.realize import Work, latest_derivation, realize, upstream
from model_registry.records import DatasetUsed
from model_registry.run import TrackedRun
from training.contract.errors import StoreError
from training.contract.events import read_events
from training.contract.fingerprint import short
from training.contract.job import Job
from training.contract.manifest import Derivation
from training.contract.store import Artifact


def policy(pipeline: Pipeline) -> dg.AssetsDefinition:
    @declare(pipeline, "policy", checks.specs(pipeline, "policy", checks.STEP0, checks.REWARDS))
    def policy(context: dg.AssetExecutionContext, services: dg.ResourceParam[Services]) -> dg.MaterializeResult:
        settings = upstream(context, pipeline, services, "training_spec").json("spec.json")
        tracking = _Tracking(context, pipeline, services)
        start = _start(pipeline, services, settings["champion"]) if settings.get("champion") else {}
        made = realize(context, pipeline, services, Work("policy", settings, start, during=tracking.follow))
        details = made.artifact.details
        metadata = {
            "rewards": reward_curves(details["series"]),
            "steps": details["steps"],
            **details["train"],
            **details.get("eval", {}),
            "seconds_by_phase": dg.MetadataValue.json(details["seconds"]),
            "provenance": dg.MetadataValue.json(details.get("provenance", {})),
            **tracking.links(made.artifact),
        }
        return made.result(metadata, [checks.step0(made.artifact), checks.rewards(made.artifact)])

    return policy


def _start(pipeline: Pipeline, services: Services, champion: str) -> dict[str, Any]:
    """Where the champion lies that the spec says to start from. Raises StoreError if it is another one by now."""
    located = locate_champion(pipeline.recipe, services.registry)
    if located is None or located.fingerprint != champion:
        found = "there is none" if located is None else f"it has the weights {short(located.fingerprint)}"
        raise StoreError(
            f"{pipeline.name}/training_spec starts from the champion with the weights {short(champion)}, and now {found}; "
            f"materialize {pipeline.name}/training_spec and what follows it"
        )
    return {"champion": str(located.folder)}


def delivered_run(
    context: dg.AssetExecutionContext, pipeline: Pipeline, services: Services, policy: Artifact
) -> str | None:
    """The MLflow run of a policy that was trained before, after whatever it misses was delivered; None if there is none."""
    derivation = latest_derivation(context.instance, pipeline, services.store, "policy", policy.fingerprint)
    return _Tracking(context, pipeline, services).deliver(replace(policy, derivation=derivation))


class _Tracking:
    """The policy's MLflow run: made when the job starts, or afterwards from the events that the artifact keeps."""

    def __init__(self, context: dg.AssetExecutionContext, pipeline: Pipeline, services: Services):
        self._context, self._pipeline, self._services = context, pipeline, services
        self._followed: TrackedRun | None = None

    @contextmanager
    def follow(self, job: Job) -> Iterator[Listener]:
        with self._run(job.derivation, job.recipe) as run:
            self._followed = run
            yield run.record

    def deliver(self, policy: Artifact) -> str | None:
        """The run's id, for whoever comes after; a run that is not there, or misses something, is replayed first."""
        tracker, derivation = self._services.tracker, policy.derivation
        if (known := tracker.find_run(self._pipeline.family, derivation.key)) is not None:
            return known
        with self._run(derivation, policy.json("recipe.json")) as run:
            run.replay(read_events(policy.file("events.jsonl")))
        if run.run_id is None and self._followed is not None:
            return self._followed.run_id  # the server went away meanwhile: for the release it may be back
        return run.run_id

    def links(self, policy: Artifact) -> dict[str, Any]:
        run_id = self.deliver(policy)
        if run_id is None:
            return {}
        return {"mlflow_run_id": run_id, "mlflow": dg.MetadataValue.url(self._services.tracker.run_link(run_id))}

    def _run(self, derivation: Derivation, recipe: dict[str, Any]) -> AbstractContextManager[TrackedRun]:
        trained_on = derivation.inputs["tokenized_pairs"].fingerprint  # which need not be those of now
        pairs = self._services.store.open("tokenized_pairs", trained_on, hashes=False)
        tags = {name: source.fingerprint for name, source in derivation.inputs.items()}
        return self._services.tracker.run(
            experiment=self._pipeline.family,  # a recipe's runs and its variants' stand beside each other
            key=derivation.key,
            name=f"{self._pipeline.name}-{short(derivation.key)}",
            params=recipe,
            tags={**tags, "recipe": self._pipeline.name, "dagster_run_id": self._context.run_id},
            dataset=DatasetUsed(
                name="tokenized_pairs",
                fingerprint=pairs.fingerprint,
                source=pairs.folder.as_uri(),
                rows={split: pairs.details["counts"][split] for split in ("train", "validation")},
            ),
        )

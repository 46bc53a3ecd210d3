"""Body of the policy: a torchrun job, with live events in Dagster's log and in an MLflow run."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import dagster as dg

from assets.bodies import checks
from assets.comparison.votes import record_training
from assets.execution.asset_context import AssetContext
from assets.execution.job_log import log_message
from assets.execution.materialize import JobSpec, materialize
from assets.inputs.resolve import locate_champion
from assets.pipeline.pipeline import Listener
from assets.views.metadata import figures_table, reward_curves, rounded
from assets.views.pages import publish_charts
from assets.views.sentences import of_policy
from model_registry.charts import view_of
from model_registry.mlflow_types import DatasetRef
from model_registry.tracked_run import TrackedRun
from training.contract.config.json_object import JsonObject
from training.contract.errors import StoreError
from training.contract.identity.fingerprint import short
from training.contract.protocol.artifacts import POLICY, TOKENIZED_PAIRS, AssetName
from training.contract.protocol.events import Event, read_events
from training.contract.protocol.job import Job
from training.contract.protocol.locations import PolicyLocations
from training.contract.protocol.settings import TrainingSpec
from training.contract.store.artifact import Artifact
from training.contract.store.manifest import Derivation


def policy(context: AssetContext) -> dg.MaterializeResult:
    settings = context.settings(TrainingSpec)
    start = _locate_start(context, settings.champion)
    work = JobSpec("policy", settings, start, during=partial(_track_job, context))
    materialized = materialize(context, POLICY, work)
    artifact, details = materialized.artifact, materialized.artifact.details
    _record_training(context, artifact.derivation)
    held_out = details.eval if context.pipeline.recipe.evaluation.is_exact else {}
    links = {
        "rewards": context.picture("rewards", artifact, lambda: reward_curves(details.series)),
        **_tracking_links(context, artifact),
    }
    figures = {
        **figures_table(held_out, details.train),
        **held_out,
        "steps": details.steps,
        **details.train,
        "seconds_by_phase": dg.MetadataValue.json(rounded(details.seconds)),
        "provenance": dg.MetadataValue.json(details.provenance.model_dump() if details.provenance else {}),
    }
    results = [checks.step0(artifact), checks.rewards(artifact)]
    return materialized.result(of_policy(details, held_out), links, figures, results)


def _record_training(context: AssetContext, derivation: Derivation) -> None:
    record_training(context, derivation.key, derivation.inputs[AssetName.TOKENIZED_PAIRS].fingerprint)


def _locate_start(context: AssetContext, champion: str | None) -> PolicyLocations:
    """Return the location of the spec's champion. Raise StoreError if no version has its weights any more."""
    if champion is None:
        return PolicyLocations()
    located = locate_champion(context.pipeline.recipe, context.services.registry, weights=champion)
    if located is None or located.fingerprint != champion:
        current = "there is none" if located is None else f"it has the weights {short(located.fingerprint)}"
        spec = f"{context.pipeline.name}/training_spec"
        raise StoreError(
            f"{spec} starts from the champion with the weights {short(champion)}, and now {current}; "
            f"materialize {spec} and the assets after it",
            "champion-changed",
        )
    return PolicyLocations(champion=located.folder)


def delivered_run(context: AssetContext, policy: Artifact) -> str | None:
    """Log missing events to the MLflow run of a policy, and return its id; None without a server."""
    derivation = context.history.derivation(AssetName.POLICY, policy.fingerprint)
    return _deliver(context, replace(policy, derivation=derivation), policy.json("recipe.json"))


def _read_events(context: AssetContext, policy: Artifact) -> Iterator[Event]:
    """Yield the events of the training.

    Skip held-out metrics if they are hidden, or if another training wrote them, perhaps with other pairs.
    """
    is_first = policy.manifest.made_from.key == policy.derivation.key
    is_shown = is_first and context.pipeline.recipe.evaluation.is_exact
    events = read_events(policy.file("events.jsonl"))
    return (event for event in events if is_shown or event["event"] != "eval")


def _deliver(context: AssetContext, policy: Artifact, recipe: JsonObject) -> str | None:
    """Return the id of the policy's MLflow run. Replay a missing or incomplete run. Return None without a server.

    `recipe`: the parameters of the run. The recipe in the artifact is the first one that led to these weights.
    """
    derivation = policy.derivation
    if (run_id := context.services.tracker.find_run(context.pipeline.family, derivation.key)) is not None:
        return run_id
    with _open_run(context, derivation, recipe) as run:
        run.replay(_read_events(context, policy))
    return run.run_id


def _tracking_links(context: AssetContext, policy: Artifact) -> dict[str, Any]:
    tracker, run_id = (
        context.services.tracker,
        _deliver(context, policy, context.pipeline.recipe.model_dump(mode="json")),
    )
    if run_id is None:
        return {}
    tracker.tag(run_id, {"policy": policy.fingerprint})
    _publish_charts(context, run_id)
    return {"mlflow": dg.MetadataValue.url(tracker.run_link(run_id)), "mlflow_run_id": run_id}


def _publish_charts(context: AssetContext, run_id: str) -> str:
    """Let the fixed address of the charts lead to the recipe's latest run. Return its link in MLflow."""
    link = context.services.tracker.charts_link(run_id, view_of(context.pipeline.name))
    publish_charts(context.services.home, context.pipeline, link)
    return link


@contextmanager
def _track_job(context: AssetContext, job: Job) -> Iterator[Listener]:
    """Open an MLflow run when the job starts. Yield its listener for the job's events.

    As soon as the run exists, its link is in the run's log, in the terminal, and on the asset's page. Held-out metrics are
    logged only if users may see them.
    """
    _record_training(context, job.derivation)
    is_exact = context.pipeline.recipe.evaluation.is_exact
    with _open_run(context, job.derivation, job.recipe.model_dump(mode="json")) as run:
        announced = False

        def on_event(event: Event) -> None:
            nonlocal announced
            if is_exact or event["event"] != "eval":
                run.record(event)
            if not announced and run.run_id is not None:
                announced = True
                _announce(context, run.run_id)

        yield on_event


def _announce(context: AssetContext, run_id: str) -> None:
    """Report the link of the live charts. The observation is for the page of an asset without any materialization."""
    link = _publish_charts(context, run_id)
    log_message(context.services, context.dagster.log, context.asset, f"live charts: {link}")
    observation = dg.AssetObservation(
        context.dagster.asset_key,
        description="It is being trained.",
        metadata={"mlflow": dg.MetadataValue.url(link), "mlflow_run_id": run_id},
    )
    context.dagster.log_event(observation)


def _open_run(context: AssetContext, derivation: Derivation, recipe: JsonObject) -> AbstractContextManager[TrackedRun]:
    pipeline, pairs_fingerprint = context.pipeline, derivation.inputs[AssetName.TOKENIZED_PAIRS].fingerprint
    pairs = context.services.store.open(TOKENIZED_PAIRS, pairs_fingerprint, hashes=False)  # not always the latest
    lineage = context.history.lineage({name: source.fingerprint for name, source in derivation.inputs.items()})
    return context.services.tracker.run(
        experiment=pipeline.family,  # shared by a recipe and its variants
        recipe=pipeline.name,
        key=derivation.key,
        name=f"{pipeline.name} {short(derivation.key)}",  # until it has a version
        params=recipe,
        tags={"lineage": lineage, "recipe": pipeline.name, "dagster_run_id": context.dagster.run.run_id},
        dataset=DatasetRef(
            fingerprint=pairs.fingerprint,
            source=pairs.folder.as_uri(),
            rows={"train": pairs.details.counts.train, "validation": pairs.details.counts.validation},
        ),
    )

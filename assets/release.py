"""From an evaluated policy to a version in the registry, and the gate's decision whether it becomes champion.

The order makes every step repeatable: register, point `candidate` at the version, decide, point `champion` at it, and
write the decision onto the version last. A version without a decision is taken up where it was left. One that a person has
rolled back stays so: materializing it again promotes nothing. A policy that is an adapter is registered merged into its base.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, BinaryIO

import dagster as dg

from assets.adapters import MERGED, plain_model
from assets.changes import input_changes, shown_changes
from assets.evaluation import delivered_evaluation
from assets.event_log import Log
from assets.graph import GRAPH, derivation
from assets.held_out import accuracy, ancestry, loss, rows_by_pair, scale_of
from assets.metadata import inputs_table
from assets.pipeline import Pipeline, Services, declare
from assets.realize import upstream
from model_registry.connection import shown, through_restart
from model_registry.gate import Decision, decide
from model_registry.registry import ROLLED_BACK_TAG, Registry, Version
from training.contract.errors import RegistryAway, RegistryError, StoreError
from training.contract.fingerprint import fingerprint, short
from training.contract.manifest import Derivation
from training.contract.store import Artifact, Store

RELEASE_KEY_TAG = "pedigree.release"
_DECISION_TAG = "pedigree.champion"
_REASONS_TAG = "pedigree.reasons"


def released_model(pipeline: Pipeline) -> dg.AssetsDefinition:
    @declare(pipeline, "released_model")
    def released_model(context: dg.AssetExecutionContext, services: dg.ResourceParam[Services]) -> dg.MaterializeResult:
        started = time.monotonic()
        above = {name: upstream(context, pipeline, services, name) for name in GRAPH["released_model"].needs}
        find_run = partial(delivered_evaluation, context, pipeline, services, above["policy"], above["evaluation"])
        candidate = _Candidate(pipeline, services, context.instance, above, find_run)
        changes = input_changes(context.instance, pipeline, "released_model")

        def say(text: str) -> None:
            context.log.warning(text)
            services.listener({"event": "note", "asset": "released_model", "text": text})

        def release() -> dg.MaterializeResult:
            version, outcome, figures = _release(services, candidate, context.log)
            return _result(candidate, version, outcome, started, changes, figures)

        return through_restart(release, say)

    return released_model


def sole_decision(store: Store, name: str) -> AbstractContextManager[BinaryIO]:
    """The right to move the aliases of the registered model `name`, waiting for whoever has it.

    Two recipes may release into one model: the champion a candidate was compared with must be the one it replaces.
    """
    return store.lock("released_model", fingerprint("registered_model", name))


def _release(services: Services, candidate: "_Candidate", log: Log) -> tuple[Version, str, dict[str, float]]:
    """The candidate's version with the gate's decision, whether that was there already, and the decision's figures."""
    registry = services.registry
    with services.store.lock("released_model", candidate.key):
        known = registry.find_version(candidate.name, {RELEASE_KEY_TAG: candidate.key})
        if known is not None and _has_decision(known):
            return known, "reused", {}
        version = _register(services, candidate, log)
        with sole_decision(services.store, version.name):  # not before: a rollback is not to wait for files
            registry.set_alias(version.name, "candidate", version.number)
            decision = _decide(services, candidate, version)
            log.info(f"version {version.number} of {version.name}: {'; '.join(decision.reasons)}")
            if decision.promote:
                registry.set_alias(version.name, "champion", version.number)
            verdict = {_DECISION_TAG: "yes" if decision.promote else "no", _REASONS_TAG: "; ".join(decision.reasons)}
            return registry.tag(version, verdict), "computed", decision.figures


def is_decided(registry: Registry, pipeline: Pipeline, key: str) -> bool:
    """Whether the derivation `key` of `released_model` has its version in the registry, and that its decision."""
    known = registry.find_version(pipeline.recipe.release.model_name, {RELEASE_KEY_TAG: key})
    return known is not None and _has_decision(known)


def _has_decision(version: Version) -> bool:
    return _DECISION_TAG in version.tags or ROLLED_BACK_TAG in version.tags


@dataclass(frozen=True)
class _Candidate:
    pipeline: Pipeline
    services: Services
    instance: dg.DagsterInstance
    above: dict[str, Artifact]
    find_run: Callable[[], str | None]

    @property
    def name(self) -> str:
        return self.pipeline.recipe.release.model_name

    @cached_property
    def derivation(self) -> Derivation:
        inputs = {name: artifact.fingerprint for name, artifact in self.above.items()}
        return derivation("released_model", inputs, GRAPH["released_model"].reads(self.pipeline.recipe))

    @property
    def key(self) -> str:
        return self.derivation.key

    @cached_property
    def lineage(self) -> dict[str, str]:
        """The fingerprint of every artifact it stands on, by kind, found by walking up the latest materializations."""
        heads = {name: artifact.fingerprint for name, artifact in self.above.items()}
        found = ancestry(self.instance, self.pipeline, self.services.store, heads)
        return {kind: ancestor.fingerprint for kind, ancestor in found.items()}


def _register(services: Services, candidate: _Candidate, log: Log) -> Version:
    registry, policy = services.registry, candidate.above["policy"]
    run_id = candidate.find_run()
    if run_id is None:
        raise RegistryAway(
            f"MLflow at {shown(registry.tracking_uri)} does not take all that the run of the policy of "
            f"{candidate.pipeline.name} has to hold; run again once it does: nothing is computed again"
        )
    model = plain_model(candidate.pipeline, services, policy, log)
    lineage = candidate.lineage if model is policy else {**candidate.lineage, MERGED: model.fingerprint}
    return registry.register(
        candidate.name,
        model.folder,
        run_id,
        identity={RELEASE_KEY_TAG: candidate.key},
        tags={f"pedigree.{kind}": fingerprint for kind, fingerprint in lineage.items()},
        tokenizer=candidate.above["tokenization_spec"].folder / "tokenizer",
        description=_description(candidate, lineage),
    )


def _description(candidate: _Candidate, lineage: Mapping[str, str]) -> str:
    """What people read on the version's page: where it comes from, in the order of the graph."""
    kinds = [kind for kind in (*GRAPH, MERGED) if kind in lineage]
    rows = [f"| {kind} | `{short(lineage[kind])}` |" for kind in kinds]
    title = f"The policy of the recipe {candidate.pipeline.name}, and all it stands on. The gate's decision is among the tags."
    return "\n".join([title, "", "| artifact | fingerprint |", "|---|---|", *rows])


def _decide(services: Services, candidate: _Candidate, version: Version) -> Decision:
    champion = services.registry.champion(version.name)
    if champion is not None and champion.number == version.number:
        return Decision(True, ["it is the champion already"], {})
    evaluation = candidate.above["evaluation"]
    gate = candidate.pipeline.recipe.release.gate
    theirs = None if champion is None else _evaluation_of(services.store, champion)
    same_scale = champion is None or all(
        champion.tags.get(f"pedigree.{kind}") == candidate.lineage[kind] for kind in scale_of(evaluation)
    )
    return decide(
        _losses(evaluation, same_scale),
        None if theirs is None else _losses(theirs, same_scale),
        accuracy=evaluation.details["metrics"]["eval/rewards/accuracies"],
        min_accuracy=gate.min_accuracy,
    )


def _evaluation_of(store: Store, champion: Version) -> Artifact:
    fingerprint = champion.tags.get("pedigree.evaluation", "")
    try:
        return store.open("evaluation", fingerprint)
    except StoreError as error:
        raise RegistryError(
            f"the evaluation of version {champion.number} of {champion.name}, the champion, is not in this store, so "
            f"nothing can be compared with it: {error}"
        ) from error


def _losses(evaluation: Artifact, same_scale: bool) -> dict[str, float]:
    """Held-out losses by pair. Where they are of another scale than the champion's, what both have is whether a
    pair is ranked wrongly: 1 if the rejected response has the higher reward, else 0."""
    rows = rows_by_pair(evaluation)
    return {pair: loss(row) if same_scale else 1.0 - accuracy(row) for pair, row in rows.items()}


def _result(
    candidate: _Candidate,
    version: Version,
    outcome: str,
    started: float,
    changes: list[str] | None,
    figures: dict[str, float],
) -> dg.MaterializeResult:
    champion = candidate.services.registry.champion(version.name)
    is_champion = champion is not None and champion.number == version.number  # a person may have moved the alias since
    metadata: dict[str, Any] = {
        "outcome": outcome,
        "changes": shown_changes(changes),
        "champion": "yes" if is_champion else "no",
        "reasons": "; ".join(_reasons(version, is_champion)),
        **figures,
        "model_version": str(version.number),
        "model": f"models:/{version.name}/{version.number}",
        "mlflow": dg.MetadataValue.url(candidate.services.registry.link(version)),
        "made_from": inputs_table(candidate.derivation),
        "fingerprint": candidate.key,
        "key": candidate.key,
        "seconds": round(time.monotonic() - started, 3),
        "derivation": dg.MetadataValue.json(candidate.derivation.model_dump(mode="json")),
    }
    return dg.MaterializeResult(data_version=dg.DataVersion(candidate.key), metadata=metadata)


def _reasons(version: Version, is_champion: bool) -> Iterator[str]:
    """Why it is champion, or is not: what the gate said, and what a person did against it."""
    if ROLLED_BACK_TAG in version.tags:
        yield "it was champion and was rolled back"
    elif is_champion != (version.tags.get(_DECISION_TAG) == "yes"):
        yield "a person has moved the alias since the gate decided"
    if reasons := version.tags.get(_REASONS_TAG):
        yield reasons

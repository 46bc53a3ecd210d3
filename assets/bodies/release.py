"""From an evaluated policy to a version in the registry, and the gate's decision whether it becomes champion.

The order of the steps makes a release repeatable: register, point `candidate` at the version, decide, write the reasons onto
it, point `champion` at it, and write the decision onto it last. A version without a decision is continued where it was left. A
policy that a person has rolled back stays so: no run promotes it again. An adapter is registered merged into its base.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, BinaryIO

import dagster as dg

from assets.bodies.evaluation import delivered_evaluation
from assets.comparison.champion import compared
from assets.comparison.paired_metrics import measured, rows_by_pair
from assets.execution.asset_context import AssetContext
from assets.execution.changes import input_changes
from assets.execution.job_log import log_message, log_phase
from assets.execution.merge_adapter import plain_model
from assets.inputs.version_repair import files_problem, restore_files
from assets.lineage.history import Materialization
from assets.pipeline.graph import GRAPH, derive
from assets.pipeline.pipeline import Pipeline, Services
from assets.views.metadata import inputs_table, shown_changes
from model_registry.connection import REGISTRY_VARIABLE, TRACKING_VARIABLE, retry_while_unavailable, shown
from model_registry.gate import Decision, Measure, PairedScores, decide
from model_registry.model_version import MERGED, PREVIOUS_TAG, ROLLED_BACK_TAG, Version, lineage_tags
from model_registry.registry import Registry
from training.contract.errors import RegistryError, StoreError
from training.contract.identity.fingerprint import fingerprint, short
from training.contract.store.manifest import Derivation
from training.contract.store.store import Artifact, Store

RELEASE_KEY_TAG = "pedigree.release"
_DECISION_TAG = "pedigree.champion"
_REASONS_TAG = "pedigree.reasons"
# What may differ between two versions of one policy.
_OF_POLICY = {
    "tokenization_spec": "tokenizer or chat template",
    "release_spec": "release spec (files of the tokenizer, generation settings or processors)",
}


def released_model(step: AssetContext) -> dg.MaterializeResult:
    candidate = _Candidate(step, step.inputs())
    changes = input_changes(step)

    def release() -> dg.MaterializeResult:
        return _result(candidate, _release(candidate), changes)

    return retry_while_unavailable(release, partial(log_message, step.services, step.context.log, "released_model"))


@dataclass(frozen=True)
class _Released:
    """A version with the gate's decision; `figures` are those of a decision that was made now."""

    version: Version
    outcome: str
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Candidate:
    """A policy that is to be released; `inputs` are what `released_model` is made from: fingerprints by name."""

    step: AssetContext
    inputs: dict[str, str]

    @property
    def name(self) -> str:
        return self.step.pipeline.recipe.release.model_name

    @property
    def store(self) -> Store:
        return self.step.services.store

    @property
    def registry(self) -> Registry:
        return self.step.services.registry

    @cached_property
    def derivation(self) -> Derivation:
        return derive("released_model", self.inputs, self.step.settings)

    @cached_property
    def above(self) -> dict[str, Artifact]:
        """The artifacts behind `inputs`, verified. A version that is there already needs none of them."""
        return {name: self.store.open(name, found) for name, found in self.inputs.items()}

    @cached_property
    def lineage(self) -> dict[str, str]:
        """The fingerprints, by kind, of all artifacts that it was made from, directly or not."""
        return self.step.history.lineage(self.inputs)


def promotion_lock(store: Store, name: str) -> AbstractContextManager[BinaryIO]:
    """The right to move the aliases of the registered model `name`, waiting for whoever has it.

    Two recipes may release into one model: the champion a candidate was compared with must be the one it replaces.
    """
    return store.lock("released_model", fingerprint("registered_model", name))


def release_problem(services: Services, pipeline: Pipeline, key: str) -> str | None:
    """What the registry lacks of the version, with a decision, that the derivation `key` of `released_model` gave."""
    known = services.registry.find_version(pipeline.recipe.release.model_name, {RELEASE_KEY_TAG: key})
    if known is None or not _has_decision(known):
        return "its version is no longer in the registry"
    return files_problem(services.registry, known, services.hashes)


def check_releases_exist(
    registry: Registry, versions: Sequence[Version], recorded: Mapping[dg.AssetKey, Materialization]
) -> None:
    """Raises RegistryError where none of the releases `recorded` is among its `versions`: they may be in another registry."""
    released = {made.fingerprint: key.path[0] for key, made in recorded.items() if key.path[-1] == "released_model"}
    registered = {version.tags.get(RELEASE_KEY_TAG) for version in versions}
    if (releases := released.keys() - {None}) and not releases & registered:
        names = ", ".join(sorted(released[release] for release in releases))
        raise RegistryError(
            f"{shown(registry.uri)} has no version that {names} released, so what the registry keeps is unknown: set "
            f"{TRACKING_VARIABLE} or {REGISTRY_VARIABLE} to the one that has them, run one of these recipes, or wipe their "
            "assets in Dagster"
        )


def _release(candidate: _Candidate) -> _Released:
    """Raises RegistryUnavailable, RegistryError or StoreError; calling it again goes on from there."""
    registry, log = candidate.registry, candidate.step.context.log
    key = candidate.derivation.key
    with candidate.store.lock("released_model", key):
        known = registry.find_version(candidate.name, {RELEASE_KEY_TAG: key})
        is_restored = known is not None and restore_files(candidate.step.services, known)
        if known is not None and _has_decision(known):
            return _Released(known, "computed" if is_restored else "reused")
        version = _register(candidate)
        with promotion_lock(candidate.store, version.name):  # not earlier: a rollback would have to wait for files
            registry.nominate(version)
            decision, version = _carry_out(candidate, version)
            log.info(f"version {version.number} of {version.name}: {version.tags[_REASONS_TAG]}")
            tags = {_DECISION_TAG: "yes" if decision.promote else "no"}
            return _Released(registry.tag(version, tags), "computed", decision.figures)


def _has_decision(version: Version) -> bool:
    return _DECISION_TAG in version.tags or ROLLED_BACK_TAG in version.tags


def _register(candidate: _Candidate) -> Version:
    step, registry, policy = candidate.step, candidate.registry, candidate.above["policy"]
    run_id = delivered_evaluation(step, policy, candidate.above["evaluation"])
    if run_id is None:
        failure = step.services.tracker.failure
        assert failure is not None, "nothing is undelivered without a failure"
        raise type(failure)(
            f"no version is registered before the MLflow run of {step.pipeline.name}'s policy is whole: {failure}; another run "
            "adds what is missing and computes nothing again"
        )
    _check_same_tokenizer(candidate)
    model = plain_model(step, policy)
    log_phase(step.services, step.context.log, "released_model", f"storing the files of a version of {candidate.name}")
    lineage = candidate.lineage if model is policy else {**candidate.lineage, MERGED: model.fingerprint}
    return registry.register(
        candidate.name,
        model.folder,
        run_id,
        identity={RELEASE_KEY_TAG: candidate.derivation.key},
        tags=lineage_tags(lineage),
        tokenizer=candidate.above["release_spec"].folder / "tokenizer",
        settings=candidate.above["release_spec"].folder / "model",
        evaluation=candidate.above["evaluation"].folder,
        description=_description(candidate, lineage),
    )


def _check_same_tokenizer(candidate: _Candidate) -> None:
    """Raises StoreError if the tokenizer or template that would be released is not the one that made the policy's tokens."""
    name, above = candidate.step.pipeline.name, candidate.above
    trained, shipped = (above[spec].json("spec.json") for spec in ("tokenization_spec", "release_spec"))
    for what in ("tokenizer", "template"):
        if trained[f"{what}_fingerprint"] != shipped[f"{what}_fingerprint"]:
            raise StoreError(
                f"{name}/release_spec has the {what} {short(shipped[f'{what}_fingerprint'])}, and {name}/tokenization_spec has "
                f"{short(trained[f'{what}_fingerprint'])}: they are of different moments; materialize both, and what follows "
                f"them, in one run"
            )


def _description(candidate: _Candidate, lineage: Mapping[str, str]) -> str:
    """What the version's page says: the lineage, in the order of the graph."""
    kinds = [kind for kind in (*GRAPH, MERGED) if kind in lineage]
    rows = [f"| {kind} | `{short(lineage[kind])}` |" for kind in kinds]
    recipe = candidate.step.pipeline.name
    title = (
        f"The policy of the recipe {recipe}, and everything it was made from. The gate's decision is among the tags."
    )
    return "\n".join([title, "", "| artifact | fingerprint |", "|---|---|", *rows])


def _carry_out(candidate: _Candidate, version: Version) -> tuple[Decision, Version]:
    """The gate's decision, carried out; again if meanwhile another home, or a person, has made another version champion.

    Its reasons are on the version before the alias moves: who goes on after that finds the champion, and nothing to compare.
    """
    registry = candidate.registry
    while True:
        champion = registry.champion(version.name)
        decision = _decide(candidate, version, champion)
        version = registry.tag(version, {_REASONS_TAG: "; ".join(decision.reasons)})
        if not decision.promote or registry.promote(version, over=champion):
            return decision, version


def _decide(candidate: _Candidate, version: Version, champion: Version | None) -> Decision:
    if champion is not None and champion.number == version.number:
        return Decision(True, [version.tags.get(_REASONS_TAG, "it is the champion already")], {})
    evaluation = candidate.above["evaluation"]
    metrics, gate = evaluation.details["metrics"], candidate.step.pipeline.recipe.release.gate
    if champion is None:
        losses = measured(Measure.LOSS, rows_by_pair(evaluation), {})
        decision = decide(PairedScores(Measure.LOSS, losses), metrics, gate)
    else:
        pairs = compared(candidate.step, evaluation, candidate.lineage["raw_preferences"], champion)
        decision = decide(pairs, metrics, gate)
        if version.weights == champion.weights and not decision.promote:
            decision = replace(decision, reasons=[*decision.reasons, *_of_champions_policy(version, champion)])
    return _unless_rolled_back(candidate, version, decision)


def _of_champions_policy(version: Version, champion: Version) -> Iterator[str]:
    """What a person may do about a candidate that no held-out pair tells from the champion, whose policy it has."""
    others = [
        what for kind, what in _OF_POLICY.items() if version.fingerprint_of(kind) != champion.fingerprint_of(kind)
    ]
    if others:
        yield (
            f"its policy is the champion's, with another {others[0]}: if these are to be used, point the alias champion at it "
            "in MLflow"
        )


def _unless_rolled_back(candidate: _Candidate, version: Version, decision: Decision) -> Decision:
    """The same policy comes again as another version, after an edit of the evaluation say: it stays rolled back.

    It is known by its weights, since an adapter's are not those that it was released with.
    """
    earlier = candidate.registry.rolled_back(version)
    if earlier is None:
        return decision
    reason = f"its policy is that of version {earlier}, which was rolled back"
    return replace(decision, promote=False, reasons=[reason, *decision.reasons])


def _result(candidate: _Candidate, released: _Released, changes: list[str] | None) -> dg.MaterializeResult:
    version, champion = released.version, candidate.registry.champion(released.version.name)
    is_champion = champion is not None and champion.number == version.number  # a person may have moved the alias since
    if champion is not None and not is_champion:  # `_release` has seen to the files of `version`
        restore_files(candidate.step.services, champion)
    metadata: dict[str, Any] = {
        "outcome": released.outcome,
        "changes": shown_changes(changes),
        "champion": "yes" if is_champion else "no",
        "reasons": "; ".join(_reasons(candidate.registry, version, is_champion)),
        **released.figures,
        "model_version": str(version.number),
        "model": f"models:/{version.name}/{version.number}",
        "mlflow": dg.MetadataValue.url(candidate.registry.link(version)),
        "made_from": inputs_table(candidate.derivation),
        "fingerprint": candidate.derivation.key,
        "key": candidate.derivation.key,
        "derivation": dg.MetadataValue.json(candidate.derivation.model_dump(mode="json")),
    }
    return dg.MaterializeResult(data_version=dg.DataVersion(candidate.derivation.key), metadata=metadata)


def _reasons(registry: Registry, version: Version, is_champion: bool) -> Iterator[str]:
    """Why it is champion, or is not: what the gate said of it, and what it or a person has done since."""
    if ROLLED_BACK_TAG in version.tags:
        yield f"it was champion and was rolled back{'; a person has made it champion again' if is_champion else ''}"
    elif is_champion != (version.tags.get(_DECISION_TAG) == "yes"):
        replaced = None if is_champion else registry.find_version(version.name, {PREVIOUS_TAG: str(version.number)})
        yield (
            f"version {replaced.number} replaced it"
            if replaced
            else "a person has moved the alias since the gate decided"
        )
    if reasons := version.tags.get(_REASONS_TAG):
        yield reasons

"""`released_model`: an evaluated policy becomes a version in the registry, and champion if the gate promotes it.

    find        the version of the same inputs, with its files restored; if it has a decision, that is all
    register    the policy as a version; an adapter is merged into its base first
    nominate    point the alias `candidate` at the version
    settle      bet on arriving pairs for the waiting candidates, and promote the best (hypotheses.py)
    decide      compare it with the champion, and tag it with the reasons (decision.py)
    promote     point the alias `champion` at it
    record      tag it with the decision, last

The order makes a release repeatable: a version without a decision is continued at the phase it had reached. A policy that the
user rolled back stays so: no run promotes it again.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO

import dagster as dg

from assets.bodies.evaluation import delivered_evaluation
from assets.bodies.release.candidate import Candidate
from assets.bodies.release.decision import decide_release
from assets.bodies.release.disclosure import shown_decision
from assets.bodies.release.hypotheses import Hypotheses
from assets.bodies.release.pages import describe_version, find_run, publish_model_history, publish_release
from assets.comparison.votes import win_figure, win_tags
from assets.execution.asset_context import AssetContext
from assets.execution.changes import input_changes
from assets.execution.job_log import log_message, log_phase
from assets.execution.merge_adapter import plain_model
from assets.inputs.version_repair import files_problem, restore_files
from assets.lineage.history import Materialization
from assets.pipeline.pipeline import Pipeline, Services
from assets.views.metadata import inputs_table, rounded, shown_changes
from assets.views.sentences import of_release
from model_registry.connection import REGISTRY_VARIABLE, TRACKING_VARIABLE, retry_while_unavailable, shown
from model_registry.files import shipped_evaluation
from model_registry.gate.scores import Decision
from model_registry.model_card import model_card, read_training
from model_registry.model_version import (
    DECISION_TAG,
    MERGED,
    PREVIOUS_TAG,
    REASONS_TAG,
    ROLLED_BACK_TAG,
    Version,
    lineage_tags,
    tagged_lineage,
)
from model_registry.registry import Registry
from training.contract.errors import RegistryError, StoreError
from training.contract.identity.fingerprint import fingerprint, short
from training.contract.protocol.artifacts import EVALUATION, POLICY, RELEASE_SPEC, TOKENIZATION_SPEC, AssetName
from training.contract.protocol.spec_files import SPEC_FILE
from training.contract.store.store import Store

RELEASE_KEY_TAG = "pedigree.release"


def released_model(context: AssetContext) -> dg.MaterializeResult:
    candidate = Candidate(context, context.inputs())
    changes = input_changes(context)

    def release() -> dg.MaterializeResult:
        return _result(candidate, _release(candidate), changes)

    return retry_while_unavailable(
        release, partial(log_message, context.services, context.dagster.log, AssetName.RELEASED_MODEL)
    )


@dataclass(frozen=True)
class _Released:
    """A version with the gate's decision. `figures` are empty unless the decision was made now.

    `news`: sentences about other candidates of the recipe.
    """

    version: Version
    outcome: str
    figures: dict[str, float] = field(default_factory=dict)
    news: Sequence[str] = ()


def promotion_lock(store: Store, name: str) -> AbstractContextManager[BinaryIO]:
    """Return the lock for moving the aliases of the registered model `name`.

    Two recipes may release into one model. The champion that a candidate was compared with must be the one it replaces.
    """
    return store.lock(AssetName.RELEASED_MODEL, fingerprint("registered_model", name))


def release_problem(services: Services, pipeline: Pipeline, key: str) -> str | None:
    """Describe what the registry lacks of the version with the derivation `key`; None if it is complete."""
    known = services.registry.find_version(pipeline.recipe.release.model_name, {RELEASE_KEY_TAG: key})
    if known is None or not _has_decision(known):
        return "its version is no longer in the registry"
    return files_problem(services.registry, known, services.hashes)


def check_releases_exist(
    registry: Registry, versions: Sequence[Version], recorded: Mapping[dg.AssetKey, Materialization]
) -> None:
    """Raise RegistryError if none of the releases `recorded` is among its `versions`: they may be in another registry."""
    released = {
        latest.fingerprint: key.path[0] for key, latest in recorded.items() if key.path[-1] == AssetName.RELEASED_MODEL
    }
    registered = {version.tags.get(RELEASE_KEY_TAG) for version in versions}
    if (releases := released.keys() - {None}) and not releases & registered:
        names = ", ".join(sorted(released[release] for release in releases))
        raise RegistryError(
            f"{shown(registry.uri)} lacks the released versions of {names}. It may be another registry, so no artifact is "
            f"removed. Set {TRACKING_VARIABLE} or {REGISTRY_VARIABLE} to their registry, run one of these recipes, or wipe "
            "their assets in Dagster",
            "releases-missing",
        )


def _release(candidate: Candidate) -> _Released:
    """Run the phases that are left. Raise RegistryUnavailable, RegistryError or StoreError; another call continues."""
    registry = candidate.registry
    with candidate.store.lock(AssetName.RELEASED_MODEL, candidate.derivation.key):
        version = registry.find_version(candidate.name, {RELEASE_KEY_TAG: candidate.derivation.key})
        is_restored = version is not None and restore_files(candidate.context.services, version)
        if version is not None and _has_decision(version):
            with promotion_lock(candidate.store, version.name):
                _, hypotheses = _settle(candidate)
            news = hypotheses.news if hypotheses else []
            version = registry.find_version(candidate.name, {RELEASE_KEY_TAG: candidate.derivation.key}) or version
            return _Released(version, "computed" if is_restored else "reused", news=news)
        version = _register(candidate)
        with promotion_lock(candidate.store, version.name):  # not earlier: a rollback would have to wait for files
            registry.nominate(version)
            decision, version, news = _promote(candidate, version)
            return _Released(_record(candidate, version, decision), "computed", decision.figures, news)


def _has_decision(version: Version) -> bool:
    return DECISION_TAG in version.tags or ROLLED_BACK_TAG in version.tags


def _register(candidate: Candidate) -> Version:
    context, policy = candidate.context, candidate.artifact(POLICY)
    run_id = delivered_evaluation(context, policy, candidate.artifact(EVALUATION))
    if run_id is None:
        failure = context.services.tracker.failure
        assert failure is not None, "nothing is undelivered without a failure"
        raise type(failure)(
            f"the MLflow run of {context.pipeline.name}'s policy is incomplete, so no version is registered; run again to add "
            f"what is missing, nothing is computed again: {failure}"
        )
    _check_same_tokenizer(candidate)
    model = plain_model(context, policy)
    log_phase(
        context.services,
        context.dagster.log,
        AssetName.RELEASED_MODEL,
        f"storing the files of a version of {candidate.name}",
    )
    lineage = candidate.lineage if model is policy else {**candidate.lineage, MERGED: model.fingerprint}
    return candidate.registry.register(
        candidate.name,
        model.folder,
        run_id,
        identity={RELEASE_KEY_TAG: candidate.derivation.key},
        tags=lineage_tags(lineage),
        tokenizer=candidate.artifact(RELEASE_SPEC).folder / "tokenizer",
        settings=candidate.artifact(RELEASE_SPEC).folder / "model",
        evaluation=shipped_evaluation(candidate.artifact(EVALUATION)),
        card=model_card(
            candidate.name,
            read_training(policy.folder),
            candidate.artifact(EVALUATION),
            tagged_lineage(lineage),
        ),
        lineage=lineage,
    )


def _check_same_tokenizer(candidate: Candidate) -> None:
    """Raise StoreError if the release has another tokenizer or template than the policy was trained with."""
    recipe = candidate.context.pipeline.name
    trained, released = (candidate.artifact(spec).json(SPEC_FILE) for spec in (TOKENIZATION_SPEC, RELEASE_SPEC))
    for part in ("tokenizer", "template"):
        name = f"{part}_fingerprint"
        if trained[name] != released[name]:
            raise StoreError(
                f"{recipe}/release_spec has the {part} {short(released[name])}, and {recipe}/tokenization_spec has "
                f"{short(trained[name])}: materialize both, and the assets below them, in one run",
                "release-tokenizer",
            )


def _settle(candidate: Candidate) -> tuple[Version | None, Hypotheses | None]:
    """Bring the waiting candidates up to date. Return the champion after it, and the hypotheses of the gate `anytime`."""
    registry, gate = candidate.registry, candidate.context.pipeline.recipe.release.gate
    champion = registry.champion(candidate.name)
    if gate.type != "anytime":
        return champion, None
    hypotheses = Hypotheses.read(candidate)
    while champion is not None and hypotheses.settle(champion):
        champion = registry.champion(candidate.name)
    return champion, hypotheses


def _promote(candidate: Candidate, version: Version) -> tuple[Decision, Version, list[str]]:
    """Decide, and promote. Decide again if another home, or the user, has made another version champion meanwhile.

    The reasons are written before the alias moves. A run that continues after that finds the version to be champion already.
    Return the sentences about other candidates, too.
    """
    registry = candidate.registry
    news: list[str] = []
    while True:
        champion, hypotheses = _settle(candidate)
        decision = decide_release(candidate, version, champion, hypotheses)
        decision = shown_decision(candidate, version, champion, decision)
        version = registry.tag(version, {REASONS_TAG: "; ".join(decision.reasons), **win_tags(decision)})
        news += hypotheses.news if hypotheses else []
        if not decision.promote or registry.promote(version, over=champion):
            if hypotheses and decision.promote:
                hypotheses.promoted(version)
                _, after = _settle(candidate)  # the others start again, against the new champion
                news += after.news if after else []
            return decision, version, news


def _record(candidate: Candidate, version: Version, decision: Decision) -> Version:
    """Describe the version with its result, name its run after it, and tag it with the decision, last."""
    candidate.context.dagster.log.info(f"version {version.number} of {version.name}: {version.tags[REASONS_TAG]}")
    run_id = find_run(candidate)
    candidate.registry.describe(version, describe_version(candidate, decision, run_id))
    if run_id is not None:
        name = f"{candidate.context.pipeline.name} v{version.number}"
        candidate.context.services.tracker.rename_run(run_id, name)
    return candidate.registry.tag(version, {DECISION_TAG: "yes" if decision.promote else "no"})


def _result(candidate: Candidate, released: _Released, changes: list[str] | None) -> dg.MaterializeResult:
    version, champion = released.version, candidate.registry.champion(released.version.name)
    is_champion = champion is not None and champion.number == version.number  # the user may have moved the alias since
    if champion is not None and not is_champion:  # `_release` has restored the files of `version`
        restore_files(candidate.context.services, champion)
    reasons = "; ".join([*_reasons(candidate.registry, version, is_champion), *released.news])
    link = candidate.registry.link(version)
    evidence = publish_model_history(candidate) if released.outcome == "computed" or released.news else {}
    report = publish_release(candidate, version, is_champion, reasons)
    metadata: dict[str, Any] = {
        "result": dg.MetadataValue.text(of_release(version.name, version.number, is_champion, reasons)),
        **report,
        **evidence,
        "mlflow": dg.MetadataValue.url(link),
        "model": f"models:/{version.name}/{version.number}",
        "champion": "yes" if is_champion else "no",
        "reasons": reasons,
        "model_version": str(version.number),
        "outcome": released.outcome,
        "changes": shown_changes(changes),
        **rounded(released.figures),
        **win_figure(version),
        "made_from": inputs_table(candidate.derivation),
        "fingerprint": candidate.derivation.key,
        "key": candidate.derivation.key,
        "derivation": dg.MetadataValue.json(candidate.derivation.model_dump(mode="json")),
    }
    return dg.MaterializeResult(data_version=dg.DataVersion(candidate.derivation.key), metadata=metadata)


def _reasons(registry: Registry, version: Version, is_champion: bool) -> Iterator[str]:
    """Yield why it is champion or not: changes by the gate or the user since the decision, then the gate's reasons."""
    if ROLLED_BACK_TAG in version.tags:
        yield f"it was champion and was rolled back{'; the user has made it champion again' if is_champion else ''}"
    elif is_champion != (version.tags.get(DECISION_TAG) == "yes"):
        replaced = None if is_champion else registry.find_version(version.name, {PREVIOUS_TAG: str(version.number)})
        yield (
            f"version {replaced.number} replaced it"
            if replaced
            else "the user has moved the alias since the gate decided"
        )
    if reasons := version.tags.get(REASONS_TAG):
        yield reasons

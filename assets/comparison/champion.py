"""What a candidate is compared with: the champion's evaluation, wherever it was released."""

from collections.abc import Mapping
from dataclasses import replace

from assets.comparison.leakage import find_leakage
from assets.comparison.paired_metrics import Row, common_measure, measured, prompts, rows_by_messages, rows_by_pair
from assets.execution.asset_context import AssetContext
from assets.execution.job_log import log_message
from model_registry.gate import MIN_PROMPTS, Measure, PairedScores, count_prompts
from model_registry.model_version import Version
from training.contract.errors import CorruptArtifact, RegistryError, RegistryUnavailable
from training.contract.store.store import Artifact


def compared(step: AssetContext, evaluation: Artifact, raw_preferences: str, champion: Version) -> PairedScores:
    """What can be compared of a candidate's `evaluation`, made from `raw_preferences`, and the champion's.

    Where few pairs have the same tokens, as after another template, a pair is known by its messages, and only its rank, over
    the reference that each has, can be compared. Few is less than ten prompts, or less than half of those that have the same
    messages: after an edit that spares some pairs, those are of a kind of their own. Raises RegistryError where the champion's
    is nowhere; CorruptArtifact where the candidate's data are.
    """
    store, theirs = step.services.store, _artifact_of(step, champion, "evaluation")
    found, rows = _comparable(step, evaluation, store.open("raw_preferences", raw_preferences), champion, theirs)
    shared = {pair: rows[pair] for pair in found.shared}
    policies = [each.derivation.inputs["policy"].fingerprint for each in (evaluation, theirs)]
    return replace(found, leaked=find_leakage(store, policies, shared, raw_preferences).pairs)


def _comparable(
    step: AssetContext, evaluation: Artifact, said: Artifact, champion: Version, theirs: Artifact
) -> tuple[PairedScores, Mapping[str, Row]]:
    """What can be compared of both evaluations, leaked pairs included, and the candidate's rows of it."""
    rows, others = rows_by_pair(evaluation), rows_by_pair(theirs)
    by_tokens = _compared(common_measure(evaluation, theirs), rows, others, said)
    is_enough = count_prompts(by_tokens.shared, by_tokens.prompts) >= MIN_PROMPTS
    if is_enough and 2 * len(by_tokens.shared) >= min(len(rows), len(others)):
        return by_tokens, rows
    try:
        before = _artifact_of(step, champion, "raw_preferences")
    except RegistryUnavailable:
        raise
    except RegistryError:
        if is_enough:
            return by_tokens, rows
        raise
    said_rows = rows_by_messages(evaluation, said)
    by_messages = _compared(Measure.ERROR_RATE, said_rows, rows_by_messages(theirs, before), said)
    if is_enough and 2 * len(by_tokens.shared) >= len(by_messages.shared):
        return by_tokens, rows
    return by_messages, said_rows


def _compared(measure: Measure, rows: Mapping[str, Row], others: Mapping[str, Row], said: Artifact) -> PairedScores:
    values, of_champion = measured(measure, rows, others), measured(measure, others, others)
    return PairedScores(measure, values, of_champion, prompts(rows, said))


def _artifact_of(step: AssetContext, champion: Version, kind: str) -> Artifact:
    """From this store; that of another home goes with the version, if it is its evaluation.

    Raises RegistryError where another program made it champion, another home has what is needed, or both copies are spoiled.
    """
    store, found = step.services.store, champion.fingerprint_of(kind)
    whose = f"version {champion.number} of {champion.name}, the champion,"
    if found is None:
        raise RegistryError(
            f"{whose} was not released by a recipe, so nothing can be compared with it: let the alias `champion` point at "
            "a version that was, or at none"
        )
    if (folder := store.folder(kind, found)).is_dir():
        try:
            return store.open(kind, found)
        except CorruptArtifact as error:
            place = store.set_aside(kind, found)
            text = f"{error}. Set aside in {place}; that among the version's files is taken."
            log_message(step.services, step.context.log, "released_model", text)
    try:
        with store.staging() as staging:
            return store.adopt(step.services.registry.fetch(champion, kind, staging), kind, found)
    except RegistryUnavailable:
        raise
    except CorruptArtifact as error:
        raise RegistryError(
            f"the {kind} of {whose} is neither in this store nor, as it was, in {champion.source}/{kind}, so nothing can be "
            "compared with it: restore either from a backup, or let the alias `champion` point at another version"
        ) from error
    except RegistryError as error:
        raise RegistryError(
            f"{whose} was released in another home, whose {kind} is neither in this store nor among the version's files, so "
            f"nothing can be compared with it: copy that home's folder {folder.relative_to(store.root.parent)} to {folder}, "
            f"or release into another `release.model_name` ({error})"
        ) from error

"""Comparison of a candidate's evaluation with the champion's, which may have been released from another home."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from assets.comparison.leakage import find_leakage
from assets.comparison.paired_metrics import Row, common_measure, measure_pairs, prompts, rows_by_messages, rows_by_pair
from assets.execution.asset_context import AssetContext
from assets.execution.job_log import log_message
from model_registry.gate.scores import MIN_PROMPTS, GateMetric, PairedScores, count_prompts
from model_registry.model_version import Version
from training.contract.errors import CorruptArtifact, RegistryError, RegistryUnavailable, without_code
from training.contract.protocol.artifacts import RAW_PREFERENCES, AssetName
from training.contract.store.artifact import Artifact
from training.contract.store.store import Store


def score_against_champion(
    context: AssetContext, evaluation: Artifact, raw_preferences: str, champion: Version, is_by_prompt: bool = False
) -> PairedScores:
    """Return the paired scores of a candidate's `evaluation`, made from `raw_preferences`, and the champion's evaluation.

    Raise RegistryError if the champion's evaluation is missing, CorruptArtifact if the candidate's data are corrupt.
    """

    def open_rows() -> Artifact | None:
        try:
            return _open_champions(context, champion, AssetName.RAW_PREFERENCES)
        except RegistryUnavailable:
            raise
        except RegistryError:
            return None

    champions = _open_champions(context, champion, AssetName.EVALUATION)
    scores = compare_evaluations(
        context.services.store, evaluation, raw_preferences, champions, open_rows, is_by_prompt
    )
    if scores is None:
        _open_champions(context, champion, AssetName.RAW_PREFERENCES)  # raises the error
    assert scores is not None
    return scores


def compare_evaluations(
    store: Store,
    evaluation: Artifact,
    raw_preferences: str,
    champions: Artifact,
    open_champions_rows: Callable[[], Artifact | None],
    is_by_prompt: bool,
) -> PairedScores | None:
    """Return the paired scores of two evaluations; `is_by_prompt` as in `common_measure`. None: champion's rows are missing.

    Usually pairs are matched by tokens. If too few have equal tokens, for example after a change of template, pairs are matched
    by messages, and only error rates are compared, each over its own reference. Too few means fewer than `MIN_PROMPTS` prompts
    or less than half of the pairs with equal messages: pairs spared by an edit are not representative.
    """
    rows_of_candidate = store.open(RAW_PREFERENCES, raw_preferences)
    found = _pair_scores(evaluation, rows_of_candidate, champions, open_champions_rows, is_by_prompt)
    if found is None:
        return None
    scores, rows = found
    shared = {pair: rows[pair] for pair in scores.shared}
    policies = [artifact.derivation.inputs[AssetName.POLICY].fingerprint for artifact in (evaluation, champions)]
    return replace(scores, leaked=find_leakage(store, policies, shared, raw_preferences).pairs)


def _pair_scores(
    evaluation: Artifact,
    raw_preferences: Artifact,
    champions: Artifact,
    open_champions_rows: Callable[[], Artifact | None],
    is_by_prompt: bool,
) -> tuple[PairedScores, Mapping[str, Row]] | None:
    """Return the paired scores, leaked pairs included, and the candidate's rows; None without the champion's rows."""
    rows, champion_rows = rows_by_pair(evaluation), rows_by_pair(champions)
    measure = common_measure(evaluation, champions, is_by_prompt)
    by_tokens = _score_rows(measure, rows, champion_rows, raw_preferences)
    is_enough = count_prompts(by_tokens.shared, by_tokens.prompts) >= MIN_PROMPTS
    if is_enough and 2 * len(by_tokens.shared) >= min(len(rows), len(champion_rows)):
        return by_tokens, rows
    champions_data = open_champions_rows()
    if champions_data is None:
        return (by_tokens, rows) if is_enough else None
    rows_by_text = rows_by_messages(evaluation, raw_preferences)
    champion_rows_by_text = rows_by_messages(champions, champions_data)
    by_messages = _score_rows(GateMetric.ERROR_RATE, rows_by_text, champion_rows_by_text, raw_preferences)
    if is_enough and 2 * len(by_tokens.shared) >= len(by_messages.shared):
        return by_tokens, rows
    return by_messages, rows_by_text


def _score_rows(
    measure: GateMetric, rows: Mapping[str, Row], champion_rows: Mapping[str, Row], raw_preferences: Artifact
) -> PairedScores:
    candidate, champion = (
        measure_pairs(measure, rows, champion_rows),
        measure_pairs(measure, champion_rows, champion_rows),
    )
    return PairedScores(measure, candidate, champion, prompts(rows, raw_preferences))


def _open_champions(context: AssetContext, champion: Version, kind: str) -> Artifact:
    """Return the champion's artifact of `kind`, from this store or, for an evaluation, from the version's files.

    Raise RegistryError if another program released the champion, or if the artifact is missing or corrupt in both places.
    """
    store, fingerprint = context.services.store, champion.fingerprint_of(kind)
    version = f"version {champion.number} of {champion.name}, the champion,"
    if fingerprint is None:
        raise RegistryError(
            f"{version} was not released by a recipe and cannot be compared: move the alias `champion` to a version released "
            "by a recipe, or delete the alias",
            "champion-without-lineage",
        )
    if (folder := store.folder(kind, fingerprint)).is_dir():
        try:
            return store.open(kind, fingerprint)
        except CorruptArtifact as error:
            path = store.set_aside(kind, fingerprint)
            text = (
                f"{without_code(str(error))}. It was set aside in {path}; the copy among the version's files is used."
            )
            log_message(context.services, context.dagster.log, AssetName.RELEASED_MODEL, text)
    try:
        with store.staging() as staging:
            return store.adopt(context.services.registry.fetch(champion, kind, staging), kind, fingerprint)
    except RegistryUnavailable:
        raise
    except CorruptArtifact as error:
        raise RegistryError(
            f"the {kind} of {version} is missing from this store, and its copy in {champion.source}/{kind} is corrupt, so the "
            "candidate cannot be compared with it: restore one of them from a backup, or move the alias `champion` to another "
            "version",
            "champion-corrupt",
        ) from error
    except RegistryError as error:
        raise RegistryError(
            f"{version} was released in another home. Its {kind} is missing from this store and from the version's files, so "
            f"the candidate cannot be compared with it: copy the other home's folder {folder.relative_to(store.root.parent)} "
            f"to {folder}, or set another `release.model_name` ({without_code(str(error))})",
            "champion-missing",
        ) from error

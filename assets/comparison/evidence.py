"""The scores behind a hypothesis of the gate, read from the store: on held-out pairs and on arriving pairs."""

import math
from collections import Counter
from collections.abc import Iterator

import pyarrow.compute as pc
import pyarrow.parquet as pq

from assets.comparison.champion import compare_evaluations
from assets.comparison.paired_metrics import Row, measure_pairs
from model_registry.gate.anytime import LOSSES, clip_of, clipped, prompt_differences
from model_registry.gate.betting import log_evidence
from model_registry.gate.ledger import Hypothesis
from model_registry.gate.scores import GateMetric, PairedScores
from training.contract.errors import StoreError
from training.contract.files.prompt_digests import prompt_digests
from training.contract.protocol.artifacts import (
    EVALUATION,
    PREQUENTIAL_SCORES,
    RAW_PREFERENCES,
    TOKENIZED_PAIRS,
    AssetName,
)
from training.contract.protocol.prequential import SCORES_FILE, RecordedPolicies
from training.contract.store.artifact import Artifact
from training.contract.store.store import Store

_ROUNDING = 1e-9


def rows_of_evaluation(store: Store, evaluation: Artifact) -> str:
    """Return the fingerprint of the `raw_preferences` of an evaluation. Raise StoreError."""
    pairs = store.open(
        TOKENIZED_PAIRS, evaluation.derivation.inputs[AssetName.TOKENIZED_PAIRS].fingerprint, hashes=False
    )
    return pairs.derivation.inputs[AssetName.RAW_PREFERENCES].fingerprint


def held_out_scores(store: Store, evaluation: str, champions: str) -> PairedScores:
    """Return the paired scores of two evaluations in the store, given by their fingerprints. Raise StoreError."""
    candidate, champion = store.open(EVALUATION, evaluation), store.open(EVALUATION, champions)
    champions_rows = rows_of_evaluation(store, champion)
    scores = compare_evaluations(
        store,
        candidate,
        rows_of_evaluation(store, candidate),
        champion,
        lambda: store.open(RAW_PREFERENCES, champions_rows),
        is_by_prompt=True,
    )
    assert scores is not None, "the champion's rows were opened"
    return scores


def arriving_scores(scores: Artifact, policy: str, champion: str, metric: GateMetric) -> PairedScores:
    """Return the values of `metric` on arriving pairs that are fresh for both policies."""
    candidate, champions = _rows_of_policy(scores, policy), _rows_of_policy(scores, champion)
    shared = sorted(candidate.keys() & champions.keys())
    rows = {pair: candidate[pair] for pair in shared}
    others = {pair: champions[pair] for pair in shared}
    prompts = {pair: str(row["prompt"]) for pair, row in rows.items()}
    return PairedScores(metric, measure_pairs(metric, rows, others), measure_pairs(metric, others, others), prompts)


def _rows_of_policy(scores: Artifact, policy: str) -> dict[str, Row]:
    if not (path := scores.folder / SCORES_FILE).is_file():  # nothing had arrived
        return {}
    table = pq.read_table(path)
    return {str(row["row"]): row for row in table.filter(pc.equal(table["policy"], policy)).to_pylist()}


def count_seen(store: Store, scores: Artifact) -> Counter[str]:
    """Return, by policy, how many of the scored pairs have prompts in the rows that the policy has seen."""
    seen: Counter[str] = Counter()
    made_from = scores.manifest.made_from
    for policy in RecordedPolicies.model_validate(made_from.settings).policies:
        inputs = made_from.inputs
        folders = [store.folder(AssetName.RAW_PREFERENCES, inputs[name].fingerprint) for name in policy.seen_rows]
        known = {digest.hex() for folder in folders for digest in prompt_digests(folder)}
        weights = inputs[policy.policy].fingerprint
        seen[weights] = sum(str(row["prompt"]) in known for row in _rows_of_policy(scores, weights).values())
    return seen


def bet_differences(store: Store, entry: Hypothesis) -> list[float]:
    """Return the differences of all bets of a hypothesis, not clipped, from the scores in the store. Raise StoreError."""
    differences: list[float] = []
    for bet in entry.bets:
        differences += _differences_of(store, entry, bet.source)
    return differences


def _differences_of(store: Store, entry: Hypothesis, source: str) -> list[float]:
    if entry.held_out is not None and source == entry.held_out.evaluation:
        found = prompt_differences(held_out_scores(store, entry.held_out.evaluation, entry.held_out.champions))
        return list(found.values())[entry.held_out.prompts_for_clip :]
    scores = store.open(PREQUENTIAL_SCORES, source)
    found = prompt_differences(arriving_scores(scores, entry.policy, entry.champions_policy, entry.metric))
    return list(found.values())


def evidence_problem(store: Store, entry: Hypothesis) -> str | None:
    """Recompute a hypothesis from the store. Return how it differs from its entry in the ledger; None if it does not."""
    try:
        return next(_differences_to_entry(store, entry), None)
    except StoreError as error:
        return f"its scores cannot be read: {error}"


def _differences_to_entry(store: Store, entry: Hypothesis) -> Iterator[str]:
    clip = clip_of(_differences_for_clip(store, entry))
    if clip is not None and not _is_close(clip, entry.clip or 0.0):
        yield f"the clip is {clip:.6g}, its entry has {entry.clip}"
    differences = bet_differences(store, entry)
    if len(differences) != entry.prompts:
        yield f"the scores are of {len(differences)} prompts, its entry has {entry.prompts}"
    evidence = log_evidence(clipped(differences, entry.clip or 1.0))
    if not _is_close(evidence, entry.log_evidence):
        yield f"the logarithm of the evidence is {evidence:.6g}, its entry has {entry.log_evidence:.6g}"
    if entry.level is not None and evidence < -math.log(entry.level) - _ROUNDING:
        yield f"the logarithm of the evidence is {evidence:.6g}; the level needs {-math.log(entry.level):.6g}"


def _differences_for_clip(store: Store, entry: Hypothesis) -> list[float]:
    """Return the differences that chose the clip; nothing if the recipe or the metric gave it."""
    if entry.metric not in LOSSES:
        return []
    if entry.clip_source is not None:
        return _differences_of(store, entry, entry.clip_source)
    if entry.held_out is None or not (used := entry.held_out.prompts_for_clip):
        return []
    held_out = prompt_differences(held_out_scores(store, entry.held_out.evaluation, entry.held_out.champions))
    return list(held_out.values())[:used]


def _is_close(value: float, other: float) -> bool:
    return abs(value - other) <= _ROUNDING * max(1.0, abs(other))

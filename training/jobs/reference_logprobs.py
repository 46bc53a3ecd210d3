"""The `reference` job: log-probs of every response under the frozen model. Each distinct sequence is scored once, ever.

1. Find the distinct sequences of all pairs, by their keys.
2. On rank 0, look them up in the log-prob cache and broadcast the missing ones. If other versions of torch or transformers,
   or another device, scored cached sequences, score a sample of these again (training/scoring/rescore_sample.py).
3. Score the missing sequences into the cache, on all ranks (training/scoring/cached_sequences.py).
4. On rank 0, read all sequences from the cache, check that each has one value over exactly its trained tokens, and write the
   table. New scores take the same path as old ones.

Legend: P pairs, S distinct sequences, M missing ones, Q looked-up ones.
"""

import time

import numpy as np
from transformers import PreTrainedModel

from training.contract.errors import TrainingError
from training.contract.identity.fingerprint import fingerprint_of_stream
from training.contract.protocol.artifacts import AssetName
from training.contract.protocol.details import LogProbsDetails
from training.contract.protocol.settings import ScoringSettings
from training.contract.store.artifact import JobResult
from training.contract.store.logprob_cache import LogprobCache, LookupResult, scoring_rule
from training.contract.store.logprob_table import LogProbTable
from training.contract.store.store import Store
from training.data.tokenization.pair_dataset import SIDES, Pairs, by_pair
from training.job_context import JobContext
from training.model.backbone import check_positions, text_config
from training.model.logprobs.self_check import check_exact
from training.model.training_setup import check_trainable
from training.parallel.model_specs import InferenceModelSpec
from training.parallel.strategy import load_frozen
from training.scoring.cached_sequences import DistinctSequences, find_missing, score_missing
from training.scoring.rescore_sample import confirm_others, sample_to_rescore


def run(context: JobContext[ScoringSettings]) -> JobResult[LogProbsDetails]:
    job, group, events = context.job, context.group, context.events
    started = time.monotonic()
    reference, dtype = job.inputs[AssetName.REFERENCE_MODEL], job.settings.dtype
    pairs = Pairs.open(job.inputs[AssetName.TOKENIZED_PAIRS].folder)
    sequences = DistinctSequences.of(pairs)
    rule = scoring_rule(reference.fingerprint, dtype)
    cache = LogprobCache(Store(job.store), rule, events.note, job.settings.software)
    events.phase("look up reference log-probs")
    missing_M = find_missing(cache, sequences, group)
    sample_M = sample_to_rescore(cache, sequences, group)
    known = len(sequences) - len(missing_M)
    events.note(f"{len(sequences):,} distinct sequences: {known:,} known, {len(missing_M):,} to score")
    if len(missing_M) or len(sample_M):
        model = _load(context, pairs)
        if len(sample_M):
            events.phase("score a sample of other software or another device again")
            if not confirm_others(model, sequences, sample_M, cache, dtype, group, events):
                missing_M = find_missing(cache, sequences, group)
        events.phase("score sequences with the reference model")
        score_missing(model, sequences, missing_M, cache, group, events)
    if not group.is_main:
        return JobResult()
    table = build_table(sequences, cache, dtype)
    table.write(job.staging)
    details = _details(sequences, len(missing_M), table, round(time.monotonic() - started, 3))
    return JobResult(_identity(table, reference.fingerprint), details)


def _load(context: JobContext[ScoringSettings], pairs: Pairs) -> PreTrainedModel:
    """Load the reference model and check that it is exact.

    Raises ModelError or TemplateError if it does not suit the pairs or the recipe.
    """
    job, events = context.job, context.events
    events.phase("loading the reference model")
    frozen = InferenceModelSpec(job.inputs[AssetName.REFERENCE_MODEL], job.settings.dtype)
    model = load_frozen(frozen, job.compute.parallel, context.group, events)
    pairs.check_known_tokens(text_config(model).vocab_size)
    check_positions(model, pairs.longest, events)
    check_trainable(model, job.recipe)
    check_exact(model, events)
    return model


def _details(sequences: DistinctSequences, scored: int, table: LogProbTable, seconds: float) -> LogProbsDetails:
    return LogProbsDetails(
        sequences=len(sequences),
        hits=len(sequences) - scored,
        scored=scored,
        pairs=len(table),
        finite=int(np.isfinite(table.logprobs_P2).all(axis=1).sum()),
        tokens=int(table.tokens_P2.sum()),
        rule=table.rule,
        seconds=seconds,
    )


def build_table(sequences: DistinctSequences, cache: LogprobCache, dtype: str) -> LogProbTable:
    """Return the table, read from the cache. Raises TrainingError unless it covers every response of every pair exactly."""
    hits = cache.lookup(sequences.keys_SK)
    _check_coverage(sequences, hits)
    sequence_P2 = by_pair(sequences.sequence_2P)
    return LogProbTable(hits.sums_Q[sequence_P2], hits.counts_Q[sequence_P2], cache.rule, dtype)


def _check_coverage(sequences: DistinctSequences, hits: LookupResult) -> None:
    """Raise TrainingError unless every sequence has a value over as many tokens as its mask has."""
    if len(missing := np.flatnonzero(~hits.found_Q)):
        raise TrainingError(
            f"{len(missing)} of {len(sequences)} sequences have no reference log-prob after scoring, first "
            f"{sequences.name(missing[0])}; the store lost cache shards during the job: run again",
            "cache-shards-lost",
        )
    expected_S = np.concatenate([sequences.pairs.trained_lengths(side) for side in SIDES])[sequences.first_S]
    if len(wrong := np.flatnonzero(hits.counts_Q != expected_S)):
        first = wrong[0]
        raise TrainingError(
            f"{len(wrong)} of {len(sequences)} sequences have a wrong reference log-prob, first "
            f"{sequences.name(first)}: {hits.sums_Q[first]} nats over {hits.counts_Q[first]} tokens; its mask has "
            f"{expected_S[first]} tokens (a mask cannot train the first token of a sequence, which lacks a log-prob)",
            "wrong-token-count",
        )


def _identity(table: LogProbTable, weights: str) -> str:
    """Return the fingerprint of a table. It repeats the rule's weights, because the fingerprints of stored tables do."""
    values = (column.tobytes() for column in table.columns().values())
    return fingerprint_of_stream("reference_logprobs", [weights.encode(), table.rule.encode(), *values])

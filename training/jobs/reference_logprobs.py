"""The `reference` job: log-probs of every response under the frozen model, each distinct sequence scored once, ever.

1. The work is over the distinct sequences of all pairs, by their keys.
2. Rank 0 looks them up in the memo and tells the other ranks which ones are missing. If other versions of torch or
   transformers, or another device, scored what is known, a sample of that is scored again (training/scoring/rescore_sample.py).
3. The ranks score the missing ones into the memo (training/scoring/cached_sequences.py).
4. Rank 0 reads all of them from the memo, checks that each response of each pair has one finite value over exactly its
   trained tokens, and writes the table. New scores take the same path as old ones.

Legend: P pairs, S distinct sequences, M missing ones.
"""

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from training.contract.errors import TrainingError
from training.contract.identity.fingerprint import fingerprint_of_stream
from training.contract.identity.software import SOFTWARE
from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Job
from training.contract.store.logprob_cache import LogprobCache, LookupResult, scoring_rule
from training.contract.store.logprob_table import LogProbTable
from training.contract.store.store import JobResult, Store
from training.data.tokenization.pair_dataset import SIDES, Pairs, by_pair
from training.distributed import Group
from training.model.backbone import check_positions, text_config
from training.model.logprobs.self_check import check_exact
from training.model.training_setup import check_trainable
from training.parallel.model_specs import InferenceModelSpec
from training.parallel.strategy import load_frozen
from training.scoring.cached_sequences import DistinctSequences, score_missing
from training.scoring.rescore_sample import confirm_others, sample_to_rescore


def run(job: Job, group: Group, events: EventWriter) -> JobResult:
    started = time.monotonic()
    reference, dtype = job.inputs["reference_model"], job.settings["dtype"]
    pairs = Pairs.open(job.inputs["tokenized_pairs"].folder)
    sequences = DistinctSequences.of(pairs)
    software = job.settings.get(SOFTWARE, {})
    memo = LogprobCache(Store(job.store), scoring_rule(reference.fingerprint, dtype), events.note, software)
    events.phase("look up reference log-probs")
    missing_M = _missing(memo, sequences, group)
    sample_M = sample_to_rescore(memo, sequences, group)
    known = len(sequences) - len(missing_M)
    events.note(f"{len(sequences):,} distinct sequences: {known:,} known, {len(missing_M):,} to score")
    if len(missing_M) or len(sample_M):
        model = _load(job, pairs, group, events)
        if len(sample_M):
            events.phase("score again what other software, or another device, scored")
            if not confirm_others(model, sequences, sample_M, memo, dtype, group, events):
                missing_M = _missing(memo, sequences, group)
        events.phase("score sequences with the reference model")
        score_missing(model, sequences, missing_M, memo, group, events)
    if not group.is_main:
        return JobResult("")
    table = build_table(sequences, memo, dtype)
    table.write(job.staging)
    details = _details(sequences, len(missing_M), table) | {"seconds": round(time.monotonic() - started, 3)}
    return JobResult(_identity(table, reference.fingerprint), details)


def _load(job: Job, pairs: Pairs, group: Group, events: EventWriter) -> PreTrainedModel:
    """The reference model, proved exact. Raises ModelError or TemplateError if it does not fit the pairs or the recipe."""
    events.phase("loading the reference model")
    reference, dtype = job.inputs["reference_model"], job.settings["dtype"]
    model = load_frozen(InferenceModelSpec(reference, dtype), job.compute.parallel, group, events)
    pairs.check_known_tokens(text_config(model).vocab_size)
    check_positions(model, pairs.longest, events)
    check_trainable(model, job.recipe)
    check_exact(model, events)
    return model


def _details(sequences: DistinctSequences, scored: int, table: LogProbTable) -> dict[str, Any]:
    return {
        "sequences": len(sequences),
        "hits": len(sequences) - scored,
        "scored": scored,
        "pairs": len(table),
        "finite": int(np.isfinite(table.logprobs_P2).all(axis=1).sum()),
        "tokens": int(table.tokens_P2.sum()),
        "rule": table.rule,
    }


def _missing(memo: LogprobCache, sequences: DistinctSequences, group: Group) -> npt.NDArray[np.int64]:
    """The sequences to score, the same on every rank: rank 0 alone reads the shards (and sets broken ones aside)."""
    known_S = torch.zeros(len(sequences), dtype=torch.uint8)
    if group.is_main:
        known_S = torch.from_numpy(memo.lookup(sequences.keys_SK).found_Q.astype(np.uint8))
    return np.flatnonzero(group.broadcast_(known_S.to(group.device)).cpu().numpy() == 0)


def build_table(sequences: DistinctSequences, memo: LogprobCache, dtype: str) -> LogProbTable:
    """The table, from the memo. Raises TrainingError unless every response of every pair is covered exactly."""
    hits = memo.lookup(sequences.keys_SK)
    _check_coverage(sequences, hits)
    sequence_P2 = by_pair(sequences.sequence_2P)
    return LogProbTable(hits.sums_Q[sequence_P2], hits.counts_Q[sequence_P2], memo.rule, dtype)


def _check_coverage(sequences: DistinctSequences, hits: LookupResult) -> None:
    """Raise TrainingError unless every sequence has a value over as many tokens as its mask trains."""
    if len(missing := np.flatnonzero(~hits.found_Q)):
        raise TrainingError(
            f"{len(missing)} of {len(sequences)} sequences have no reference log-prob after scoring, first "
            f"{sequences.name(missing[0])}; the store lost shards meanwhile: run again"
        )
    expected_S = np.concatenate([sequences.pairs.trained_lengths(side) for side in SIDES])[sequences.first_S]
    if len(wrong := np.flatnonzero(hits.counts_Q != expected_S)):
        first = wrong[0]
        raise TrainingError(
            f"{len(wrong)} of {len(sequences)} sequences have a wrong reference log-prob, first "
            f"{sequences.name(first)}: {hits.sums_Q[first]} nats over {hits.counts_Q[first]} tokens, its mask trains "
            f"{expected_S[first]} (the first token of a sequence has no log-prob and cannot be trained)"
        )


def _identity(table: LogProbTable, weights: str) -> str:
    """The rule names the weights as well; they stay here too, since every table that was ever made is known by this."""
    values = (column.tobytes() for column in table.columns().values())
    return fingerprint_of_stream("reference_logprobs", [weights.encode(), table.rule.encode(), *values])

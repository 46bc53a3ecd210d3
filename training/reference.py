"""The `reference` job: what the frozen model says of every response, each distinct sequence scored once, ever.

1. The work is over the distinct sequences of all pairs, by their keys.
2. Rank 0 looks them up in the memo and tells the other ranks which ones are missing.
3. The ranks score the missing ones into the memo (training/memoized.py).
4. When all are done, rank 0 reads everything back from the memo, checks that each response of each pair has exactly one
   finite value over exactly its trained tokens, and writes the table.

Values always come back through the store, also those made a moment ago: there is one path from a score to a table.

Legend: P pairs, S distinct sequences, M missing ones.
"""

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from training.contract.errors import TrainingError
from training.contract.events import EventWriter
from training.contract.fingerprint import fingerprint_of_stream
from training.contract.job import Job
from training.contract.logprob_table import LogProbTable
from training.contract.memo import Hits, Memo, scoring_rule
from training.contract.scoring import SCORING_VERSION
from training.contract.store import Made, Store
from training.data.batches import Pairs
from training.distributed import Group
from training.memoized import Sequences, score_missing
from training.model.selfcheck import demand_exact
from training.parallel.choice import lay_out_weights
from training.parallel.source import Frozen


def run(job: Job, group: Group, events: EventWriter) -> Made:
    started = time.monotonic()
    reference, dtype = job.inputs["reference_model"], job.settings["dtype"]
    sequences = Sequences.of(Pairs.open(job.inputs["tokenized_pairs"].folder))
    memo = Memo(Store(job.store), scoring_rule(reference.fingerprint, dtype, SCORING_VERSION), events.note)
    events.phase("look up reference log-probs")
    missing_M = _missing(memo, sequences, group)
    known = len(sequences) - len(missing_M)
    events.note(f"{len(sequences):,} distinct sequences: {known:,} known, {len(missing_M):,} to score")
    if len(missing_M):
        events.phase("score sequences with the reference model")
        frozen = Frozen(reference, dtype)
        model = lay_out_weights(frozen, job.compute.parallel, group, events).place(frozen.load)
        demand_exact(model, events)
        score_missing(model, sequences, missing_M, memo, group, events)
    if not group.is_main:
        return Made("")
    table = build_table(sequences, memo, dtype)
    table.write(job.staging)
    details = _details(sequences, len(missing_M), table) | {"seconds": round(time.monotonic() - started, 3)}
    return Made(_identity(table, reference.fingerprint), details)


def _details(sequences: Sequences, scored: int, table: LogProbTable) -> dict[str, Any]:
    return {
        "sequences": len(sequences),
        "hits": len(sequences) - scored,
        "scored": scored,
        "pairs": len(table),
        "finite": int((np.isfinite(table.chosen_logprobs) & np.isfinite(table.rejected_logprobs)).sum()),
        "tokens": int(table.chosen_tokens.sum() + table.rejected_tokens.sum()),
        "rule": table.rule,
    }


def _missing(memo: Memo, sequences: Sequences, group: Group) -> npt.NDArray[np.int64]:
    """The sequences to score, the same on every rank: rank 0 alone reads (and, where broken, moves) the shards."""
    known_S = torch.zeros(len(sequences), dtype=torch.uint8)
    if group.is_main:
        known_S = torch.from_numpy(memo.lookup(sequences.keys_SK).found_Q.astype(np.uint8))
    group.barrier()
    return np.flatnonzero(group.broadcast_(known_S.to(group.device)).cpu().numpy() == 0)


def build_table(sequences: Sequences, memo: Memo, dtype: str) -> LogProbTable:
    """The table, from the memo. Raises TrainingError unless every response of every pair is covered exactly."""
    hits = memo.lookup(sequences.keys_SK)
    _demand_coverage(sequences, hits)
    chosen_P, rejected_P = np.split(sequences.places_2P, 2)
    return LogProbTable(
        chosen_logprobs=hits.sums_Q[chosen_P],
        chosen_tokens=hits.counts_Q[chosen_P],
        rejected_logprobs=hits.sums_Q[rejected_P],
        rejected_tokens=hits.counts_Q[rejected_P],
        rule=memo.rule,
        dtype=dtype,
    )


def _demand_coverage(sequences: Sequences, hits: Hits) -> None:
    """Every sequence has one value, which is finite as all that the memo keeps, over as many tokens as its mask trains."""
    if len(missing := np.flatnonzero(~hits.found_Q)):
        raise TrainingError(
            f"{len(missing)} of {len(sequences)} sequences have no reference log-prob after scoring, first "
            f"{sequences.name(missing[0])}; the store lost shards meanwhile: run again"
        )
    expected_S = np.array([int(sequences.read(i).mask_T.sum()) for i in range(len(sequences))], dtype=np.int64)
    if len(wrong := np.flatnonzero(hits.counts_Q != expected_S)):
        first = wrong[0]
        raise TrainingError(
            f"{len(wrong)} of {len(sequences)} sequences have a wrong reference log-prob, first "
            f"{sequences.name(first)}: {hits.sums_Q[first]} nats over {hits.counts_Q[first]} tokens, its mask trains "
            f"{expected_S[first]} (the first token of a sequence has no log-prob and cannot be trained)"
        )


def _identity(table: LogProbTable, weights: str) -> str:
    """The rule names the weights as well; they stay here too, since every table that was ever made is known by this."""
    columns = (table.chosen_logprobs, table.chosen_tokens, table.rejected_logprobs, table.rejected_tokens)
    values = (column.tobytes() for column in columns)
    return fingerprint_of_stream("reference_logprobs", [weights.encode(), table.rule.encode(), *values])

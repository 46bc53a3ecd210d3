"""The `reference` job: what the frozen model says of every response, each distinct sequence scored once, ever.

1. Pairs share responses and data sets share pairs, so the work is over distinct sequences, by their keys.
2. Rank 0 looks them up in the memo and tells the other ranks which ones are missing.
3. The missing ones are cut into batches, all responses to a prompt together, and the batches dealt out to the ranks like
   cards: disjoint parts of nearly equal cost. Each rank commits shards of its own every half minute, so a killed pass
   keeps what it had.
4. When all are done, rank 0 reads everything back from the memo, checks that each response of each pair has exactly one
   finite value over exactly its trained tokens, and writes the table.

Values always come back through the store, also those made a moment ago: there is one path from a score to a table.

Legend: P pairs, S distinct sequences, M missing ones.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from training.contract.errors import TrainingError
from training.contract.events import EventWriter, Progress
from training.contract.fingerprint import fingerprint_of_stream
from training.contract.job import Job
from training.contract.logprob_table import LogProbTable
from training.contract.memo import Hits, Memo, scoring_rule
from training.contract.scoring import SCORING_VERSION
from training.contract.store import Made, Store
from training.data.batches import SIDES, Pairs, Side
from training.distributed import Group
from training.model.load import load_model
from training.model.prefix import TokenSequence
from training.model.scoring import Batch, Prompts, Scores, deal, score, shared_batches
from training.model.selfcheck import demand_exact

COMMIT_SECONDS = 30.0
_COMMIT_TOKENS = 1 << 24  # 64 MiB of log-probs


@dataclass(frozen=True)
class Sequences:
    """The distinct sequences of all pairs, in the order of their keys.

    `first_S` and `places_2P` speak of 2P places: the chosen responses of all pairs, then the rejected ones. A sequence
    can be read from its first place, and a place has the sequence `places_2P` names.
    """

    pairs: Pairs
    keys_SK: npt.NDArray[np.uint8]
    lengths_S: npt.NDArray[np.int64]
    first_S: npt.NDArray[np.int64]
    places_2P: npt.NDArray[np.int64]

    @classmethod
    def of(cls, pairs: Pairs) -> "Sequences":
        keys_2PK = np.concatenate([pairs.keys(side) for side in SIDES])
        keys_SK, first_S, places_2P = np.unique(keys_2PK, axis=0, return_index=True, return_inverse=True)
        lengths_2P = np.concatenate([pairs.lengths(side) for side in SIDES])
        return cls(pairs, keys_SK, lengths_2P[first_S], first_S, places_2P.reshape(-1))

    def __len__(self) -> int:
        return len(self.keys_SK)

    def where(self, sequence: int) -> tuple[int, Side]:
        """A pair and a side that have this sequence."""
        side, pair = divmod(int(self.first_S[sequence]), len(self.pairs))
        return pair, SIDES[side]

    def read(self, sequence: int) -> TokenSequence:
        return self.pairs.sequence(*self.where(sequence))

    def prompts(self) -> Prompts:
        """What each sequence answers: the prompt of the first pair that has it."""
        pairs_S = self.first_S % len(self.pairs)
        return Prompts(self.pairs.prompt_numbers(pairs_S), self.pairs.prompt_lengths[pairs_S].astype(np.int64))

    def name(self, sequence: int) -> str:
        pair, side = self.where(sequence)
        return f"the {side} response of row {self.pairs.rows[pair]}"


@dataclass
class _Shards:
    """Scores on their way into the memo: kept until there is enough of them, or enough time has gone by."""

    memo: Memo
    commit_seconds: float
    _keys: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    _scores: list[Scores] = field(default_factory=list)
    _tokens: int = 0
    _committed: float = field(default_factory=time.monotonic)

    def add(self, keys: npt.NDArray[np.uint8], scores: Scores) -> None:
        self._keys.append(keys)
        self._scores.append(scores)
        self._tokens += len(scores.tokens_N)
        if self._tokens >= _COMMIT_TOKENS or time.monotonic() - self._committed >= self.commit_seconds:
            self.commit()

    def commit(self) -> None:
        if self._keys:
            counts = np.concatenate([s.counts_S for s in self._scores])
            self.memo.add(np.concatenate(self._keys), counts, np.concatenate([s.tokens_N for s in self._scores]))
        self._keys, self._scores, self._tokens, self._committed = [], [], 0, time.monotonic()


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
        model = load_model(reference.folder, dtype, group.device)
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


def score_missing(
    model: PreTrainedModel,
    sequences: Sequences,
    missing_M: npt.NDArray[np.int64],
    memo: Memo,
    group: Group,
    events: EventWriter,
    commit_seconds: float = COMMIT_SECONDS,
) -> None:
    """Score this rank's part of `missing_M` into the memo, and wait for the others. Raises TrainingError."""
    found = shared_batches(sequences.lengths_S[missing_M], sequences.prompts().take(missing_M))
    batches = [Batch(missing_M[batch.positions], batch.sizes) for batch in found]
    progress = Progress(events, int(sequences.lengths_S[missing_M].sum()), "tokens")
    shards = _Shards(memo, commit_seconds)
    for own, everyones in deal(batches, group):
        if own is not None:
            scores = score(model, [sequences.read(i) for i in own.positions], own.sizes)
            _refuse_nonfinite(scores, own.positions, sequences)
            shards.add(sequences.keys_SK[own.positions], scores)
        progress.advance(int(sequences.lengths_S[everyones].sum()))
    shards.commit()
    group.barrier()


def _refuse_nonfinite(scores: Scores, batch: npt.NDArray[np.int64], sequences: Sequences) -> None:
    bad_N = ~np.isfinite(scores.tokens_N)
    if bad_N.any():
        sequence = int(np.repeat(batch, scores.counts_S)[bad_N][0])
        raise TrainingError(
            f"the reference model gives {int(bad_N.sum())} tokens of {len(bad_N)} a log-prob that is not finite, first "
            f"in {sequences.name(sequence)}; its weights are broken or `reference.dtype` is too narrow: try float32"
        )


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
    """Every sequence has one finite value over as many tokens as its mask trains."""
    if len(missing := np.flatnonzero(~hits.found_Q)):
        raise TrainingError(
            f"{len(missing)} of {len(sequences)} sequences have no reference log-prob after scoring, first "
            f"{sequences.name(missing[0])}; the store lost shards meanwhile: run again"
        )
    expected_S = np.array([int(sequences.read(i).mask_T.sum()) for i in range(len(sequences))], dtype=np.int64)
    if len(wrong := np.flatnonzero((hits.counts_Q != expected_S) | ~np.isfinite(hits.sums_Q))):
        first = wrong[0]
        raise TrainingError(
            f"{len(wrong)} of {len(sequences)} sequences have a wrong reference log-prob, first "
            f"{sequences.name(first)}: {hits.sums_Q[first]} nats over {hits.counts_Q[first]} tokens, its mask trains "
            f"{expected_S[first]} (the first token of a sequence has no log-prob and cannot be trained)"
        )


def _identity(table: LogProbTable, weights: str) -> str:
    columns = (table.chosen_logprobs, table.chosen_tokens, table.rejected_logprobs, table.rejected_tokens)
    values = (column.tobytes() for column in columns)
    return fingerprint_of_stream("reference_logprobs", [weights.encode(), table.rule.encode(), *values])

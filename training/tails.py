"""The reference's log-probs beyond the common length of each pair: what a loss with `ld_alpha` wants beside the sums.

They are sums over single tokens, which only the memo holds; the table has none of them, so it need not be another for the
one option that asks. A memo is a cache: should a part be gone (collected, broken, or made by another version of the
scoring), the sequences it lacks are scored again, as the `reference` job would, and nothing else depends on it.

Legend: P pairs, V those asked for. Their 2V responses have places: the chosen ones 0..V-1, then the rejected ones.
"""

import gc
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from training.contract.errors import TrainingError
from training.contract.events import EventWriter
from training.contract.job import Job
from training.contract.logprob_table import LogProbTable
from training.contract.memo import Memo, scoring_rule
from training.contract.recipe import Parallel
from training.contract.scoring import SCORING_VERSION
from training.contract.store import Store
from training.data.tokenized import SIDES, Pairs
from training.distributed import Group
from training.memoized import DistinctSequences, score_missing
from training.parallel.choice import lay_out_weights
from training.parallel.models import FrozenModel

Floats = npt.NDArray[np.float64]


def with_tails(
    table: LogProbTable, pairs: Pairs, positions_V: npt.NDArray[np.int64], job: Job, group: Group, events: EventWriter
) -> LogProbTable:
    """The table with `tails_P2` filled in for the pairs at `positions_V`, NaN elsewhere. Raises TrainingError."""
    weights = job.inputs["reference_model"]
    memo = Memo(Store(job.store), scoring_rule(weights.fingerprint, table.dtype, SCORING_VERSION), events.note)
    search = _Search(memo, table, pairs, positions_V, group)
    tails_2V = search.read()
    if len(missing := np.flatnonzero(np.isnan(tails_2V))):
        search.score(missing, FrozenModel(weights, table.dtype), job.compute.parallel, events)
        tails_2V = search.read()
    if not np.isfinite(tails_2V).all():
        raise TrainingError(
            f"{int(np.isnan(tails_2V).sum())} of {len(tails_2V)} responses have no log-probs of single tokens after "
            f"scoring, which `training.loss.ld_alpha` needs; the store lost shards meanwhile: run again"
        )
    tails_P2 = np.full((len(pairs), len(SIDES)), np.nan)
    tails_P2[positions_V] = np.stack(np.split(tails_2V, 2), axis=1)
    return replace(table, tails_P2=tails_P2)


@dataclass(frozen=True)
class _Search:
    memo: Memo
    table: LogProbTable
    pairs: Pairs
    positions_V: npt.NDArray[np.int64]
    group: Group

    def read(self) -> Floats:
        """What the memo knows, the same on every rank: rank 0 alone reads (and, where broken, moves) the shards."""
        tails_2V = torch.zeros(2 * len(self.positions_V), dtype=torch.float64)
        if self.group.is_main:
            keys_2VK = np.concatenate([self.pairs.keys(side)[self.positions_V] for side in SIDES])
            common_V = self.table.tokens_P2[self.positions_V].min(axis=1).astype(np.int64)
            tails_2V = torch.from_numpy(self.memo.tail_sums(keys_2VK, np.tile(common_V, 2)))
        self.group.barrier()  # patient: a large memo takes longer to open than ranks otherwise wait for each other
        found: Floats = self.group.broadcast_(tails_2V.to(self.group.device)).cpu().numpy()
        return found

    def score(
        self, missing: npt.NDArray[np.int64], frozen: FrozenModel, parallel: Parallel, events: EventWriter
    ) -> None:
        """Score the sequences in these of the 2V places with the reference model, which is not kept."""
        side, at = np.divmod(missing, len(self.positions_V))
        sequences = DistinctSequences.of(self.pairs)
        wanted = np.unique(sequences.places_2P[side * len(self.pairs) + self.positions_V[at]])
        events.note(f"the memo no longer knows the tokens of {len(wanted):,} sequences: scoring them again")
        model = lay_out_weights(frozen, parallel, self.group, events).place(frozen.load)
        score_missing(model, sequences, wanted, self.memo, self.group, events)
        del model
        gc.collect()  # its parts refer to each other, and the next model wants the memory

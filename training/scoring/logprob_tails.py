"""Tails: the reference log-probs of the tokens after the common length of a pair's responses, for losses with `ld_alpha`.

The table has sums over all tokens only, because no other option needs more. Single tokens are in the log-prob cache. Sequences
that the cache lacks (removed, corrupt, or scored by another version) are scored again.

Legend: P pairs, V selected pairs, M missing sequences, K bytes of a key. The 2V responses have places: the chosen ones
0..V-1, then the rejected ones.
"""

import gc
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from training.contract.config.loss import Loss
from training.contract.config.recipe import Parallel
from training.contract.errors import TrainingError
from training.contract.protocol.artifacts import AssetName
from training.contract.protocol.events import EventWriter
from training.contract.store.logprob_cache import LogprobCache, scoring_rule
from training.contract.store.logprob_table import LogProbTable
from training.contract.store.store import Store
from training.data.tokenization.pair_dataset import SIDES, Pairs, by_pair
from training.distributed import Group
from training.job_context import JobContext
from training.parallel.model_specs import InferenceModelSpec
from training.parallel.strategy import load_frozen
from training.scoring.cached_sequences import DistinctSequences, score_missing

Floats = npt.NDArray[np.float64]


def read_table(context: JobContext, pairs: Pairs, positions_V: npt.NDArray[np.int64], loss: Loss) -> LogProbTable:
    """Return the job's table of reference log-probs.

    If `loss` needs tails, the table has `tails_P2` for the pairs at `positions_V`, and NaN for the others. Raises
    TrainingError.
    """
    job, group, events = context.job, context.group, context.events
    table = LogProbTable.read(job.inputs[AssetName.REFERENCE_LOGPROBS].folder, len(pairs))
    if not loss.needs_token_logprobs:
        return table
    weights = job.inputs[AssetName.REFERENCE_MODEL]
    cache = LogprobCache(Store(job.store), scoring_rule(weights.fingerprint, table.dtype), events.note)
    tails = _Tails(cache, table, pairs, positions_V, group)
    tails_2V = tails.read()
    if len(missing := np.flatnonzero(np.isnan(tails_2V))):
        tails.score(missing, InferenceModelSpec(weights, table.dtype), job.compute.parallel, events)
        tails_2V = tails.read()
    if not np.isfinite(tails_2V).all():
        raise TrainingError(
            f"{int(np.isnan(tails_2V).sum())} of {len(tails_2V)} responses have no log-probs of single tokens after "
            "scoring, and `training.loss.ld_alpha` needs them; the store lost cache shards during the job: run again",
            "cache-shards-lost",
        )
    tails_P2 = np.full((len(pairs), len(SIDES)), np.nan)
    tails_P2[positions_V] = by_pair(tails_2V)
    return replace(table, tails_P2=tails_P2)


@dataclass(frozen=True)
class _Tails:
    """The tails of the 2V responses at `positions_V`, in the log-prob cache."""

    cache: LogprobCache
    table: LogProbTable
    pairs: Pairs
    positions_V: npt.NDArray[np.int64]
    group: Group

    def read(self) -> Floats:
        """Return the cached tails, the same on every rank. Only rank 0 reads the shards and sets corrupt ones aside."""
        tails_2V = torch.zeros(2 * len(self.positions_V), dtype=torch.float64)
        if self.group.is_main:
            keys_2VK = np.concatenate([self.pairs.keys(side)[self.positions_V] for side in SIDES])
            common_V = self.table.tokens_P2[self.positions_V].min(axis=1).astype(np.int64)
            tails_2V = torch.from_numpy(self.cache.tail_sums(keys_2VK, np.tile(common_V, 2)))
        result: Floats = self.group.broadcast_(tails_2V.to(self.group.device)).cpu().numpy()
        return result

    def score(
        self, missing: npt.NDArray[np.int64], frozen: InferenceModelSpec, parallel: Parallel, events: EventWriter
    ) -> None:
        """Score the sequences at the `missing` of the 2V places into the cache. Free the reference model afterwards."""
        side, index_V = np.divmod(missing, len(self.positions_V))
        sequences = DistinctSequences.of(self.pairs)
        missing_M = np.unique(sequences.sequence_2P[side * len(self.pairs) + self.positions_V[index_V]])
        events.note(f"the log-prob cache lacks the tokens of {len(missing_M):,} sequences: scoring them again")
        model = load_frozen(frozen, parallel, self.group, events)
        score_missing(model, sequences, missing_M, self.cache, self.group, events)
        del model
        gc.collect()  # the model is in reference cycles, and the next one needs the memory

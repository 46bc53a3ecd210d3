"""Score a sample of the log-probs of other software or another device again, before they are reused.

The sample has `COMPARED` sequences, evenly spread over the lengths. Each may differ by the tolerance of reference_check.py, and
the root mean square over the sample by half of that. If the sample differs by more, all log-probs of other software under this
rule are set aside and scored again.

Legend: S sequences, M sequences of the sample.
"""

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from training.contract.identity.software import COMPARED
from training.contract.protocol.events import EventWriter
from training.contract.store.logprob_cache import LogprobCache
from training.distributed import Group
from training.model.logprobs.batch_scoring import score_in_rounds, shared_batches
from training.scoring.cached_sequences import DistinctSequences
from training.scoring.reference_check import RMS_SHARE, ROUNDING_NATS

Positions = npt.NDArray[np.int64]


def sample_to_rescore(cache: LogprobCache, sequences: DistinctSequences, group: Group) -> Positions:
    """Return the sequences to score again, the same on every rank. Empty if this software scored all cached ones."""
    by_other_S = torch.zeros(len(sequences), dtype=torch.uint8)
    if group.is_main:
        by_other_S = torch.from_numpy(cache.computed_by_other_software(sequences.keys_SK).astype(np.uint8))
    candidates = np.flatnonzero(group.broadcast_(by_other_S.to(group.device)).cpu().numpy())
    by_length = candidates[np.argsort(sequences.lengths_S[candidates], kind="stable")]
    indices = np.linspace(0, len(by_length) - 1, min(COMPARED, len(by_length))).round().astype(np.int64)
    return by_length[indices]


def confirm_others(
    model: PreTrainedModel,
    sequences: DistinctSequences,
    sample_M: Positions,
    cache: LogprobCache,
    dtype: str,
    group: Group,
    events: EventWriter,
) -> bool:
    """Return whether `model` gives the sample its stored log-probs. If not, set aside all log-probs of other software."""
    live_M = _score(model, sequences, sample_M, group)
    stored = cache.lookup(sequences.keys_SK[sample_M])
    excess_M = np.abs(live_M - stored.sums_Q) / (ROUNDING_NATS[dtype] * np.sqrt(np.maximum(stored.counts_Q, 1)))
    excess_M = np.nan_to_num(excess_M, nan=np.inf)
    if excess_M.max() <= 1 and np.sqrt(np.square(excess_M).mean()) <= RMS_SHARE:
        events.note(
            f"{len(sample_M):,} sequences that other library versions or another device scored have the same log-probs "
            "now, up to rounding: all log-probs of that origin are reused"
        )
        return True
    worst = int(excess_M.argmax())
    reason = (
        f"these library versions or this device give other log-probs than those it was made with: "
        f"{sequences.name(int(sample_M[worst]))} has {live_M[worst]:.4f} nats now and {stored.sums_Q[worst]:.4f} there"
    )
    if group.is_main:
        cache.set_aside_computed_by_other_software(reason)
    group.barrier()
    return False


def _score(
    model: PreTrainedModel, sequences: DistinctSequences, sample_M: Positions, group: Group
) -> npt.NDArray[np.float64]:
    """Return the log-probs of the sample, in its order, on every rank."""
    batches = shared_batches(sequences.lengths_S[sample_M], sequences.prompts(sample_M))
    rows = [torch.zeros(0, 2, dtype=torch.float64)]
    for scored in score_in_rounds(model, batches, lambda index: sequences.read(int(sample_M[index])), group):
        if scored.own is not None:
            batch, scores = scored.own
            sums = scores.sums_S.double().cpu()
            rows.append(torch.stack([torch.from_numpy(batch.positions).double(), sums], dim=1))
    all_rows = group.gather_rows(torch.cat(rows).to(group.device)).cpu().numpy()
    live_M = np.full(len(sample_M), np.nan)
    live_M[all_rows[:, 0].astype(np.int64)] = all_rows[:, 1]
    return live_M

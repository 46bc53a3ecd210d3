"""What preference tuning minimizes, and what it tells of each pair while it does so.

Legend: I pairs, M quantities (`NAMES`), `values_IM` one a pair and quantity, float64.
"""

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from training.contract.logprob_table import LogProbTable
from training.contract.recipe import Loss
from training.data.batches import SIDES, Pairs
from training.data.packing import Positions, Tokens
from training.losses import PairLogProbs, preference_loss
from training.model.logprobs import response_logprobs

NAMES = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)


class PreferenceObjective:
    """The mean loss over pairs; the reference's log-probs always come from the table, never from a second model."""

    names: tuple[str, ...] = NAMES

    def __init__(self, pairs: Pairs, reference: LogProbTable, loss: Loss, device: torch.device) -> None:
        self._pairs, self._loss = pairs, loss
        self._rows = pairs.rows
        self._reference_P2 = torch.from_numpy(
            np.stack([reference.chosen_logprobs, reference.rejected_logprobs], axis=1)
        ).to(device)

    def count(self, items: Positions) -> int:
        return len(items)

    def rows(self, items: Positions) -> Positions:
        return np.asarray(self._rows[items])

    def values_IM(self, model: PreTrainedModel, items: Positions) -> Tensor:
        sequences = [self._pairs.sequence(int(item), side) for item in items for side in SIDES]
        policy_I2 = response_logprobs(model, sequences, [len(SIDES)] * len(items)).sums_S.view(-1, 2)
        reference_I2 = self._reference_P2[torch.from_numpy(items).to(self._reference_P2.device)]
        of_pairs = preference_loss(self._loss, PairLogProbs(*policy_I2.unbind(1), *reference_I2.unbind(1)))
        columns = [
            of_pairs.losses_B,
            of_pairs.rewards_chosen_B,
            of_pairs.rewards_rejected_B,
            of_pairs.margins_B,
            of_pairs.accuracies_B,
            *policy_I2.detach().unbind(1),
        ]
        return torch.stack(columns, dim=1)


def pair_tokens(pairs: Pairs) -> Tokens:
    """Tokens of every pair: of both sequences, and what is run of them, the prompt once."""
    sequences_I = pairs.lengths("chosen").astype(np.int64) + pairs.lengths("rejected")
    return Tokens(sequences_I, sequences_I - pairs.prompt_lengths)

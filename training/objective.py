"""What preference tuning minimizes, and what it tells of each pair while it does so.

Legend: I items (pairs) of a micro-batch, B of the global batch; a last 2 stands for (chosen, rejected). M quantities,
`values_IM` one a pair and quantity, float64.

The reference's log-probs always come from the table, never from a second model. Before a batch is run, `prepare` finds what
its pairs say to each other. Most losses want nothing that the policy has to be asked for. For one that couples pairs
every rank first scores its part without gradients, and one exchange tells all ranks all of it: the price of a forward pass,
for a loss that depends on neither micro-batches nor ranks.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from training.contract.logprob_table import LogProbTable
from training.contract.loss import Loss
from training.data.batches import SIDES, Pairs
from training.data.packing import MicroBatch, Positions, Tokens
from training.distributed import Group
from training.losses.batchwise import RunningMean, among
from training.losses.evidence import Evidence, PairLogProbs, Peers
from training.losses.preference import part_names, preference_loss
from training.model.logprobs import LaidOut, lay_out_for, logprobs_of

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
    """The mean loss over pairs. `names`: those of the quantities, of a mixture's terms too."""

    def __init__(self, pairs: Pairs, reference: LogProbTable, loss: Loss, group: Group) -> None:
        self.names = NAMES + tuple(f"losses/{name}" for name in part_names(loss))
        self._pairs, self._loss, self._group, self._rows = pairs, loss, group, pairs.rows
        self._chosen_tokens_P = reference.chosen_tokens
        self._reference_P2 = torch.from_numpy(reference.logprobs_P2).to(group.device)
        self._tokens_P2 = torch.from_numpy(reference.tokens_P2).to(group.device)
        tails_P2 = reference.tails_P2
        self._tails_P2 = None if tails_P2 is None else torch.from_numpy(tails_P2).to(group.device)
        self._rewards = RunningMean()
        self._peers, self._batch_B = Peers(mean_chosen_tokens=1.0), np.zeros(0, np.int64)

    def count(self, items: Positions) -> int:
        return len(items)

    def rows(self, items: Positions) -> Positions:
        return np.asarray(self._rows[items])

    def state(self) -> dict[str, Any]:
        """What the next batch's loss depends on beside the weights, as plain JSON."""
        return {"mean_reward": self._rewards.mean, "rewards": self._rewards.count} if self._loss.keeps_state else {}

    def restore(self, state: dict[str, Any]) -> None:
        self._rewards = RunningMean(state.get("mean_reward", 0.0), state.get("rewards", 0))

    def prepare(self, model: PreTrainedModel, batch: Positions, parts: Sequence[MicroBatch]) -> None:
        """Before the passes over a batch, on every rank: `parts` are this rank's micro-batches of it."""
        if self._loss.couples_pairs:
            self._couple(model, parts)
        else:
            self._peers = Peers(mean_chosen_tokens=float(self._chosen_tokens_P[batch].mean()))

    def lay_out(self, model: PreTrainedModel, items: Positions) -> LaidOut:
        sequences = [self._pairs.sequence(int(item), side) for item in items for side in SIDES]
        return lay_out_for(model, sequences, [len(SIDES)] * len(items))

    def values_IM(self, model: PreTrainedModel, items: Positions, laid_out: LaidOut) -> Tensor:
        """The quantities of each item of the batch that `prepare` was given; the first column is differentiable."""
        logprobs = self._logprobs(model, items, laid_out)
        of_pairs = preference_loss(self._loss, logprobs, self._peers_of(items))
        columns = [
            of_pairs.losses_B,
            *of_pairs.rewards_B2.unbind(1),
            of_pairs.margins_B,
            of_pairs.accuracies_B,
            *logprobs.policy_B2.detach().unbind(1),
            *of_pairs.parts.values(),
        ]
        return torch.stack(columns, dim=1)

    def _couple(self, model: PreTrainedModel, parts: Sequence[MicroBatch]) -> None:
        """Score this rank's part, exchange, and find what each pair of the batch meets. Pairs are put in one order."""
        rows = [torch.zeros(0, 5, dtype=torch.float64, device=self._group.device)]
        with torch.no_grad():
            for part in parts:
                found = self._logprobs(model, part.items, self.lay_out(model, part.items))
                tails_I2 = torch.zeros_like(found.policy_B2) if found.policy_tails_B2 is None else found.policy_tails_B2
                if part.counts:
                    rows.append(torch.cat([self._index(part.items)[:, None], found.policy_B2, tails_I2], dim=1))
        rows_B5 = self._group.gather_rows(torch.cat(rows))
        rows_B5 = rows_B5[rows_B5[:, 0].argsort()]
        self._batch_B = rows_B5[:, 0].long().cpu().numpy()
        whole = self._beside_reference(self._batch_B, rows_B5[:, 1:3], rows_B5[:, 3:])
        self._peers = among(Evidence.of(self._loss, whole), self._rewards)

    def _logprobs(self, model: PreTrainedModel, items: Positions, laid_out: LaidOut) -> PairLogProbs:
        """The pairs under the policy as it is now, with all that the loss asks for."""
        weighted = self._loss.weighting is not None
        found = logprobs_of(model, laid_out, collisions=weighted)
        tails_I2 = None
        if self._loss.needs_token_logprobs:
            common_I = self._tokens_P2[self._index(items)].amin(dim=1)
            tails_I2 = found.tails_S(common_I.repeat_interleave(len(SIDES))).view(-1, 2)
        logprobs = self._beside_reference(items, found.sums_S.view(-1, 2), tails_I2)
        return replace(logprobs, weights_B=found.typicality_S.view(-1, 2).prod(dim=1)) if weighted else logprobs

    def _beside_reference(self, items: Positions, policy_I2: Tensor, tails_I2: Tensor | None) -> PairLogProbs:
        at = self._index(items)
        reference_tails_I2 = None if self._tails_P2 is None else self._tails_P2[at]
        return PairLogProbs(policy_I2, self._reference_P2[at], self._tokens_P2[at], tails_I2, reference_tails_I2)

    def _peers_of(self, items: Positions) -> Peers:
        if not self._loss.couples_pairs:
            return self._peers
        return self._peers.take(self._index(np.searchsorted(self._batch_B, items)))

    def _index(self, positions: Positions) -> Tensor:
        return torch.from_numpy(positions).to(self._group.device)


def pair_tokens(pairs: Pairs) -> Tokens:
    """Tokens of every pair: of both sequences, and what is run of them, the prompt once."""
    sequences_I = pairs.lengths("chosen").astype(np.int64) + pairs.lengths("rejected")
    return Tokens(sequences_I, sequences_I - pairs.prompt_lengths)

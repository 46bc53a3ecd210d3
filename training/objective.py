"""What preference tuning minimizes, and what it tells of each pair while it does so.

Legend: I items (pairs) of a micro-batch, B of the global batch; a last 2 stands for (chosen, rejected). M quantities,
`values_IM` one a pair and quantity, float64.

The reference's log-probs always come from the table, never from a second model. Before a batch is run, `prepare` finds what
its pairs say to each other. Most losses want nothing that the policy has to be asked for. For one that couples pairs
every rank first scores its part without gradients, and one exchange tells all ranks all of it: the price of a forward pass,
for a loss that depends on neither micro-batches nor ranks.

What the host knows of a micro-batch goes to the device with its tokens, a row ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from training.contract.logprob_table import LogProbTable
from training.contract.loss import Loss
from training.data.ahead import ahead
from training.data.batches import SIDES, Pairs
from training.data.packing import MicroBatch, Positions, Tokens
from training.distributed import Group
from training.losses.batchwise import RunningMean, among
from training.losses.evidence import Evidence, PairLogProbs, Peers
from training.losses.preference import part_names, preference_loss
from training.model.logprobs import LaidOut, lay_out_for, logprobs_of
from training.model.transfer import send

NAMES = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)


@dataclass(frozen=True)
class PairsReady:
    """Pairs of a micro-batch, on the device: their sequences, what the table says of them, their places in the batch."""

    laid_out: LaidOut
    reference: PairLogProbs
    places_I: Tensor


class PreferenceObjective:
    """The mean loss over pairs. `names`: those of the quantities, of a mixture's terms too."""

    def __init__(self, pairs: Pairs, reference: LogProbTable, loss: Loss, group: Group) -> None:
        self.names = NAMES + tuple(f"losses/{name}" for name in part_names(loss))
        self._pairs, self._loss, self._group, self._rows = pairs, loss, group, pairs.rows
        self._reference_P2, self._tokens_P2 = reference.logprobs_P2, reference.tokens_P2
        self._tails_P2 = reference.tails_P2
        self._rewards = RunningMean()
        self._peers, self._batch_B = Peers(mean_chosen_tokens=1.0), np.zeros(0, np.int64)

    def count(self, items: Positions) -> int:
        return len(items)

    def rows(self, items: Positions) -> Positions:
        return np.asarray(self._rows[items])

    def state(self) -> dict[str, Any]:
        """What the next batch's loss depends on beside the weights, as plain JSON."""
        rewards = self._rewards
        return {"mean_reward": float(rewards.mean), "rewards": int(rewards.count)} if self._loss.keeps_state else {}

    def restore(self, state: dict[str, Any]) -> None:
        self._rewards = RunningMean(state.get("mean_reward", 0.0), state.get("rewards", 0))

    def prepare(self, model: PreTrainedModel, batch: Positions, parts: Sequence[MicroBatch]) -> None:
        """Before the passes over a batch, on every rank: `parts` are this rank's micro-batches of it."""
        self._batch_B = np.sort(batch)
        if self._loss.couples_pairs:
            self._couple(model, parts)
        else:
            self._peers = Peers(mean_chosen_tokens=float(self._tokens_P2[batch, 0].mean()))

    def lay_out(self, model: PreTrainedModel, items: Positions) -> PairsReady:
        sequences = [self._pairs.sequence(int(item), side) for item in items for side in SIDES]
        laid_out = lay_out_for(model, sequences, [len(SIDES)] * len(items))
        return PairsReady(laid_out, self._at_reference(items), self._send(np.searchsorted(self._batch_B, items)))

    def values_IM(self, model: PreTrainedModel, ready: PairsReady) -> Tensor:
        """The quantities of each pair that is ready; the first column is differentiable."""
        logprobs = self._logprobs(model, ready)
        peers = self._peers.take(ready.places_I) if self._loss.couples_pairs else self._peers
        of_pairs = preference_loss(self._loss, logprobs, peers)
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
        """Score this rank's part, tell the others, and find what each pair of the batch meets.

        Each pair is scored by one rank, and all others have zeros in its place: what they sum to is its score.
        """
        policy_B2 = torch.zeros(len(self._batch_B), 2, dtype=torch.float64, device=self._group.device)
        tails_B2 = torch.zeros_like(policy_B2)
        with torch.no_grad():
            for part, ready in ahead(lambda part: self.lay_out(model, part.items), parts):
                found = self._logprobs(model, ready)
                if part.counts:
                    policy_B2[ready.places_I] = found.policy_B2
                if part.counts and found.policy_tails_B2 is not None:
                    tails_B2[ready.places_I] = found.policy_tails_B2
        policy_B2, tails_B2 = self._group.sum_(torch.stack([policy_B2, tails_B2])).unbind()
        whole = replace(self._at_reference(self._batch_B), policy_B2=policy_B2, policy_tails_B2=tails_B2)
        self._peers = among(Evidence.of(self._loss, whole), self._rewards)

    def _logprobs(self, model: PreTrainedModel, ready: PairsReady) -> PairLogProbs:
        """The pairs under the policy as it is now, with all that the loss asks for."""
        weighted, of = self._loss.weighting is not None, ready.reference
        found = logprobs_of(model, ready.laid_out, collisions=weighted)
        tails_I2 = weights_I = None
        if self._loss.needs_token_logprobs:
            common_I2 = of.tokens_B2.amin(dim=1, keepdim=True).expand(-1, len(SIDES))
            tails_I2 = found.tails_S(common_I2.flatten()).view(-1, 2)
        if weighted:
            chosen_I, rejected_I = found.typicality_S.view(-1, len(SIDES)).unbind(1)
            weights_I = chosen_I * rejected_I  # `prod` on a GPU is compiled in the middle of the first step
        return replace(of, policy_B2=found.sums_S.view(-1, 2), policy_tails_B2=tails_I2, weights_B=weights_I)

    def _at_reference(self, items: Positions) -> PairLogProbs:
        """What the table says of the pairs, on the device; the policy has the log-probs of the reference."""
        reference_I2, tokens_I2 = self._send(self._reference_P2[items]), self._send(self._tokens_P2[items])
        tails_I2 = None if self._tails_P2 is None else self._send(self._tails_P2[items])
        return PairLogProbs(reference_I2, reference_I2, tokens_I2, tails_I2, tails_I2)

    def _send(self, values: npt.NDArray[np.generic]) -> Tensor:
        return send(torch.from_numpy(values), self._group.device)


def pair_tokens(pairs: Pairs) -> Tokens:
    """Tokens of every pair: of both sequences, and what is run of them, the prompt once."""
    sequences_I = pairs.lengths("chosen").astype(np.int64) + pairs.lengths("rejected")
    return Tokens(sequences_I, sequences_I - pairs.prompt_lengths)

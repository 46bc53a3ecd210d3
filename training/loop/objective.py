"""What a run minimizes: the interface that the training step uses, and preference tuning behind it.

Legend: I items (pairs) of a micro-batch, B of the global batch; a last 2 stands for (chosen, rejected). M values are reported
of each item, `values_IM` in float64; the first of them is the loss.

The reference's log-probs always come from the table, never from a second model. Most losses look at one pair at a time. One
that couples the pairs of a batch (AOT, BCO) costs a forward pass more: before the micro-batches run, `prepare` scores this
rank's pairs without gradients, one all-reduce gives every rank the log-probs of the whole batch, and what each pair needs
from the others becomes constants (`BatchContext`). So such a loss too depends on neither micro-batches nor ranks. Such a pass
also tells how evenly a mixture of experts spreads the batch's tokens (training/model/expert_routing.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from training.contract.config.loss import Loss
from training.contract.store.logprob_table import LogProbTable
from training.data.tokenization.batch_sampler import MicroBatch, Positions, TokenCounts
from training.data.tokenization.pair_dataset import SIDES, Pairs
from training.distributed import Group
from training.losses.batchwise import RunningMean, batch_context
from training.losses.inputs import BatchContext, LossInputs, PairLogProbs
from training.losses.preference import metric_names, preference_loss
from training.model.device_prefetch import prefetch, to_device
from training.model.expert_routing import ExpertBalance, Routing
from training.model.logprobs.response_logprobs import CollatedRows, LogProbs, collate, logprobs_of

Collated = TypeVar("Collated")


class Objective(ABC, Generic[Collated]):
    """What is minimized is the sum of the items' losses, divided by the batch's `count`.

    An item is a pair of `pairs`, by position; `names` are those of its M values. With a `balance` its loss is added to the
    items' own, and is the last of the values.
    """

    def __init__(self, pairs: Pairs, names: tuple[str, ...], balance: ExpertBalance | None = None) -> None:
        self.names, self.pairs, self._balance = (*names, "aux_loss") if balance else names, pairs, balance

    @abstractmethod
    def count(self, items: Positions) -> int:
        """What the sums over these items are divided by."""

    @abstractmethod
    def collate(self, model: PreTrainedModel, items: Positions) -> Collated:
        """The items of a micro-batch, on the device; called in a thread, ahead of the pass."""

    @abstractmethod
    def score(self, model: PreTrainedModel, collated: Collated) -> LogProbs:
        """What `per_item_values_IM` needs of the model."""

    @abstractmethod
    def per_item_values_IM(self, collated: Collated, found: LogProbs) -> Tensor:
        """The values of each item without the balance; the first column is differentiable."""

    def values_IM(self, model: PreTrainedModel, collated: Collated) -> Tensor:
        """The values of each item; the first column is differentiable."""
        found = self.score(model, collated)
        values_IM = self.per_item_values_IM(collated, found)
        return self._balance.added(values_IM, found.routing) if self._balance else values_IM

    def prepare(self, model: PreTrainedModel, batch: Positions, parts: Sequence[MicroBatch]) -> None:
        """Called on every rank before its micro-batches `parts` of the global `batch` are run; it may run the model."""

    def score_batch_no_grad(
        self, model: PreTrainedModel, parts: Sequence[MicroBatch]
    ) -> Iterator[tuple[Collated, LogProbs]]:
        """Score the micro-batches without gradients; those that do not count are run too, and left out."""
        for part, collated in prefetch(lambda part: self.collate(model, part.items), parts):
            with torch.no_grad():
                found = self.score(model, collated)
            if part.counts:
                yield collated, found

    def state(self) -> dict[str, Any]:
        """What the next batch's loss depends on besides the weights, as plain JSON for a checkpoint."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""


@dataclass(frozen=True)
class CollatedPairs:
    """Pairs of a micro-batch, on the device: their tokens, the table's log-probs of them, their places in the batch."""

    rows: CollatedRows
    reference: PairLogProbs
    places_I: Tensor


class PreferenceObjective(Objective[CollatedPairs]):
    """The mean over pairs of a loss of training/losses."""

    def __init__(
        self,
        pairs: Pairs,
        reference: LogProbTable,
        loss: Loss,
        group: Group,
        balance: ExpertBalance | None = None,
    ) -> None:
        super().__init__(pairs, metric_names(loss), balance)
        self._reference, self._loss, self._group = reference, loss, group
        self._mean_reward = RunningMean()
        self._context, self._batch_B = BatchContext(mean_chosen_tokens=1.0), np.zeros(0, np.int64)

    def count(self, items: Positions) -> int:
        return len(items)

    def prepare(self, model: PreTrainedModel, batch: Positions, parts: Sequence[MicroBatch]) -> None:
        self._batch_B = np.sort(batch)
        self._context = BatchContext(mean_chosen_tokens=float(self._reference.tokens_P2[batch, 0].mean()))
        if self._loss.couples_pairs or self._balance:
            logprobs, routed = self._score_batch(model, parts)
            if self._loss.couples_pairs:
                self._context = batch_context(LossInputs.of(self._loss, logprobs), self._mean_reward)
            if self._balance:
                self._balance.measure(model, routed, self.count(batch))

    def collate(self, model: PreTrainedModel, items: Positions) -> CollatedPairs:
        sequences = [self.pairs.sequence(int(item), side) for item in items for side in SIDES]
        rows = collate(model, sequences, [len(SIDES)] * len(items))
        return CollatedPairs(rows, self._at_reference(items), self._to_device(np.searchsorted(self._batch_B, items)))

    def score(self, model: PreTrainedModel, collated: CollatedPairs) -> LogProbs:
        collisions, routing = self._loss.weighting is not None, self._balance is not None
        return logprobs_of(model, collated.rows, collisions, routing)

    def per_item_values_IM(self, collated: CollatedPairs, found: LogProbs) -> Tensor:
        logprobs = self._of_pairs(collated, found)
        losses = preference_loss(self._loss, logprobs, self._context.take(collated.places_I))
        return torch.stack(list(losses.metrics(logprobs.policy_B2.detach()).values()), dim=1)

    def state(self) -> dict[str, Any]:
        mean = self._mean_reward
        return {"mean_reward": float(mean.mean), "rewards": int(mean.count)} if self._loss.keeps_state else {}

    def restore(self, state: dict[str, Any]) -> None:
        self._mean_reward = RunningMean(state.get("mean_reward", 0.0), state.get("rewards", 0))

    def _score_batch(
        self, model: PreTrainedModel, parts: Sequence[MicroBatch]
    ) -> tuple[PairLogProbs, list[Routing | None]]:
        """The log-probs of the whole batch under the policy, the same on every rank; and the routing of this rank's part.

        Each pair is scored by one rank and is zero on the others, so a sum over the ranks puts the batch together.
        """
        policy_B2 = torch.zeros(len(self._batch_B), 2, dtype=torch.float64, device=self._group.device)
        tails_B2 = torch.zeros_like(policy_B2)
        routed = []
        for collated, found in self.score_batch_no_grad(model, parts):
            logprobs = self._of_pairs(collated, found)
            policy_B2[collated.places_I] = logprobs.policy_B2
            if logprobs.policy_tails_B2 is not None:
                tails_B2[collated.places_I] = logprobs.policy_tails_B2
            routed.append(found.routing)
        policy_B2, tails_B2 = self._group.sum_(torch.stack([policy_B2, tails_B2])).unbind()
        return replace(self._at_reference(self._batch_B), policy_B2=policy_B2, policy_tails_B2=tails_B2), routed

    def _of_pairs(self, collated: CollatedPairs, found: LogProbs) -> PairLogProbs:
        """The pairs under the policy as it is now, with all that the loss asks for."""
        reference = collated.reference
        tails_I2 = weights_I = None
        if self._loss.needs_token_logprobs:
            common_I2 = reference.tokens_B2.amin(dim=1, keepdim=True).expand(-1, len(SIDES))
            tails_I2 = found.tails_S(common_I2.flatten()).view(-1, 2)
        if self._loss.weighting is not None:
            chosen_I, rejected_I = found.typicality_S.view(-1, len(SIDES)).unbind(1)
            weights_I = chosen_I * rejected_I  # `prod` on a GPU is compiled in the middle of the first step
        return replace(reference, policy_B2=found.sums_S.view(-1, 2), policy_tails_B2=tails_I2, weights_B=weights_I)

    def _at_reference(self, items: Positions) -> PairLogProbs:
        """The pairs on the device, as if the policy were the reference."""
        table = self._reference
        reference_I2, tokens_I2 = self._to_device(table.logprobs_P2[items]), self._to_device(table.tokens_P2[items])
        tails_I2 = None if table.tails_P2 is None else self._to_device(table.tails_P2[items])
        return PairLogProbs(reference_I2, reference_I2, tokens_I2, tails_I2, tails_I2)

    def _to_device(self, values: npt.NDArray[np.generic]) -> Tensor:
        return to_device(torch.from_numpy(values), self._group.device)


def pair_tokens(pairs: Pairs) -> TokenCounts:
    """Tokens of every pair: of both sequences, and of both with the prompt once."""
    sequences_I = pairs.lengths("chosen") + pairs.lengths("rejected")
    return TokenCounts(sequences_I, sequences_I - pairs.prompt_lengths)

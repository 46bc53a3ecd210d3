"""Objectives: the interface of the training step, and the objective of preference tuning.

Legend: I items (pairs) of a micro-batch, B of the global batch; a last 2 stands for (chosen, rejected). M values per item,
`values_IM` in float64; the first is the loss.

The reference log-probs come from the table, never from a second model. Most losses use one pair at a time. Losses that couple
the pairs of a batch (AOT, BCO) need one more forward pass. Before the micro-batches run, `prepare` scores this rank's pairs
without gradients, and one all-reduce gives every rank the log-probs of the whole batch. The contribution of the other pairs
becomes a constant (`BatchContext`). So these losses do not depend on micro-batches or ranks either. The same pass measures how
evenly a mixture of experts spreads the batch's tokens (training/model/expert_routing.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

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
    """An objective: the sum of the items' losses, divided by the batch's `count`.

    An item is a position in `pairs`. `names` are the names of its M values. The loss of a `balance` is added to the items'
    losses, and is the last value.
    """

    def __init__(self, pairs: Pairs, names: tuple[str, ...], balance: ExpertBalance | None = None) -> None:
        self.names, self.pairs, self._balance = (*names, "aux_loss") if balance else names, pairs, balance

    @abstractmethod
    def count(self, items: Positions) -> int:
        """Return the divisor of the sums over these items."""

    @abstractmethod
    def collate(self, model: PreTrainedModel, items: Positions) -> Collated:
        """Return the items of a micro-batch, on the device. A thread calls this before the forward pass."""

    @abstractmethod
    def score(self, model: PreTrainedModel, collated: Collated) -> LogProbs:
        """Return the model's log-probs of the items, for `per_item_values_IM`."""

    @abstractmethod
    def per_item_values_IM(self, collated: Collated, logprobs: LogProbs) -> Tensor:
        """Return the values of each item without the balance. The first column is differentiable."""

    def values_IM(self, model: PreTrainedModel, collated: Collated) -> Tensor:
        """Return the values of each item. The first column is differentiable."""
        logprobs = self.score(model, collated)
        values_IM = self.per_item_values_IM(collated, logprobs)
        return self._balance.added(values_IM, logprobs.routing) if self._balance else values_IM

    def prepare(self, model: PreTrainedModel, batch: Positions, parts: Sequence[MicroBatch]) -> None:
        """Prepare the global `batch`, on every rank, before its micro-batches `parts` run. It may run the model."""

    def score_batch_no_grad(
        self, model: PreTrainedModel, parts: Sequence[MicroBatch]
    ) -> Iterator[tuple[Collated, LogProbs]]:
        """Score the micro-batches without gradients. Run padding micro-batches too, but do not yield them."""
        for part, collated in prefetch(lambda part: self.collate(model, part.items), parts):
            with torch.no_grad():
                logprobs = self.score(model, collated)
            if part.counts:
                yield collated, logprobs

    def state(self) -> dict[str, float]:
        """Return the state besides the weights that the next loss depends on, as plain JSON for a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a saved `state`."""


@dataclass(frozen=True)
class CollatedPairs:
    """Pairs of a micro-batch, on the device: tokens, log-probs of the table, places in the global batch."""

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

    def per_item_values_IM(self, collated: CollatedPairs, logprobs: LogProbs) -> Tensor:
        pairs = self._pair_logprobs(collated, logprobs)
        losses = preference_loss(self._loss, pairs, self._context.take(collated.places_I))
        return torch.stack(list(losses.metrics(pairs.policy_B2.detach()).values()), dim=1)

    def state(self) -> dict[str, float]:
        mean = self._mean_reward
        return {"mean_reward": float(mean.mean), "rewards": int(mean.count)} if self._loss.keeps_state else {}

    def restore(self, state: Mapping[str, float]) -> None:
        self._mean_reward = RunningMean(state.get("mean_reward", 0.0), int(state.get("rewards", 0)))

    def _score_batch(
        self, model: PreTrainedModel, parts: Sequence[MicroBatch]
    ) -> tuple[PairLogProbs, list[Routing | None]]:
        """Return the policy's log-probs of the global batch, the same on every rank, and the routing of this rank's part.

        One rank scores each pair; the others hold zeros. So a sum over the ranks gives the whole batch.
        """
        policy_B2 = torch.zeros(len(self._batch_B), 2, dtype=torch.float64, device=self._group.device)
        tails_B2 = torch.zeros_like(policy_B2)
        routed = []
        for collated, logprobs in self.score_batch_no_grad(model, parts):
            pairs = self._pair_logprobs(collated, logprobs)
            policy_B2[collated.places_I] = pairs.policy_B2
            if pairs.policy_tails_B2 is not None:
                tails_B2[collated.places_I] = pairs.policy_tails_B2
            routed.append(logprobs.routing)
        policy_B2, tails_B2 = self._group.sum_(torch.stack([policy_B2, tails_B2])).unbind()
        return replace(self._at_reference(self._batch_B), policy_B2=policy_B2, policy_tails_B2=tails_B2), routed

    def _pair_logprobs(self, collated: CollatedPairs, logprobs: LogProbs) -> PairLogProbs:
        """Return the policy's log-probs by pair, with the tails and weights that the loss needs."""
        reference = collated.reference
        tails_I2 = weights_I = None
        if self._loss.needs_token_logprobs:
            common_I2 = reference.tokens_B2.amin(dim=1, keepdim=True).expand(-1, len(SIDES))
            tails_I2 = logprobs.tails_S(common_I2.flatten()).view(-1, 2)
        if self._loss.weighting is not None:
            chosen_I, rejected_I = logprobs.typicality_S.view(-1, len(SIDES)).unbind(1)
            weights_I = chosen_I * rejected_I  # not `prod`: on a GPU it is compiled in the middle of the first step
        return replace(reference, policy_B2=logprobs.sums_S.view(-1, 2), policy_tails_B2=tails_I2, weights_B=weights_I)

    def _at_reference(self, items: Positions) -> PairLogProbs:
        """Return the table's log-probs on the device, for both the policy and the reference."""
        table = self._reference
        reference_I2, tokens_I2 = self._to_device(table.logprobs_P2[items]), self._to_device(table.tokens_P2[items])
        tails_I2 = None if table.tails_P2 is None else self._to_device(table.tails_P2[items])
        return PairLogProbs(reference_I2, reference_I2, tokens_I2, tails_I2, tails_I2)

    def _to_device(self, values: npt.NDArray[np.generic]) -> Tensor:
        return to_device(torch.from_numpy(values), self._group.device)


def pair_tokens(pairs: Pairs) -> TokenCounts:
    """Return the token counts of every pair: of both sequences, and of both with a shared prompt."""
    sequences_I = pairs.lengths("chosen") + pairs.lengths("rejected")
    return TokenCounts(sequences_I, sequences_I - pairs.prompt_lengths)

"""The loss of a recipe: the sum of its terms for each pair, and the reported rewards.

Legend: B pairs; a last 2 stands for (chosen, rejected).

Rewards are beta times the log-ratio, as in the DPO paper, for all losses with a reference: so losses can be compared. If no
term uses a reference, rewards are beta times the log-prob (CPO), or times the mean log-prob of a token (ORPO, SimPO).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from training.contract.config.loss import Loss, LossTerm, LossType
from training.losses import batchwise, pairwise
from training.losses.batchwise import RunningMean, batch_context
from training.losses.inputs import BatchContext, LossInputs, PairLogProbs, difference

METRICS = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)
LossFunction = Callable[[LossInputs, BatchContext, LossTerm], Tensor]
LOSSES: dict[LossType, LossFunction] = {
    LossType.SIGMOID: pairwise.sigmoid,
    LossType.ROBUST: pairwise.robust,
    LossType.HINGE: pairwise.hinge,
    LossType.IPO: pairwise.ipo,
    LossType.IPO_SUM: pairwise.ipo_sum,
    LossType.DPO_NORM: pairwise.dpo_norm,
    LossType.EXO_PAIR: pairwise.exo_pair,
    LossType.NCA_PAIR: pairwise.nca_pair,
    LossType.BCO_PAIR: batchwise.bco_pair,
    LossType.SPPO_HARD: pairwise.sppo_hard,
    LossType.APO_ZERO: pairwise.apo_zero,
    LossType.APO_DOWN: pairwise.apo_down,
    LossType.AOT: batchwise.aot,
    LossType.AOT_UNPAIRED: batchwise.aot_unpaired,
    LossType.DISCOPOP: pairwise.discopop,
    LossType.CPO: pairwise.cpo,
    LossType.ORPO: pairwise.orpo,
    LossType.SIMPO: pairwise.simpo,
    LossType.SFT: pairwise.sft,
}


@dataclass(frozen=True)
class PairLosses:
    """The loss of each pair and the rewards of its responses; `parts`: unweighted losses of a mixture's terms."""

    losses_B: Tensor
    rewards_B2: Tensor
    parts: dict[str, Tensor]

    @property
    def margins_B(self) -> Tensor:
        return difference(self.rewards_B2)

    @property
    def accuracies_B(self) -> Tensor:
        """Return 1 if the chosen response has the higher reward, else 0, also for a tie."""
        return (self.rewards_B2[:, 0] > self.rewards_B2[:, 1]).to(self.losses_B.dtype)

    def metrics(self, policy_B2: Tensor) -> dict[str, Tensor]:
        """Return the metrics of `metric_names`, in this order, one value per pair; `policy_B2`: the policy's log-probs."""
        columns = (self.losses_B, *self.rewards_B2.unbind(1), self.margins_B, self.accuracies_B, *policy_B2.unbind(1))
        parts = {f"losses/{name}": losses_B for name, losses_B in self.parts.items()}
        return dict(zip(METRICS, columns, strict=True)) | parts


def preference_loss(settings: Loss, logprobs: PairLogProbs, batch: BatchContext | None = None) -> PairLosses:
    """Return the loss and the rewards of each pair. Only the loss has gradients, with respect to the policy's log-probs.

    Without `batch` the pairs are the batch.
    """
    pairs = LossInputs.of(settings, logprobs)
    batch = batch or batch_context(pairs, RunningMean())
    values = {
        term.type: _weight_pairs(LOSSES[term.type](pairs, batch, term), term, logprobs) for term in settings.terms
    }
    total_B = torch.stack([term.weight * values[term.type] for term in settings.terms]).sum(dim=0)
    parts = {str(kind): value_B.detach() for kind, value_B in values.items()} if len(values) > 1 else {}
    return PairLosses(total_B, _rewards(settings, logprobs), parts)


def metric_names(settings: Loss) -> tuple[str, ...]:
    """Return the names in `PairLosses.metrics`: the loss first, the terms of a mixture last."""
    parts = tuple(f"losses/{term.type}" for term in settings.terms) if len(settings.terms) > 1 else ()
    return METRICS + parts


def _weight_pairs(losses_B: Tensor, term: LossTerm, logprobs: PairLogProbs) -> Tensor:
    """Multiply the losses by the pairs' weights, except for terms that compare no responses (sft)."""
    if logprobs.weights_B is None or not term.type.traits.compares_responses:
        return losses_B
    return losses_B * logprobs.weights_B


def _rewards(settings: Loss, logprobs: PairLogProbs) -> Tensor:
    policy_B2 = logprobs.policy_B2.detach()
    if settings.needs_reference:
        return settings.beta * (policy_B2 - logprobs.reference_B2)
    return settings.beta * (policy_B2 / logprobs.tokens_B2 if settings.averages_tokens else policy_B2)

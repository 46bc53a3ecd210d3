"""Losses of a pair among the others of the global batch.

Legend: B pairs of one batch; a last 2 stands for (chosen, rejected).

The batch is the global one, whatever micro-batch, rank or order a pair is in. So the policy first scores the batch without
gradients; what each pair needs from the others becomes constants (`batch_context`); then each pair runs again with
gradients, as in gradient caching (Gao et al. 2021, arXiv 2101.06983). These gradients add up to that of the batch's loss:

    aot            compares a pair with the reference's margin of equal rank, which has no gradient
    aot_unpaired   compares a chosen response with the rejected one of equal rank; each of the two contributes its own
                   part of the gradient when its pair runs
    bco_pair       subtracts a running mean, which by definition has none
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from training.contract.config.loss import LossTerm
from training.losses.inputs import BatchContext, LossInputs, difference
from training.losses.pairwise import smoothed


@dataclass
class RunningMean:
    """The mean of all values so far; after the first update a tensor on their device."""

    mean: float | Tensor = 0.0
    count: int | Tensor = 0

    def update(self, values: Tensor) -> Tensor:
        """The mean after these values too. Those not finite are left out: the step that has them is refused later."""
        finite = values.isfinite()
        more = finite.sum()
        self.count = self.count + more
        mean_of_more = values.masked_fill(~finite, 0).sum() / more.clamp(min=1)
        self.mean = self.mean + (mean_of_more - self.mean) * more / self.count.clamp(min=1)
        return self.mean


def batch_context(pairs: LossInputs, rewards: RunningMean) -> BatchContext:
    """What each pair of the whole batch needs to know of it; `rewards` is updated with the batch's."""
    margins_B, reference_B = difference(pairs.policy_B2.detach()), difference(pairs.reference_B2)
    ratios_B2 = pairs.ratios_B2.detach()
    chosen_B, rejected_B = ratios_B2.unbind(1)
    return BatchContext(
        mean_chosen_tokens=pairs.tokens_B2[:, 0].double().mean(),
        mean_reward=rewards.update(pairs.rewards_B2.detach().flatten()),
        matched_margins_B=_of_equal_rank(margins_B, reference_B),
        matched_ratios_B2=torch.stack(
            [_of_equal_rank(chosen_B, rejected_B), _of_equal_rank(rejected_B, chosen_B)], dim=1
        ),
    )


def aot(pairs: LossInputs, batch: BatchContext, term: LossTerm) -> Tensor:
    """`-log s(beta (m_(k) - m_ref_(k)))`, m the margins `log pi(c) - log pi(r)` of the batch, each sorted, k the rank.

    The policy's distribution of margins is to dominate the reference's, not each margin its own. Melnyk et al. 2024,
    "Distributional Preference Alignment of LLMs via Optimal Transport", arXiv 2406.05882.
    """
    assert batch.matched_margins_B is not None
    return smoothed(pairs.beta * (difference(pairs.policy_B2) - batch.matched_margins_B), term.label_smoothing)


def aot_unpaired(pairs: LossInputs, batch: BatchContext, term: LossTerm) -> Tensor:
    """`-log s(beta (c_(k) - r_(k)))`, c and r the log-ratios of the chosen and rejected responses, each sorted.

    The same paper, for responses that need not belong together. A pair's value is that of its chosen response; its rejected
    one belongs to the value of another pair, and adds its gradient alone.
    """
    assert batch.matched_ratios_B2 is not None
    chosen_B, rejected_B = pairs.ratios_B2.unbind(1)
    matched_rejected_B, matched_chosen_B = batch.matched_ratios_B2.unbind(1)
    value_B = smoothed(pairs.beta * (chosen_B - matched_rejected_B), term.label_smoothing)
    elsewhere_B = smoothed(pairs.beta * (matched_chosen_B - rejected_B), term.label_smoothing)
    return value_B + elsewhere_B - elsewhere_B.detach()


def bco_pair(pairs: LossInputs, batch: BatchContext, term: LossTerm) -> Tensor:
    """`-log s(c-d) - log s(-(r-d))`, d the running mean of all rewards, this batch's included.

    Jung et al. 2024, "Binary Classifier Optimization", arXiv 2404.04656. TRL had this shift until 0.x and has none in 1.16,
    whose value is that of d = 0.
    """
    chosen_B, rejected_B = (pairs.rewards_B2 - batch.mean_reward).unbind(1)
    return -logsigmoid(chosen_B) - logsigmoid(-rejected_B)


def _of_equal_rank(values_B: Tensor, others_B: Tensor) -> Tensor:
    """For each value the one of the others that has the same rank."""
    ranks_B = values_B.argsort(stable=True).argsort(stable=True)
    return others_B.sort().values[ranks_B]

"""Losses that compare a pair with other pairs of the global batch.

Legend: B pairs of one batch; a last 2 stands for (chosen, rejected).

The losses use the global batch, independent of micro-batches, ranks and order. So the policy first scores the batch without
gradients. The values that a pair needs from other pairs become constants (`batch_context`). Then each pair runs again with
gradients, as in gradient caching (Gao et al. 2021, arXiv 2101.06983). These gradients sum to the gradient of the batch's loss:

    aot            compares a pair with the reference's margin of equal rank, a constant
    aot_unpaired   compares a chosen response with the rejected one of equal rank; each contributes its part of the
                   gradient when its pair runs
    bco_pair       subtracts a running mean, a constant by definition
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from training.contract.config.loss import LossTerm
from training.losses.inputs import BatchContext, LossInputs, difference
from training.losses.pairwise import smooth_labels


@dataclass
class RunningMean:
    """The mean of all values so far. After the first update it is a tensor on their device."""

    mean: float | Tensor = 0.0
    count: int | Tensor = 0

    def update(self, values: Tensor) -> Tensor:
        """Add `values` and return the new mean. Skip non-finite values: their step raises an error later."""
        finite = values.isfinite()
        added = finite.sum()
        self.count = self.count + added
        mean_of_added = values.masked_fill(~finite, 0).sum() / added.clamp(min=1)
        self.mean = self.mean + (mean_of_added - self.mean) * added / self.count.clamp(min=1)
        return self.mean


def batch_context(pairs: LossInputs, rewards: RunningMean) -> BatchContext:
    """Return the constants that each pair needs from the batch, and update `rewards` with the batch."""
    margins_B, reference_B = difference(pairs.policy_B2.detach()), difference(pairs.reference_B2)
    ratios_B2 = pairs.ratios_B2.detach()
    chosen_B, rejected_B = ratios_B2.unbind(1)
    return BatchContext(
        mean_chosen_tokens=pairs.tokens_B2[:, 0].double().mean(),
        mean_reward=rewards.update(pairs.rewards_B2.detach().flatten()),
        matched_margins_B=_match_ranks(margins_B, reference_B),
        matched_ratios_B2=torch.stack([_match_ranks(chosen_B, rejected_B), _match_ranks(rejected_B, chosen_B)], dim=1),
    )


def aot(pairs: LossInputs, batch: BatchContext, term: LossTerm) -> Tensor:
    """`-log s(beta (m_(k) - m_ref_(k)))`, m the margins `log pi(c) - log pi(r)` of the batch, each sorted, k the rank.

    The policy's distribution of margins should dominate the reference's distribution. Melnyk et al. 2024, "Distributional
    Preference Alignment of LLMs via Optimal Transport", arXiv 2406.05882.
    """
    assert batch.matched_margins_B is not None
    return smooth_labels(pairs.beta * (difference(pairs.policy_B2) - batch.matched_margins_B), term.label_smoothing)


def aot_unpaired(pairs: LossInputs, batch: BatchContext, term: LossTerm) -> Tensor:
    """`-log s(beta (c_(k) - r_(k)))`, c and r the log-ratios of the chosen and rejected responses, each sorted.

    The same paper, for unpaired responses. A pair's value comes from its chosen response. Its rejected response belongs to
    another pair's value, and adds only its gradient.
    """
    assert batch.matched_ratios_B2 is not None
    chosen_B, rejected_B = pairs.ratios_B2.unbind(1)
    matched_rejected_B, matched_chosen_B = batch.matched_ratios_B2.unbind(1)
    value_B = smooth_labels(pairs.beta * (chosen_B - matched_rejected_B), term.label_smoothing)
    other_value_B = smooth_labels(pairs.beta * (matched_chosen_B - rejected_B), term.label_smoothing)
    return value_B + other_value_B - other_value_B.detach()


def bco_pair(pairs: LossInputs, batch: BatchContext, term: LossTerm) -> Tensor:
    """`-log s(c-d) - log s(-(r-d))`, d the running mean of all rewards, this batch's included.

    Jung et al. 2024, "Binary Classifier Optimization", arXiv 2404.04656. TRL 0.x had this shift; TRL 1.16 uses d = 0.
    """
    chosen_B, rejected_B = (pairs.rewards_B2 - batch.mean_reward).unbind(1)
    return -logsigmoid(chosen_B) - logsigmoid(-rejected_B)


def _match_ranks(values_B: Tensor, candidates_B: Tensor) -> Tensor:
    """Return for each value the candidate of equal rank."""
    ranks_B = values_B.argsort(stable=True).argsort(stable=True)
    return candidates_B.sort().values[ranks_B]

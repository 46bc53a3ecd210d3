"""The inputs of a loss.

Legend: B pairs; a last 2 stands for (chosen, rejected).

    log-probs      log pi(y|x), summed over the response's tokens
    log-ratio      log pi(y|x) - log pi_ref(y|x)
    score          f'(ratio) of the f-divergence that keeps the policy near the reference; the log-ratio itself for the
                   reverse KL of DPO. With rewards r = beta f'(ratio) the normalizer cancels only in a difference of two
                   rewards (Wang et al. 2023, "Beyond Reverse KL", arXiv 2309.16240), so only such losses use scores.

LD-DPO (Liu et al. 2024, "Length Desensitization in Direct Preference Optimization", arXiv 2409.06411) multiplies the *tail* of
the longer response by `alpha`, for policy and reference. The tail is the tokens beyond the length of the shorter response.

`BatchContext` has the constants that a loss needs from the other pairs of the batch.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor
from torch.nn.functional import logsigmoid

from training.contract.config.loss import Divergence, Loss

# e^30 is 1e13: far above any useful gradient, and its square still fits into float32.
_LARGEST_EXPONENT = 30.0


@dataclass(frozen=True)
class PairLogProbs:
    """Summed log-probs in nats of both responses of B pairs under policy and reference, and their token counts.

    `..._tails_B2`: the parts of the sums beyond the common length, for LD-DPO. `weights_B`: constant factors of the pairs'
    losses, for WPO.
    """

    policy_B2: Tensor
    reference_B2: Tensor
    tokens_B2: Tensor
    policy_tails_B2: Tensor | None = None
    reference_tails_B2: Tensor | None = None
    weights_B: Tensor | None = None

    def with_policy_at(self, policy_B2: Tensor) -> "PairLogProbs":
        """Return the same pairs with these policy log-probs, and with the reference's tails as the policy's."""
        return replace(self, policy_B2=policy_B2, policy_tails_B2=self.reference_tails_B2)


@dataclass(frozen=True)
class BatchContext:
    """Constants that B pairs need from the global batch.

    `mean_chosen_tokens` and `mean_reward` are means over the batch. `matched_margins_B` and `matched_ratios_B2` belong to the
    pairs of equal rank (batchwise.py).
    """

    mean_chosen_tokens: float | Tensor
    mean_reward: float | Tensor = 0.0
    matched_margins_B: Tensor | None = None
    matched_ratios_B2: Tensor | None = None

    def take(self, indices_B: Tensor) -> "BatchContext":
        """Return the context of the pairs at these indices of the batch."""
        margins_B, ratios_B2 = self.matched_margins_B, self.matched_ratios_B2
        return replace(
            self,
            matched_margins_B=None if margins_B is None else margins_B[indices_B],
            matched_ratios_B2=None if ratios_B2 is None else ratios_B2[indices_B],
        )


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a loss for B pairs. `policy_B2` and `reference_B2` weight tails by `ld_alpha` if it is set."""

    beta: float
    policy_B2: Tensor
    reference_B2: Tensor
    tokens_B2: Tensor
    whole_chosen_B: Tensor
    divergence: Divergence | None

    @classmethod
    def of(cls, settings: Loss, logprobs: PairLogProbs) -> "LossInputs":
        return cls(
            beta=settings.beta,
            policy_B2=_discount_tails(logprobs.policy_B2, logprobs.policy_tails_B2, settings.ld_alpha),
            reference_B2=_discount_tails(logprobs.reference_B2, logprobs.reference_tails_B2, settings.ld_alpha),
            tokens_B2=logprobs.tokens_B2,
            whole_chosen_B=logprobs.policy_B2[:, 0],
            divergence=settings.divergence,
        )

    @cached_property
    def ratios_B2(self) -> Tensor:
        return self.policy_B2 - self.reference_B2

    @cached_property
    def rewards_B2(self) -> Tensor:
        return self.beta * self.ratios_B2

    @cached_property
    def scores_B2(self) -> Tensor:
        return self.ratios_B2 if self.divergence is None else _scores(self.ratios_B2, self.divergence)

    @cached_property
    def margins_B(self) -> Tensor:
        """Return beta times the difference of both scores: DPO's loss is -log sigmoid of it."""
        return self.beta * difference(self.scores_B2)


def difference(values_B2: Tensor) -> Tensor:
    """Return chosen minus rejected."""
    return values_B2[:, 0] - values_B2[:, 1]


def _discount_tails(sums_B2: Tensor, tails_B2: Tensor | None, alpha: float | None) -> Tensor:
    if alpha is None:
        return sums_B2
    assert tails_B2 is not None, "ld_alpha requires tails"
    return sums_B2 - (1 - alpha) * tails_B2


def _scores(ratios: Tensor, divergence: Divergence) -> Tensor:
    """Return f' of the density ratio, from its logarithm."""
    match divergence.type:
        case "reverse_kl":
            return ratios
        case "forward_kl":
            return 1 - bounded_exp(-ratios)
        case "js":
            return math.log(2) + logsigmoid(ratios)
        case "alpha":
            assert divergence.alpha is not None
            power = divergence.alpha - 1
            return (bounded_exp(power * ratios) - 1) / power


def bounded_exp(exponents: Tensor) -> Tensor:
    """Return exp, continued by its tangent above 30, so that loss and gradient stay finite."""
    capped = exponents.clamp(max=_LARGEST_EXPONENT)
    return capped.exp() * (1 + exponents - capped)

"""What a loss is computed from.

Legend: B pairs; a last 2 stands for (chosen, rejected).

    log-probs      log pi(y|x), summed over the response's tokens
    log-ratio      log pi(y|x) - log pi_ref(y|x)
    score          f'(ratio) of the f-divergence that keeps the policy near the reference; the log-ratio itself for the
                   reverse KL of DPO. With rewards r = beta f'(ratio) the normalizer cancels in a difference of two rewards
                   and nowhere else (Wang et al. 2023, "Beyond Reverse KL", arXiv 2309.16240), hence the losses it is for.

LD-DPO (Liu et al. 2024, "Length Desensitization in Direct Preference Optimization", arXiv 2409.06411) gives the tokens of
the longer response beyond the length of the shorter one, its *tail*, the weight `alpha`, for policy and reference alike.

What a loss needs of the other pairs of the batch is in `BatchContext`, as constants.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor
from torch.nn.functional import logsigmoid

from training.contract.config.loss import Divergence, Loss

# e^30 is 1e13: far beyond any useful gradient, and its square still fits float32.
_LARGEST_EXPONENT = 30.0


@dataclass(frozen=True)
class PairLogProbs:
    """Summed log-probs in nats of both responses of B pairs under policy and reference, and their numbers of tokens.

    `..._tails_B2` are the parts of the sums beyond the common length, for LD-DPO. `weights_B` are constant factors of the
    pairs' losses, for WPO.
    """

    policy_B2: Tensor
    reference_B2: Tensor
    tokens_B2: Tensor
    policy_tails_B2: Tensor | None = None
    reference_tails_B2: Tensor | None = None
    weights_B: Tensor | None = None

    def with_policy_at(self, policy_B2: Tensor) -> "PairLogProbs":
        """The same pairs with these log-probs of the policy, and with the reference's tails."""
        return replace(self, policy_B2=policy_B2, policy_tails_B2=self.reference_tails_B2)


@dataclass(frozen=True)
class BatchContext:
    """What B pairs of the global batch need to know of all of it; without gradients.

    `mean_chosen_tokens` and `mean_reward` are the whole batch's. `matched_margins_B` and `matched_ratios_B2` belong to the
    pair that each pair is compared with (batchwise.py).
    """

    mean_chosen_tokens: float | Tensor
    mean_reward: float | Tensor = 0.0
    matched_margins_B: Tensor | None = None
    matched_ratios_B2: Tensor | None = None

    def take(self, places_B: Tensor) -> "BatchContext":
        """The same for the pairs at these places of the batch alone."""
        margins_B, ratios_B2 = self.matched_margins_B, self.matched_ratios_B2
        return replace(
            self,
            matched_margins_B=None if margins_B is None else margins_B[places_B],
            matched_ratios_B2=None if ratios_B2 is None else ratios_B2[places_B],
        )


@dataclass(frozen=True)
class LossInputs:
    """B pairs as a loss takes them: in `policy_B2` and `reference_B2` tails have the weight `ld_alpha`, if one is set."""

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
        """Beta times the difference of both scores: DPO's loss is -log sigmoid of it."""
        return self.beta * difference(self.scores_B2)


def difference(values_B2: Tensor) -> Tensor:
    """Chosen minus rejected."""
    return values_B2[:, 0] - values_B2[:, 1]


def _discount_tails(sums_B2: Tensor, tails_B2: Tensor | None, alpha: float | None) -> Tensor:
    if alpha is None:
        return sums_B2
    assert tails_B2 is not None, "a loss with ld_alpha needs the sums beyond the common length"
    return sums_B2 - (1 - alpha) * tails_B2


def _scores(ratios: Tensor, divergence: Divergence) -> Tensor:
    """f' of the density ratio, from its logarithm."""
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
    """exp, continued by its tangent above 30, so that loss and gradient stay finite."""
    capped = exponents.clamp(max=_LARGEST_EXPONENT)
    return capped.exp() * (1 + exponents - capped)

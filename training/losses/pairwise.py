"""Losses of a single pair, as functions of its log-probs under policy and reference.

Legend: B pairs; a last 2 stands for (chosen, rejected). In the formulas h is the margin `beta (score_chosen - score_rejected)`,
c and r are the rewards `beta log(pi/pi_ref)` of the chosen and the rejected response, |y| a number of response tokens, s the
logistic function.

If papers and libraries differ in the reduction, the name shows it. `ipo` divides by tokens, as TRL and the authors'
experiments do. `ipo_sum` does not, as in the paper.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from training.contract.config.loss import LossTerm
from training.losses.inputs import BatchContext, LossInputs, bounded_exp, difference

# A mean log-prob closer to 0 is a rounding error: logits are float32, with a spacing of 2^-20 at 8.
_CERTAIN = -(2.0**-20)


def smooth_labels(margins_B: Tensor, smoothing: float) -> Tensor:
    """`-(1-e) log s(h) - e log s(-h)`: the label is swapped with probability e."""
    return -(1 - smoothing) * logsigmoid(margins_B) - smoothing * logsigmoid(-margins_B)


def sigmoid(pairs: LossInputs, batch: BatchContext, term: LossTerm) -> Tensor:
    """`-log s(h)`. DPO, Rafailov et al. 2023, arXiv 2305.18290; with label smoothing cDPO, Mitchell 2023."""
    return smooth_labels(pairs.margins_B, term.label_smoothing)


def robust(pairs: LossInputs, batch: BatchContext, term: LossTerm) -> Tensor:
    """`(-(1-e) log s(h) + e log s(-h)) / (1-2e)`: unbiased if labels are swapped with probability e.

    Chowdhury et al. 2024, "Provably Robust DPO", arXiv 2403.00409.
    """
    e = term.label_smoothing
    return (-(1 - e) * logsigmoid(pairs.margins_B) + e * logsigmoid(-pairs.margins_B)) / (1 - 2 * e)


def hinge(pairs: LossInputs, batch: BatchContext, term: LossTerm) -> Tensor:
    """`max(0, 1-h)`. SLiC-HF, Zhao et al. 2023, arXiv 2305.10425, normalized by the reference as in RSO, arXiv 2309.06657."""
    return torch.relu(1 - pairs.margins_B)


def ipo(pairs: LossInputs, batch: BatchContext, term: LossTerm) -> Tensor:
    """`(score_c/|c| - score_r/|r| - 1/(2 beta))^2`, averaged over tokens. Azar et al. 2023, arXiv 2310.12036; beta is tau."""
    return (difference(pairs.scores_B2 / pairs.tokens_B2) - 1 / (2 * pairs.beta)).square()


def ipo_sum(pairs: LossInputs, batch: BatchContext, term: LossTerm) -> Tensor:
    """`(score_c - score_r - 1/(2 beta))^2`: equation 17 of Azar et al. 2023, without division."""
    return (difference(pairs.scores_B2) - 1 / (2 * pairs.beta)).square()


def dpo_norm(pairs: LossInputs, batch: BatchContext, term: LossTerm) -> Tensor:
    """`-log s(beta (score_c/|c| - score_r/|r|))`: length-normalized DPO of Tulu 3, Lambert et al. 2024, arXiv 2411.15124.

    It is `dpo_norm` of open-instruct and `sigmoid_norm` of TRL; a beta of 5 is usual.
    """
    return -logsigmoid(pairs.beta * difference(pairs.scores_B2 / pairs.tokens_B2))


def exo_pair(pairs: LossInputs, batch: BatchContext, term: LossTerm) -> Tensor:
    """`s(h) log(s(h)/(1-e)) + s(-h) log(s(-h)/e)`: the reverse KL to labels smoothed by e.

    Ji et al. 2024, "Towards Efficient Exact Optimization of Language Model Alignment", arXiv 2402.00856, equation 16.
    """
    log_better_B, log_worse_B = logsigmoid(pairs.margins_B), logsigmoid(-pairs.margins_B)
    smoothing = term.label_smoothing
    better_B = log_better_B.exp() * (log_better_B - math.log1p(-smoothing))
    return better_B + log_worse_B.exp() * (log_worse_B - math.log(smoothing))


def nca_pair(pairs: LossInputs, batch: BatchContext, term: LossTerm) -> Tensor:
    """`-log s(c) - (log s(-c) + log s(-r)) / 2`. Chen et al. 2024, "Noise Contrastive Alignment", arXiv 2402.05369."""
    return -logsigmoid(pairs.rewards_B2[:, 0]) - logsigmoid(-pairs.rewards_B2).sum(dim=1) / 2


def sppo_hard(pairs: LossInputs, batch: BatchContext, term: LossTerm) -> Tensor:
    """`(log-ratio_c - 1/(2 beta))^2 + (log-ratio_r + 1/(2 beta))^2`: self-play with a certain preference.

    Wu et al. 2024, "Self-Play Preference Optimization", arXiv 2405.00675, equation 4.7 with P in {0, 1}; beta is 1/eta.
    """
    target = 1 / (2 * pairs.beta)
    return (pairs.ratios_B2[:, 0] - target).square() + (pairs.ratios_B2[:, 1] + target).square()


def apo_zero(pairs: LossInputs, batch: BatchContext, term: LossTerm) -> Tensor:
    """`1 - s(c) + s(r)`: chosen responses better than the model's own. D'Oosterlinck et al. 2024, arXiv 2408.06266, eq. 7."""
    return 1 - torch.sigmoid(pairs.rewards_B2[:, 0]) + torch.sigmoid(pairs.rewards_B2[:, 1])


def apo_down(pairs: LossInputs, batch: BatchContext, term: LossTerm) -> Tensor:
    """`s(c) + 1 - s(c-r)`: chosen responses worse than the model's own. The same paper, equation 8."""
    return torch.sigmoid(pairs.rewards_B2[:, 0]) + 1 - torch.sigmoid(difference(pairs.rewards_B2))


def discopop(pairs: LossInputs, batch: BatchContext, term: LossTerm) -> Tensor:
    """`(1-m) (-log s(h)) + m exp(-h)` with `m = s(h/tau)`: the log-ratio modulated loss, found by a language model.

    Lu et al. 2024, "Discovering Preference Optimization Algorithms with and for LLMs", arXiv 2406.08414, equation 5.
    """
    modulation_B = torch.sigmoid(pairs.margins_B / term.tau)
    # One exponent for the product: m is 0 when exp(-h) overflows.
    exponents_B = logsigmoid(pairs.margins_B / term.tau) - pairs.margins_B
    return (1 - modulation_B) * -logsigmoid(pairs.margins_B) + bounded_exp(exponents_B)


def cpo(pairs: LossInputs, batch: BatchContext, term: LossTerm) -> Tensor:
    """`-log s(beta (log pi(c) - log pi(r)))`: DPO with a uniform reference.

    Xu et al. 2024, "Contrastive Preference Optimization", arXiv 2401.08417; the paper's loss is a mixture with `sft`.
    """
    return smooth_labels(pairs.beta * difference(pairs.policy_B2), term.label_smoothing)


def orpo(pairs: LossInputs, batch: BatchContext, term: LossTerm) -> Tensor:
    """`-beta log s(log odds(c) - log odds(r))`, odds are p/(1-p) of a token's mean probability `p = pi(y)^(1/|y|)`.

    Hong et al. 2024, "ORPO", arXiv 2403.07691, equation 7; beta is its lambda, and its loss is a mixture with `sft`.
    """
    return -pairs.beta * logsigmoid(difference(_log_odds(pairs.policy_B2 / pairs.tokens_B2)))


def simpo(pairs: LossInputs, batch: BatchContext, term: LossTerm) -> Tensor:
    """`-log s(beta (log pi(c)/|c| - log pi(r)/|r|) - gamma)`, without a reference. Meng et al. 2024, arXiv 2405.14734.

    Gamma is not multiplied by beta, as in the paper and in TRL's `simpo_gamma`; a beta of 2 to 2.5 is usual.
    """
    return -logsigmoid(pairs.beta * difference(pairs.policy_B2 / pairs.tokens_B2) - term.gamma)


def _log_odds(logprobs: Tensor) -> Tensor:
    """Return log(p/(1-p)) of log p. Continue it by its tangent for p near 1, so that value and slope are finite."""
    capped = logprobs.clamp(max=_CERTAIN)
    complement = -torch.expm1(capped)
    return capped - complement.log() + (logprobs - capped) / complement


def sft(pairs: LossInputs, batch: BatchContext, term: LossTerm) -> Tensor:
    """`-log pi(c)` over the mean number of chosen tokens: the batch's mean is the mean over all its chosen tokens.

    This is the term of TRL's "sft", of RPO (Pang et al. 2024, arXiv 2404.19733) and MPO (Wang et al. 2024, arXiv 2411.10442).
    It is reduced as in TRL, but over the global batch instead of one forward pass. RPO itself averages each response.
    """
    return -pairs.whole_chosen_B / batch.mean_chosen_tokens

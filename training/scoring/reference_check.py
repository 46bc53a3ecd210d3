"""The reference check: the model that made the table must still give its log-probs, so a policy equal to it has a known loss.

A policy that starts as the reference, in the dtype of the table, is that model. For other policies the reference model is
loaded for the check alone. The expected loss is the loss at the table's log-probs. For a loss of log-ratios it is a constant,
such as ln 2 for the sigmoid loss. For a loss without a reference (SimPO, the SFT term) it follows from the table. A stale
table, another mask or template, or other weights would otherwise train nonsense without an error. The mean loss alone is not
enough, because errors of opposite sign cancel. So each response is compared as well.

Both log-probs are sums over n tokens with independent rounding errors. So they may differ by `ROUNDING_NATS` * sqrt(n), and the
root mean square over all responses by half of that. Code, numbers and dtype are the same. But compiled code, another GPU or
another batch changes the order of sums, and each later layer amplifies the difference. Measured on real text with
SmolLM2-135M-Instruct in bfloat16: 0.044 nats per token (root mean square; 0.049 compiled), and 0.15 sqrt(n) for the worst of 32
responses. In float32: 8e-6 nats per token. Random weights differ much less.

The tolerance of the loss follows from the loss function. All log-probs are moved to the corners of the allowed box (chosen and
rejected up or down). Each pair may change by twice its largest change there. Losses are monotone or convex in each log-prob,
or smooth over so small a box. So the corners bound the inside, and the factor of two covers the last case.

Three sets of pairs are checked: the first batch, pairs spread over the rest of the train split, and held-out pairs. So errors
in any part of the table are likely to be found, for any order of the data.

Legend: V pairs, I pairs; a last 2 stands for (chosen, rejected).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from training.contract.config.loss import Loss
from training.contract.errors import TrainingError
from training.contract.store.logprob_table import LogProbTable
from training.losses.preference import preference_loss
from training.scoring.pairs import ScoredPairs

# The allowed difference of two passes in a sum of n log-probs, divided by sqrt(n).
ROUNDING_NATS = {"float32": 0.001, "bfloat16": 0.5}
RMS_SHARE = 0.5  # the allowed root mean square over all responses, as a share of the tolerance
_SHOWN = 5
_SLACK = 2.0

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LogprobDeviations:
    """By pair and side: the log-prob scored now (live), the one in the table (stored), and their allowed difference."""

    live_I2: Floats
    stored_I2: Floats
    allowed_I2: Floats

    @property
    def excess_I2(self) -> Floats:
        """Return the differences in units of the allowed ones. NaN counts as infinite."""
        excess_I2: Floats = np.nan_to_num(np.abs(self.live_I2 - self.stored_I2) / self.allowed_I2, nan=np.inf)
        return excess_I2

    @property
    def excess_I(self) -> Floats:
        """Return the excess of the worse side of each pair."""
        worse_I: Floats = self.excess_I2.max(axis=1)
        return worse_I


@dataclass(frozen=True)
class ReferenceCheck:
    """The mean loss at zero margin, its expected value, and the allowed difference."""

    loss: float
    expected: float
    allowed: float


def check_zero_margin(scored: ScoredPairs, reference: LogProbTable, loss: Loss, where: str) -> ReferenceCheck:
    """Check `scored` pairs; the model that made the table must have scored them, in the table's dtype.

    Raises TrainingError with the worst rows if the loss, a response, or the root mean square over all responses is outside
    the tolerance. `where` names the set of pairs.
    """
    difference = deviations(scored, reference)
    check = _loss_at_reference(scored, loss, difference)
    wrong, rms = int((difference.excess_I > 1).sum()), float(np.sqrt(np.square(difference.excess_I2).mean()))
    if abs(check.loss - check.expected) <= check.allowed and not wrong and rms <= RMS_SHARE:
        return check
    raise TrainingError(
        f"the reference model does not give the log-probs of the table, on {where}. The loss is {check.loss:.6f}, expected "
        f"{check.expected:.6f} within {check.allowed:.6f}. {wrong} of {len(difference.excess_I)} pairs differ by more than "
        f"rounding. The root mean square difference is {rms:.2g} of the allowed one, expected at most {RMS_SHARE}. "
        f"The worst:\n{_format_worst(difference, scored.pairs.rows[scored.positions_V])}\n"
        "The reference log-probs were made from other weights, tokens or masks: run `pedigree rescore RECIPE` to set them "
        "aside, then `pedigree run RECIPE` to score them again",
        "reference-check-failed",
    )


def logprob_difference(scored: ScoredPairs) -> float:
    """Return the root mean square difference of a response's log-probs, policy and table, in nats."""
    difference_V2 = scored.logprobs.policy_B2 - scored.logprobs.reference_B2
    return float(difference_V2.square().mean().sqrt())


def _loss_at_reference(scored: ScoredPairs, settings: Loss, difference: LogprobDeviations) -> ReferenceCheck:
    """Return the loss of `scored`, the loss at the table's log-probs, and its tolerance."""
    logprobs, allowed_I2 = scored.logprobs, torch.from_numpy(difference.allowed_I2)

    def losses_I(policy_I2: Tensor) -> Tensor:
        return preference_loss(settings, logprobs.with_policy_at(policy_I2)).losses_B

    expected_I = losses_I(logprobs.reference_B2)
    signs = allowed_I2.new_tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]])
    corners = [losses_I(logprobs.reference_B2 + allowed_I2 * corner) for corner in signs]
    changes_I = torch.stack([(corner_I - expected_I).abs() for corner_I in corners]).amax(dim=0)
    loss, expected = float(scored.outcome.losses_B.mean()), float(expected_I.mean())
    return ReferenceCheck(loss, expected, _SLACK * float(changes_I.mean()))


def evenly_spaced(positions: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Return at most `count` of the positions, evenly spaced, with the first and the last."""
    indices = np.linspace(0, len(positions) - 1, min(count, len(positions))).round().astype(np.int64)
    return positions[indices]


def deviations(scored: ScoredPairs, reference: LogProbTable) -> LogprobDeviations:
    """Compare scores in the dtype of the table with the table's log-probs."""
    logprobs, tokens_I2 = scored.logprobs, reference.tokens_P2[scored.positions_V]
    allowed_I2 = ROUNDING_NATS[reference.dtype] * np.sqrt(np.maximum(tokens_I2, 1))
    return LogprobDeviations(logprobs.policy_B2.numpy(), logprobs.reference_B2.numpy(), allowed_I2)


def _format_worst(difference: LogprobDeviations, rows: npt.NDArray[np.int64]) -> str:
    live_I2, stored_I2, allowed_I2 = difference.live_I2, difference.stored_I2, difference.allowed_I2
    worst = np.argsort(-difference.excess_I, kind="stable")[:_SHOWN]
    return "\n".join(
        f"  row {rows[pair]}: chosen {live_I2[pair, 0]:.4f}, in the table {stored_I2[pair, 0]:.4f}; rejected "
        f"{live_I2[pair, 1]:.4f}, in the table {stored_I2[pair, 1]:.4f} "
        f"(allowed {allowed_I2[pair, 0]:.4f} and {allowed_I2[pair, 1]:.4f})"
        for pair in worst
    )

"""The proof of step 0: before training the policy is the reference, so every margin is zero and the loss is known.

For the sigmoid loss it is ln 2. Whatever breaks this (a stale table, another mask or template, other weights, a wrong
precision) would otherwise train quietly towards nonsense. The mean alone is no proof, since errors of opposite sign
cancel in it to first order; so each response is held against its reference too.

Both log-probs are sums over n response tokens of values with independent rounding errors, so they may differ by
`tolerance * sqrt(n)` nats: 0.001 in float32, 0.05 where policy or reference run in bfloat16. The loss may be off by
beta times the mean over the pairs of what their two responses may be.

Three sets of pairs are held against their reference: the first batch, pairs spread over the rest of the train split, and
the held-out ones. So every part of the table that is used is looked at, whatever the order of the data.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from training.contract.errors import TrainingError
from training.contract.logprob_table import LogProbTable
from training.contract.recipe import Training
from training.held_out import HeldOut
from training.losses import LOSSES

TOLERANCE_NATS = {"float32": 0.001, "bfloat16": 0.05}
_SHOWN = 5

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Deviations:
    """Per pair and side (chosen, rejected): both log-probs in nats, and by how much they may differ."""

    policy_I2: Floats
    reference_I2: Floats
    allowed_I2: Floats

    @property
    def excess_I(self) -> Floats:
        """The worse side of each pair, in units of what is allowed; NaN counts as infinitely bad."""
        excess_I2 = np.abs(self.policy_I2 - self.reference_I2) / self.allowed_I2
        worse_I: Floats = np.nan_to_num(excess_I2, nan=np.inf).max(axis=1)
        return worse_I


def prove_zero_margin(scored: HeldOut, reference: LogProbTable, settings: Training, where: str) -> float:
    """The loss of pairs scored before training. Raises TrainingError that shows the worst rows if it is off."""
    loss = float(scored.outcome.losses_B.mean())
    expected = LOSSES[settings.loss.type].value_at_zero_margin(settings.loss)
    found = deviations(scored, reference, TOLERANCE_NATS[_coarser(settings.precision, reference.dtype)])
    allowed = settings.loss.beta * float(found.allowed_I2.sum(axis=1).mean())
    wrong = int((found.excess_I > 1).sum())
    if abs(loss - expected) <= allowed and not wrong:
        return loss
    raise TrainingError(
        f"before the first step the policy is not the reference, on {where}: the loss is {loss:.6f}, "
        f"expected {expected:.6f} within {allowed:.6f}, and {wrong} of {len(found.excess_I)} pairs differ by more than "
        f"rounding. The worst:\n{_worst(found, scored.pairs.rows[scored.positions_V])}\n"
        f"The reference log-probs were made from other weights, tokens or masks, or in another precision "
        f"(policy {settings.precision}, reference {reference.dtype}): materialize reference_logprobs again"
    )


def spread(positions: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """At most `count` of the positions, evenly spaced, the first and the last among them."""
    at = np.linspace(0, len(positions) - 1, min(count, len(positions))).round().astype(np.int64)
    return positions[at]


def deviations(scored: HeldOut, reference: LogProbTable, nats: float) -> Deviations:
    """Scores made now beside the reference's in the table, each with `nats` times the root of its token count as leeway."""
    at, logprobs = scored.positions_V, scored.logprobs
    policy_I2 = torch.stack([logprobs.policy_chosen_B, logprobs.policy_rejected_B], dim=1).numpy()
    reference_I2 = torch.stack([logprobs.reference_chosen_B, logprobs.reference_rejected_B], dim=1).numpy()
    tokens_I2 = np.stack([reference.chosen_tokens[at], reference.rejected_tokens[at]], axis=1)
    return Deviations(policy_I2, reference_I2, nats * np.sqrt(np.maximum(tokens_I2, 1)))


def _coarser(precision: str, reference: str) -> str:
    return max(precision, reference, key=TOLERANCE_NATS.__getitem__)


def _worst(found: Deviations, rows: npt.NDArray[np.int64]) -> str:
    worst = np.argsort(-found.excess_I, kind="stable")[:_SHOWN]
    return "\n".join(
        f"  row {rows[at]}: chosen policy {found.policy_I2[at, 0]:.4f} reference {found.reference_I2[at, 0]:.4f}, "
        f"rejected policy {found.policy_I2[at, 1]:.4f} reference {found.reference_I2[at, 1]:.4f} "
        f"(allowed {found.allowed_I2[at, 0]:.4f} and {found.allowed_I2[at, 1]:.4f})"
        for at in worst
    )

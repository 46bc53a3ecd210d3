"""The proof of step 0: the model that made the table still gives its log-probs, so a policy that equals it has a known loss.

A policy that starts as the reference, in the dtype of the table, is that model; for any other the reference model is loaded
for the proof alone. The expected loss is that of a policy that has the table's log-probs. For a loss of log-ratios that is a
constant, ln 2 for the sigmoid loss; for one without a reference (SimPO, the SFT term) it follows from the table. Whatever
breaks this (a stale table, another mask or template, other weights) would otherwise train towards nonsense without an
error. The mean alone does not suffice, since errors of opposite sign cancel in it; so each response is compared as well.

Both log-probs are sums over n response tokens of values with independent rounding errors, so they may differ by a number of
nats times sqrt(n) (`ROUNDING_NATS`); the root mean square over all responses, by half of that. The same code ran on the same
numbers in the same dtype, but sums that are taken in another order, by compiled code, another GPU or in a row with others,
round otherwise, and every later layer spreads it. In SmolLM2-135M-Instruct in bfloat16 that moved the log-prob of a token of
real text by 0.044 nats (root mean square; 0.049 compiled) and the worst of 32 responses by 0.15 sqrt(n); in float32 by 8e-6.
Random weights show much less.

The loss itself tells how far off it may be: all log-probs are moved to the corners of what is allowed (chosen and rejected up
or down), and each pair may change by twice its largest change there. Losses are monotone or convex in each log-prob, or
smooth over so small a box: so the corners bound what lies between them, and the factor of two covers the last case.

Three sets of pairs are compared: the first batch, pairs spread over the rest of the train split, and held-out ones. So
errors in any part of the table are likely to be found, whatever the order of the data.
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

# By how much two passes of a model may differ in a sum of n log-probs, divided by the root of n.
ROUNDING_NATS = {"float32": 0.001, "bfloat16": 0.5}
RMS_SHARE = 0.5  # of that, for the root mean square over all responses
_SHOWN = 5
_SLACK = 2.0

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LogprobDeviations:
    """Per pair and side (chosen, rejected): the log-prob scored now and that of the table, and by how much they may differ."""

    live_I2: Floats
    stored_I2: Floats
    allowed_I2: Floats

    @property
    def excess_I2(self) -> Floats:
        """The difference in units of what is allowed; NaN counts as infinite."""
        excess_I2: Floats = np.nan_to_num(np.abs(self.live_I2 - self.stored_I2) / self.allowed_I2, nan=np.inf)
        return excess_I2

    @property
    def excess_I(self) -> Floats:
        """That of the worse side of each pair."""
        worse_I: Floats = self.excess_I2.max(axis=1)
        return worse_I


@dataclass(frozen=True)
class ReferenceCheck:
    """The mean loss at zero margin, what it should be, and by how much it may be off."""

    loss: float
    expected: float
    allowed: float


def check_zero_margin(scored: ScoredPairs, reference: LogProbTable, loss: Loss, where: str) -> ReferenceCheck:
    """Check pairs that were scored by the model that made the table, in the table's dtype.

    Raises TrainingError, with the worst rows, if the loss, a response, or all responses together are off.
    """
    found = deviations(scored, reference)
    proof = _loss_at_reference(scored, loss, found)
    wrong, of_all = int((found.excess_I > 1).sum()), float(np.sqrt(np.square(found.excess_I2).mean()))
    if abs(proof.loss - proof.expected) <= proof.allowed and not wrong and of_all <= RMS_SHARE:
        return proof
    raise TrainingError(
        f"the reference model does not give the log-probs of the table, on {where}: the loss is {proof.loss:.6f}, expected "
        f"{proof.expected:.6f} within {proof.allowed:.6f}, and {wrong} of {len(found.excess_I)} pairs differ by more than "
        f"rounding; a response differs by {of_all:.2g} of what one may differ by (root mean square), expected at most "
        f"{RMS_SHARE}. The worst:\n{_worst(found, scored.pairs.rows[scored.positions_V])}\n"
        f"The reference log-probs were made from other weights, tokens or masks: `pedigree rescore RECIPE` sets them aside, "
        f"and then `pedigree run RECIPE` scores them again"
    )


def logprob_difference(scored: ScoredPairs) -> float:
    """How many nats the two log-probs of a response are apart, policy and table, as the root of the mean square."""
    apart_V2 = scored.logprobs.policy_B2 - scored.logprobs.reference_B2
    return float(apart_V2.square().mean().sqrt())


def _loss_at_reference(scored: ScoredPairs, settings: Loss, found: LogprobDeviations) -> ReferenceCheck:
    """The loss found, the loss at the table's log-probs, and how far that moves when those move as rounding may move them."""
    logprobs, allowed_I2 = scored.logprobs, torch.from_numpy(found.allowed_I2)

    def losses_I(policy_I2: Tensor) -> Tensor:
        return preference_loss(settings, logprobs.with_policy_at(policy_I2)).losses_B

    expected_I = losses_I(logprobs.reference_B2)
    signs = allowed_I2.new_tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]])
    corners = [losses_I(logprobs.reference_B2 + allowed_I2 * corner) for corner in signs]
    changes_I = torch.stack([(corner_I - expected_I).abs() for corner_I in corners]).amax(dim=0)
    loss, expected = float(scored.outcome.losses_B.mean()), float(expected_I.mean())
    return ReferenceCheck(loss, expected, _SLACK * float(changes_I.mean()))


def evenly_spaced(positions: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """At most `count` of the positions, evenly spaced, the first and the last among them."""
    at = np.linspace(0, len(positions) - 1, min(count, len(positions))).round().astype(np.int64)
    return positions[at]


def deviations(scored: ScoredPairs, reference: LogProbTable) -> LogprobDeviations:
    """Scores made now, in the dtype of the table, beside those that it holds."""
    at, logprobs = scored.positions_V, scored.logprobs
    leeway_I2 = ROUNDING_NATS[reference.dtype] * np.sqrt(np.maximum(reference.tokens_P2[at], 1))
    return LogprobDeviations(logprobs.policy_B2.numpy(), logprobs.reference_B2.numpy(), leeway_I2)


def _worst(found: LogprobDeviations, rows: npt.NDArray[np.int64]) -> str:
    worst = np.argsort(-found.excess_I, kind="stable")[:_SHOWN]
    return "\n".join(
        f"  row {rows[at]}: chosen {found.live_I2[at, 0]:.4f}, in the table {found.stored_I2[at, 0]:.4f}; rejected "
        f"{found.live_I2[at, 1]:.4f}, in the table {found.stored_I2[at, 1]:.4f} "
        f"(allowed {found.allowed_I2[at, 0]:.4f} and {found.allowed_I2[at, 1]:.4f})"
        for at in worst
    )

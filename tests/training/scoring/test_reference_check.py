"""The tolerance of the reference check: for every loss, rounding errors pass and greater differences do not."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from training.contract.config.loss import Loss, LossType
from training.contract.errors import TrainingError
from training.contract.store.logprob_table import LogProbTable
from training.data.tokenization.pair_dataset import Pairs
from training.losses.inputs import PairLogProbs
from training.losses.preference import preference_loss
from training.scoring.pairs import ScoredPairs
from training.scoring.reference_check import ReferenceCheck, check_zero_margin, logprob_difference

FILLED: dict[str, dict[str, Any]] = {
    "exo_pair": {"label_smoothing": 0.01},
    "robust": {"label_smoothing": 0.3},
    "mixture": {"of": [{"type": "sppo_hard"}, {"type": "aot"}, {"type": "sft"}]},
}
TYPES = [kind for kind in LossType if kind.traits.compares_responses]
NATS = {"float32": 0.001, "bfloat16": 0.5}


def of(kind: str, **options: Any) -> Loss:
    return Loss.model_validate({"type": kind, "beta": 0.5, **FILLED.get(kind, {}), **options})


def table_of(inputs: Any, dtype: str) -> LogProbTable:
    return replace(LogProbTable.read(inputs.reference, len(inputs.examples)), dtype=dtype)


def moved(inputs: Any, moved_I2: np.ndarray, loss: Loss, moved_tails: float = 0.0) -> ScoredPairs:
    """Return the scored pairs of the tiny inputs, with log-probs and tails moved from the table's values."""
    table = table_of(inputs, "float32")
    tails_I2 = torch.from_numpy(table.logprobs_P2 / 3) if loss.needs_token_logprobs else None
    logprobs = PairLogProbs(
        torch.from_numpy(table.logprobs_P2 + moved_I2),
        torch.from_numpy(table.logprobs_P2),
        torch.from_numpy(table.tokens_P2),
        None if tails_I2 is None else tails_I2 + moved_tails * torch.tensor([1, -1]),
        tails_I2,
    )
    return ScoredPairs(Pairs.open(inputs.pairs), np.arange(len(table)), logprobs, preference_loss(loss, logprobs))


def check_moved(
    inputs: Any, moved_I2: np.ndarray, loss: Loss, dtype: str = "float32", moved_tails: float = 0.0
) -> ReferenceCheck:
    """Check pairs that were `moved`, with a table of `dtype`."""
    return check_zero_margin(moved(inputs, moved_I2, loss, moved_tails), table_of(inputs, dtype), loss, "all pairs")


def tolerance(inputs: Any, precision: str) -> np.ndarray:
    tokens_P2 = LogProbTable.read(inputs.reference, len(inputs.examples)).tokens_P2
    return NATS[precision] * np.sqrt(tokens_P2)


@pytest.mark.parametrize("kind", TYPES)
def test_check_within_rounding_passes(tiny_inputs, kind: str):
    """One response is at a corner of the allowed box. The others are anywhere in half of it, at corners, or in one direction.

    The losses have kinks, squares and bends.
    """
    random = np.random.default_rng(0)
    for draw, precision in itertools.product(range(9), NATS):
        allowed_I2 = tolerance(tiny_inputs, precision)
        shares = random.uniform(-1, 1, allowed_I2.shape)
        if draw % 3 == 1:
            shares = np.sign(shares)
        elif draw % 3 == 2:
            shares = np.broadcast_to(np.sign(shares[:1]), shares.shape)
        shares = 0.49 * shares
        shares[draw, 0] = 0.999
        check = check_moved(tiny_inputs, shares * allowed_I2, of(kind), precision)
        assert abs(check.loss - check.expected) <= check.allowed


@pytest.mark.parametrize("kind", ["sigmoid", "simpo", "aot", "sppo_hard"])
def test_check_beyond_rounding_raises(tiny_inputs, kind: str):
    moved_I2 = np.zeros((len(tiny_inputs.examples), 2))
    for nats in (1.001 * tolerance(tiny_inputs, "float32")[3, 1], np.nan):
        moved_I2[3, 1] = nats
        with pytest.raises(TrainingError, match=r"(?s) 1 of 45 pairs .*row 103:.*\[reference-check-failed\]"):
            check_moved(tiny_inputs, moved_I2, of(kind))


def test_check_with_token_errors_of_a_real_model_passes(tiny_inputs):
    """0.1 nats per token, twice the measured effect of another order of sums (see the module's docstring)."""
    random, tokens_P2 = np.random.default_rng(0), LogProbTable.read(tiny_inputs.reference, 45).tokens_P2
    for _ in range(100):
        moved_I2 = np.vectorize(lambda tokens: np.sum(random.normal(0, 0.1, tokens)))(tokens_P2)
        check_moved(tiny_inputs, moved_I2, of("sigmoid"), "bfloat16")


def test_check_with_half_the_tolerance_in_all_responses_raises(tiny_inputs):
    """Each response is within the tolerance, but the root mean square is not."""
    signs_I2 = np.random.default_rng(0).choice([-1, 1], (len(tiny_inputs.examples), 2))
    moved_I2 = tolerance(tiny_inputs, "bfloat16") * signs_I2
    check_moved(tiny_inputs, 0.49 * moved_I2, of("sigmoid"), "bfloat16")
    with pytest.raises(TrainingError, match=r"(?s) 0 of 45 pairs .* 0\.51 .* 0\.5\..*\[reference-check-failed\]"):
        check_moved(tiny_inputs, 0.51 * moved_I2, of("sigmoid"), "bfloat16")


def test_logprob_difference_is_a_root_mean_square(tiny_inputs):
    moved_I2 = np.random.default_rng(0).normal(size=(len(tiny_inputs.examples), 2))
    difference = logprob_difference(moved(tiny_inputs, moved_I2, of("sigmoid")))
    assert difference == pytest.approx(math.sqrt((moved_I2**2).sum() / moved_I2.size))


def test_check_of_sigmoid_has_the_tolerance_by_hand(tiny_inputs):
    """Both sides move by a, b: a margin of m = beta (a + b). Twice log(1 + e^m) - log 2 is m + m^2 / 4."""
    allowed_I = 0.5 * tolerance(tiny_inputs, "float32").sum(axis=1)
    check = check_moved(tiny_inputs, np.zeros((len(tiny_inputs.examples), 2)), of("sigmoid"))
    assert check.expected == check.loss == pytest.approx(np.log(2), rel=1e-12)
    assert check.allowed == pytest.approx(float((allowed_I + allowed_I**2 / 4).mean()), rel=1e-5)


def test_check_with_ld_alpha_expects_log_2(tiny_inputs):
    unmoved_I2 = np.zeros((len(tiny_inputs.examples), 2))
    assert check_moved(tiny_inputs, unmoved_I2, of("sigmoid", ld_alpha=0.3)).expected == pytest.approx(np.log(2))


def test_check_with_wrong_tails_raises_for_the_loss(tiny_inputs):
    """All sums agree, so only the loss shows the wrong tails."""
    unmoved_I2, loss = np.zeros((len(tiny_inputs.examples), 2)), of("sigmoid", ld_alpha=0.3)
    with pytest.raises(TrainingError, match=r"(?s)expected 0\.693147 .* 0 of 45 pairs .*\[reference-check-failed\]"):
        check_moved(tiny_inputs, unmoved_I2, loss, moved_tails=1.0)


def test_check_of_loss_without_reference_expects_the_loss_of_the_table(tiny_inputs):
    """The oracle is SimPO at the means of the table, independent of the policy."""
    table = LogProbTable.read(tiny_inputs.reference, len(tiny_inputs.examples))
    means_P2 = table.logprobs_P2 / table.tokens_P2
    margins_P = 0.5 * (means_P2[:, 0] - means_P2[:, 1]) - 0.5
    moved_I2 = 0.5 * tolerance(tiny_inputs, "float32")
    check = check_moved(tiny_inputs, moved_I2, of("simpo"))
    assert check.expected == pytest.approx(np.log1p(np.exp(-margins_P)).mean(), rel=1e-12)
    assert Loss(type=LossType.SIMPO).needs_reference is False

"""The bound of step 0: what rounding may do passes for every loss, what more than rounding did does not."""

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


def table_of(world: Any, dtype: str) -> LogProbTable:
    return replace(LogProbTable.read(world.reference, len(world.examples)), dtype=dtype)


def moved(world: Any, moved_I2: np.ndarray, loss: Loss, moved_tails: float = 0.0) -> ScoredPairs:
    """The tiny world's pairs, had they the table's log-probs moved by so much, and their tails."""
    table = table_of(world, "float32")
    tails_I2 = torch.from_numpy(table.logprobs_P2 / 3) if loss.needs_token_logprobs else None
    logprobs = PairLogProbs(
        torch.from_numpy(table.logprobs_P2 + moved_I2),
        torch.from_numpy(table.logprobs_P2),
        torch.from_numpy(table.tokens_P2),
        None if tails_I2 is None else tails_I2 + moved_tails * torch.tensor([1, -1]),
        tails_I2,
    )
    return ScoredPairs(Pairs.open(world.pairs), np.arange(len(table)), logprobs, preference_loss(loss, logprobs))


def prove(
    world: Any, moved_I2: np.ndarray, loss: Loss, dtype: str = "float32", moved_tails: float = 0.0
) -> ReferenceCheck:
    """The proof of pairs that were so `moved`, with a table of `dtype`."""
    return check_zero_margin(moved(world, moved_I2, loss, moved_tails), table_of(world, dtype), loss, "all pairs")


def leeway(world: Any, precision: str) -> np.ndarray:
    tokens_P2 = LogProbTable.read(world.reference, len(world.examples)).tokens_P2
    return NATS[precision] * np.sqrt(tokens_P2)


@pytest.mark.parametrize("kind", TYPES)
def test_whatever_rounding_does_passes(tiny_world, kind: str):
    """One response at a corner of the box, and the others anywhere in half of it, at its corners, or all in one direction.

    For losses with kinks, squares and bends."""
    random = np.random.default_rng(0)
    for draw, precision in itertools.product(range(9), NATS):
        allowed_I2 = leeway(tiny_world, precision)
        shares = random.uniform(-1, 1, allowed_I2.shape)
        if draw % 3 == 1:
            shares = np.sign(shares)
        elif draw % 3 == 2:
            shares = np.broadcast_to(np.sign(shares[:1]), shares.shape)
        shares = 0.49 * shares
        shares[draw, 0] = 0.999
        proof = prove(tiny_world, shares * allowed_I2, of(kind), precision)
        assert abs(proof.loss - proof.expected) <= proof.allowed


@pytest.mark.parametrize("kind", ["sigmoid", "simpo", "aot", "sppo_hard"])
def test_more_than_rounding_does_not(tiny_world, kind: str):
    moved_I2 = np.zeros((len(tiny_world.examples), 2))
    for nats in (1.001 * leeway(tiny_world, "float32")[3, 1], np.nan):
        moved_I2[3, 1] = nats
        with pytest.raises(TrainingError, match=r"1 of 45 pairs differ .*(.|\n)*row 103:"):
            prove(tiny_world, moved_I2, of(kind))


def test_what_each_token_of_a_real_model_is_off_passes(tiny_world):
    """Twice what was measured where sums are taken in another order (see the module): 0.1 nats a token, one by one."""
    random, tokens_P2 = np.random.default_rng(0), LogProbTable.read(tiny_world.reference, 45).tokens_P2
    for _ in range(100):
        moved_I2 = np.vectorize(lambda tokens: np.sum(random.normal(0, 0.1, tokens)))(tokens_P2)
        prove(tiny_world, moved_I2, of("sigmoid"), "bfloat16")


def test_what_no_single_response_shows_is_seen_in_all_of_them(tiny_world):
    moved_I2 = leeway(tiny_world, "bfloat16") * np.random.default_rng(0).choice([-1, 1], (len(tiny_world.examples), 2))
    prove(tiny_world, 0.49 * moved_I2, of("sigmoid"), "bfloat16")
    with pytest.raises(TrainingError, match=r"0 of 45 pairs .* differs by 0.51 of what .* at most 0.5\."):
        prove(tiny_world, 0.51 * moved_I2, of("sigmoid"), "bfloat16")


def test_how_far_two_models_are_apart_is_a_root_mean_square(tiny_world):
    moved_I2 = np.random.default_rng(0).normal(size=(len(tiny_world.examples), 2))
    apart = logprob_difference(moved(tiny_world, moved_I2, of("sigmoid")))
    assert apart == pytest.approx(math.sqrt((moved_I2**2).sum() / moved_I2.size))


def test_the_bound_of_the_sigmoid_by_hand(tiny_world):
    """Both sides off by what is allowed, a margin of beta (a + b): twice log(1 + e^m) - log 2, which is m + m^2 / 4."""
    allowed_I = 0.5 * leeway(tiny_world, "float32").sum(axis=1)
    found = prove(tiny_world, np.zeros((len(tiny_world.examples), 2)), of("sigmoid"))
    assert found.expected == found.loss == pytest.approx(np.log(2), rel=1e-12)
    assert found.allowed == pytest.approx(float((allowed_I + allowed_I**2 / 4).mean()), rel=1e-5)


def test_with_ld_alpha_the_loss_at_the_reference_is_the_same(tiny_world):
    still = np.zeros((len(tiny_world.examples), 2))
    assert prove(tiny_world, still, of("sigmoid", ld_alpha=0.3)).expected == pytest.approx(np.log(2))


def test_tails_of_another_place_show_in_the_loss_alone(tiny_world):
    """All sums agree, so that only what the loss makes of them tells."""
    still, loss = np.zeros((len(tiny_world.examples), 2)), of("sigmoid", ld_alpha=0.3)
    with pytest.raises(TrainingError, match=r"expected 0.693147 .* and 0 of 45 pairs differ"):
        prove(tiny_world, still, loss, moved_tails=1.0)


def test_a_loss_without_a_reference_expects_what_the_table_says(tiny_world):
    """SimPO of the table's own means, whatever the policy says now."""
    table = LogProbTable.read(tiny_world.reference, len(tiny_world.examples))
    means_P2 = table.logprobs_P2 / table.tokens_P2
    margins_P = 0.5 * (means_P2[:, 0] - means_P2[:, 1]) - 0.5
    moved_I2 = 0.5 * leeway(tiny_world, "float32")
    found = prove(tiny_world, moved_I2, of("simpo"))
    assert found.expected == pytest.approx(np.log1p(np.exp(-margins_P)).mean(), rel=1e-12)
    assert Loss(type=LossType.SIMPO).needs_reference is False

"""Values and gradients beside TRL's own: its loss methods run here as they are, on the same log-probs of tokens.

`DPOTrainer._compute_loss` asks a model for log-probs; it is given an object that holds them, so nothing but TRL's
arithmetic is in between, in float64 (in float32 where TRL casts to it). TRL's batch is one forward pass: what it averages
over is here the global batch.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import DPOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

BETA = 0.3


def padded(values_N: Tensor, counts: list[int]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(values_N.split(counts)), batch_first=True)


class Holder(torch.nn.Module):
    """What TRL takes for a model: it was asked before, and tells what it said."""

    is_gradient_checkpointing = False

    def __init__(self, pairs: Any, values_N: Tensor) -> None:
        super().__init__()
        told = {"log_probs": values_N, "log_sum_sq_probs": pairs.collisions_N}
        self.told = {name: padded(tokens_N, pairs.counts_2B) for name, tokens_N in told.items()}

    def forward(self, **_: Any) -> Any:
        unused = torch.zeros(self.told["log_probs"].shape)
        return SimpleNamespace(**self.told, entropy=unused, mean_logits=unused, is_top1=unused.bool())


def trl_loss(pairs: Any, **settings: Any) -> tuple[float, Tensor]:
    """TRL's mean loss, and its gradient by token."""
    policy, reference = (Holder(pairs, values_N) for values_N in (pairs.policy_N, pairs.reference_N))
    mask = padded(torch.ones_like(pairs.reference_N), pairs.counts_2B).bool()
    trainer = SimpleNamespace(
        **{"beta": BETA, "label_smoothing": 0.0, "ld_alpha": None, "use_weighting": False, "loss_types": ["sigmoid"]},
        **{"f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5, "loss_weights": [1.0] * 9},
        model=policy,
        ref_model=reference,
        precompute_ref_logps=False,
        aux_loss_enabled=False,
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=0.05),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    vars(trainer).update(settings)
    trainer.loss_weights = trainer.loss_weights[: len(trainer.loss_types)]
    # A first token that is no completion, since TRL looks at what follows each token.
    whole = torch.cat([torch.zeros(len(mask), 1, dtype=torch.long), mask.long()], dim=1)
    inputs = {"input_ids": torch.ones_like(whole), "attention_mask": torch.ones_like(whole), "completion_mask": whole}
    value = DPOTrainer._compute_loss(trainer, policy, inputs, return_outputs=False)
    (gradient_N,) = torch.autograd.grad(value, pairs.policy_N)
    return value.item(), gradient_N


SMOOTHED = {"label_smoothing": 0.2}
OURS_AND_TRLS = [
    ("hinge", {}, {}),
    ("ipo", {}, {}),
    ("exo_pair", SMOOTHED, SMOOTHED),
    ("nca_pair", {}, {}),
    ("robust", SMOOTHED, SMOOTHED),
    ("sppo_hard", {}, {}),
    ("aot", SMOOTHED, SMOOTHED),
    ("aot_unpaired", SMOOTHED, SMOOTHED),
    ("apo_zero", {}, {}),
    ("apo_down", {}, {}),
    ("discopop", {"tau": 0.05}, {}),
    ("sigmoid", {}, {}),
    ("sigmoid", {"ld_alpha": 0.4}, {"ld_alpha": 0.4}),
    ("aot", {"ld_alpha": 0.4}, {"ld_alpha": 0.4}),
    ("apo_zero", {"ld_alpha": 0.0}, {"ld_alpha": 0.0}),
    ("sigmoid", {"weighting": "wpo"}, {"use_weighting": True}),
    ("nca_pair", {"weighting": "wpo", "ld_alpha": 0.7}, {"use_weighting": True, "ld_alpha": 0.7}),
    ("sigmoid", {"divergence": {"type": "forward_kl"}}, {"f_divergence_type": "forward_kl"}),
    ("ipo", {"divergence": {"type": "js"}}, {"f_divergence_type": "js_divergence"}),
    ("robust", {**SMOOTHED, "divergence": {"type": "js"}}, {**SMOOTHED, "f_divergence_type": "js_divergence"}),
]


@pytest.mark.parametrize(("kind", "ours", "theirs"), OURS_AND_TRLS)
def test_values_and_gradients_are_trls(ragged: Any, kind: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    pairs = ragged()
    value, gradient_N = pairs.value_and_gradient(type=kind, beta=BETA, **ours)
    expected, expected_N = trl_loss(pairs, loss_types=[kind], **theirs)
    assert value == pytest.approx(expected, rel=1e-6, abs=1e-9)  # TRL holds exo_pair's smoothing in float32
    torch.testing.assert_close(gradient_N, expected_N, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("alpha", [0.2, 0.8])
def test_the_alpha_divergence_is_trls(ragged: Any, alpha: float) -> None:
    """TRL computes it in float32 only."""
    pairs = ragged()
    value, gradient_N = pairs.value_and_gradient(beta=BETA, divergence={"type": "alpha", "alpha": alpha})
    narrow = ragged()
    narrow = type(narrow)(
        narrow.counts_2B,
        narrow.policy_N.detach().float().requires_grad_(),
        narrow.reference_N.float(),
        narrow.collisions_N.float(),
    )
    settings = {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": alpha}
    expected, expected_N = trl_loss(narrow, **settings)
    assert value == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(gradient_N.float(), expected_N, rtol=1e-4, atol=1e-6)


# MPO's three terms; TRL's bco_pair has no shift, so another stands in its place.
MPO = [("sigmoid", 0.8), ("nca_pair", 0.2), ("sft", 1.5)]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"type": "dpo_norm"}, {"loss_types": ["sigmoid_norm"]}),
        (
            {"type": "mixture", "of": [{"type": kind, "weight": weight} for kind, weight in MPO]},
            {"loss_types": [kind for kind, _ in MPO], "loss_weights": [weight for _, weight in MPO]},
        ),
        (
            {"type": "mixture", "of": [{"type": "sigmoid"}, {"type": "sft"}], "ld_alpha": 0.3},
            {"loss_types": ["sigmoid", "sft"], "ld_alpha": 0.3},
        ),
    ],
    ids=["dpo_norm", "with an SFT term", "the SFT term counts whole responses under ld_alpha"],
)
def test_norms_and_mixtures_are_trls(ragged: Any, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    pairs = ragged()
    value, gradient_N = pairs.value_and_gradient(beta=BETA, **ours)
    expected, expected_N = trl_loss(pairs, **theirs)
    assert value == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient_N, expected_N)


def test_bco_pair_is_trls_where_the_mean_reward_is_zero(ragged: Any) -> None:
    """Log-ratios of tokens lie evenly around zero, so the rewards of the batch sum to zero."""
    pairs = ragged(pairs=4)
    counts = [5] * 8
    change_N = torch.linspace(-0.4, 0.4, 40, dtype=torch.float64)
    reference_N = torch.full((40,), -2.0, dtype=torch.float64)
    even = type(pairs)(counts, (reference_N + change_N).requires_grad_(), reference_N, reference_N)
    value, gradient_N = even.value_and_gradient(type="bco_pair", beta=BETA)
    expected, expected_N = trl_loss(even, loss_types=["bco_pair"])
    assert value == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient_N, expected_N)


def without_reference(pairs: Any, averaged: bool) -> tuple[Tensor, Tensor]:
    """What TRL's losses without a reference are functions of: log-probs summed or averaged over tokens."""
    sums_2B = torch.stack([part.sum() for part in pairs.policy_N.split(pairs.counts_2B)])
    chosen_B, rejected_B = (sums_2B / torch.tensor(pairs.counts_2B) if averaged else sums_2B).chunk(2)
    return chosen_B, rejected_B


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"type": "simpo", "gamma": 0.7}, {"loss_type": "simpo", "simpo_gamma": 0.7}),
        ({"type": "cpo"}, {"loss_type": "sigmoid"}),
        ({"type": "cpo", **SMOOTHED}, {"loss_type": "sigmoid", **SMOOTHED}),
    ],
    ids=["simpo", "cpo", "smoothed cpo"],
)
def test_losses_without_a_reference_are_those_of_trls_cpo(
    ragged: Any, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    pairs = ragged()
    found = pairs.loss(beta=2.0, **ours)
    trainer = SimpleNamespace(
        **{"beta": 2.0, "alpha": 0.0, "label_smoothing": 0.0} | theirs, accelerator=SimpleNamespace(device="cpu")
    )
    logprobs = without_reference(pairs, averaged=ours["type"] == "simpo")
    losses_B, rewards_chosen_B, rewards_rejected_B = CPOTrainer.cpo_loss(trainer, *logprobs)
    torch.testing.assert_close(found.losses_B, losses_B)
    torch.testing.assert_close(found.rewards_B2, torch.stack([rewards_chosen_B, rewards_rejected_B], dim=1))
    gradients = [torch.autograd.grad(x.mean(), pairs.policy_N)[0] for x in (found.losses_B, losses_B)]
    torch.testing.assert_close(*gradients)


def test_orpo_is_trls(ragged: Any) -> None:
    """`ORPOTrainer.odds_ratio_loss`, in float32, whose sign is turned where it is added up."""
    pairs = ragged()
    found = pairs.loss(type="orpo", beta=BETA)
    trainer = SimpleNamespace(beta=BETA, accelerator=SimpleNamespace(device="cpu"))
    negated_B, *rewards, _, _ = ORPOTrainer.odds_ratio_loss(trainer, *without_reference(pairs, averaged=True))
    torch.testing.assert_close(found.losses_B, -negated_B.double(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.rewards_B2, torch.stack(rewards, dim=1).double(), rtol=1e-6, atol=0)
    gradients = [torch.autograd.grad(x.mean(), pairs.policy_N)[0] for x in (found.losses_B, -negated_B)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)

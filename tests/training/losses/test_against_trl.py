"""Losses and gradients, compared with TRL's loss methods on the same log-probs of tokens.

`DPOTrainer._compute_loss` calls a model. Here the model is an object with fixed log-probs, so only TRL's arithmetic runs, in
float64 (float32 if TRL casts). TRL averages over a forward pass; its batch is our global batch.
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


class FixedLogprobs(torch.nn.Module):
    """A model for TRL that returns fixed log-probs."""

    is_gradient_checkpointing = False

    def __init__(self, pairs: Any, values_N: Tensor) -> None:
        super().__init__()
        values = {"log_probs": values_N, "log_sum_sq_probs": pairs.collisions_N}
        self.outputs = {name: padded(tokens_N, pairs.counts_2B) for name, tokens_N in values.items()}

    def forward(self, **_: Any) -> Any:
        unused = torch.zeros(self.outputs["log_probs"].shape)
        return SimpleNamespace(**self.outputs, entropy=unused, mean_logits=unused, is_top1=unused.bool())


def trl_loss(pairs: Any, **settings: Any) -> tuple[float, Tensor]:
    """Return TRL's mean loss, and its gradient by token."""
    policy, reference = (FixedLogprobs(pairs, values_N) for values_N in (pairs.policy_N, pairs.reference_N))
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
    # Prepend a prompt token: TRL predicts each token from the one before.
    mask = torch.cat([torch.zeros(len(mask), 1, dtype=torch.long), mask.long()], dim=1)
    inputs = {"input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    value = DPOTrainer._compute_loss(trainer, policy, inputs, return_outputs=False)
    (gradient_N,) = torch.autograd.grad(value, pairs.policy_N)
    return value.item(), gradient_N


SMOOTHED = {"label_smoothing": 0.2}
SETTINGS_AND_TRLS = [
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


@pytest.mark.parametrize(("kind", "settings", "trl_settings"), SETTINGS_AND_TRLS)
def test_loss_and_gradient_equal_trl(
    ragged: Any, kind: str, settings: dict[str, Any], trl_settings: dict[str, Any]
) -> None:
    pairs = ragged()
    value, gradient_N = pairs.value_and_gradient(type=kind, beta=BETA, **settings)
    expected, expected_N = trl_loss(pairs, loss_types=[kind], **trl_settings)
    assert value == pytest.approx(expected, rel=1e-6, abs=1e-9)  # TRL holds exo_pair's smoothing in float32
    torch.testing.assert_close(gradient_N, expected_N, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("alpha", [0.2, 0.8])
def test_alpha_divergence_equals_trl(ragged: Any, alpha: float) -> None:
    """TRL computes it only in float32."""
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


# MPO's three terms, with nca_pair instead of bco_pair: TRL's bco_pair lacks the shift.
MPO = [("sigmoid", 0.8), ("nca_pair", 0.2), ("sft", 1.5)]


@pytest.mark.parametrize(
    ("settings", "trl_settings"),
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
    ids=["dpo_norm", "with an SFT term", "the SFT term counts full responses under ld_alpha"],
)
def test_dpo_norm_and_mixtures_equal_trl(ragged: Any, settings: dict[str, Any], trl_settings: dict[str, Any]) -> None:
    pairs = ragged()
    value, gradient_N = pairs.value_and_gradient(beta=BETA, **settings)
    expected, expected_N = trl_loss(pairs, **trl_settings)
    assert value == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient_N, expected_N)


def test_bco_pair_with_zero_mean_reward_equals_trl(ragged: Any) -> None:
    """Log-ratios of tokens are spaced evenly around zero, so the rewards of the batch sum to zero."""
    pairs = ragged(pairs=4)
    counts = [5] * 8
    change_N = torch.linspace(-0.4, 0.4, 40, dtype=torch.float64)
    reference_N = torch.full((40,), -2.0, dtype=torch.float64)
    balanced = type(pairs)(counts, (reference_N + change_N).requires_grad_(), reference_N, reference_N)
    value, gradient_N = balanced.value_and_gradient(type="bco_pair", beta=BETA)
    expected, expected_N = trl_loss(balanced, loss_types=["bco_pair"])
    assert value == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient_N, expected_N)


def response_logprobs(pairs: Any, averaged: bool) -> tuple[Tensor, Tensor]:
    """Return the log-probs of chosen and rejected responses, summed or averaged over tokens."""
    sums_2B = torch.stack([part.sum() for part in pairs.policy_N.split(pairs.counts_2B)])
    chosen_B, rejected_B = (sums_2B / torch.tensor(pairs.counts_2B) if averaged else sums_2B).chunk(2)
    return chosen_B, rejected_B


@pytest.mark.parametrize(
    ("settings", "trl_settings"),
    [
        ({"type": "simpo", "gamma": 0.7}, {"loss_type": "simpo", "simpo_gamma": 0.7}),
        ({"type": "cpo"}, {"loss_type": "sigmoid"}),
        ({"type": "cpo", **SMOOTHED}, {"loss_type": "sigmoid", **SMOOTHED}),
    ],
    ids=["simpo", "cpo", "smoothed cpo"],
)
def test_losses_without_a_reference_equal_trls_cpo(
    ragged: Any, settings: dict[str, Any], trl_settings: dict[str, Any]
) -> None:
    pairs = ragged()
    found = pairs.loss(beta=2.0, **settings)
    defaults = {"beta": 2.0, "alpha": 0.0, "label_smoothing": 0.0}
    trainer = SimpleNamespace(**defaults | trl_settings, accelerator=SimpleNamespace(device="cpu"))
    logprobs = response_logprobs(pairs, averaged=settings["type"] == "simpo")
    losses_B, rewards_chosen_B, rewards_rejected_B = CPOTrainer.cpo_loss(trainer, *logprobs)
    torch.testing.assert_close(found.losses_B, losses_B)
    torch.testing.assert_close(found.rewards_B2, torch.stack([rewards_chosen_B, rewards_rejected_B], dim=1))
    gradients = [torch.autograd.grad(x.mean(), pairs.policy_N)[0] for x in (found.losses_B, losses_B)]
    torch.testing.assert_close(*gradients)


def test_orpo_equals_trl(ragged: Any) -> None:
    """`ORPOTrainer.odds_ratio_loss` computes in float32 and returns the negated loss."""
    pairs = ragged()
    found = pairs.loss(type="orpo", beta=BETA)
    trainer = SimpleNamespace(beta=BETA, accelerator=SimpleNamespace(device="cpu"))
    negated_B, *rewards, _, _ = ORPOTrainer.odds_ratio_loss(trainer, *response_logprobs(pairs, averaged=True))
    torch.testing.assert_close(found.losses_B, -negated_B.double(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.rewards_B2, torch.stack(rewards, dim=1).double(), rtol=1e-6, atol=0)
    gradients = [torch.autograd.grad(x.mean(), pairs.policy_N)[0] for x in (found.losses_B, -negated_B)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)

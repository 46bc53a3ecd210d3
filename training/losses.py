"""Preference losses: what to minimize, given four log-probabilities a pair.

Legend: B pairs.

A response's reward is beta times (policy log-prob - reference log-prob), a pair's margin is the chosen reward minus the
rejected one. DPO (Rafailov et al. 2023) minimizes -log sigmoid(margin). With label smoothing e a label is taken to be
swapped with probability e (conservative DPO, Mitchell 2023): -(1-e) log sigmoid(margin) - e log sigmoid(-margin).

Each loss is a pure function of log-probs that are sums over the response's tokens, never means, and one entry of
`LOSSES` that answers what the rest of the program may ask. At the start of training the policy is the reference, so
every margin is zero and the loss must have `value_at_zero_margin`: that is the proof of step 0.

All is computed in the dtype of the reference, float64: margins are small differences of large sums.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from training.contract.recipe import Loss


@dataclass(frozen=True)
class PairLogProbs:
    """Summed log-probs in nats of both responses of B pairs under the policy and under the reference."""

    policy_chosen_B: Tensor
    policy_rejected_B: Tensor
    reference_chosen_B: Tensor
    reference_rejected_B: Tensor


@dataclass(frozen=True)
class PairLosses:
    """The loss of each pair and the rewards of its responses."""

    losses_B: Tensor
    rewards_chosen_B: Tensor
    rewards_rejected_B: Tensor

    @property
    def margins_B(self) -> Tensor:
        return self.rewards_chosen_B - self.rewards_rejected_B

    @property
    def accuracies_B(self) -> Tensor:
        """1 where the chosen response has the higher reward, 0 elsewhere: a tie is no success."""
        return (self.rewards_chosen_B > self.rewards_rejected_B).to(self.losses_B.dtype)


@dataclass(frozen=True)
class PreferenceLoss:
    """A kind of loss: its value as a function of the rewards, and whether those rewards need a reference model."""

    of_rewards: Callable[[Tensor, Tensor, Loss], Tensor]
    needs_reference: bool

    def value_at_zero_margin(self, settings: Loss) -> float:
        zero = torch.zeros(1, dtype=torch.float64)
        return float(self.of_rewards(zero, zero, settings))


def _sigmoid(chosen_B: Tensor, rejected_B: Tensor, settings: Loss) -> Tensor:
    margins_B, smoothing = chosen_B - rejected_B, settings.label_smoothing
    return -(1 - smoothing) * logsigmoid(margins_B) - smoothing * logsigmoid(-margins_B)


LOSSES = {"sigmoid": PreferenceLoss(_sigmoid, needs_reference=True)}


def preference_loss(settings: Loss, logprobs: PairLogProbs) -> PairLosses:
    """The loss and the rewards of each pair; differentiable in the policy's log-probs.

    Rewards are reported with gradients cut: they are for people.
    """
    chosen_B = settings.beta * (logprobs.policy_chosen_B - logprobs.reference_chosen_B)
    rejected_B = settings.beta * (logprobs.policy_rejected_B - logprobs.reference_rejected_B)
    losses_B = LOSSES[settings.type].of_rewards(chosen_B, rejected_B, settings)
    return PairLosses(losses_B, chosen_B.detach(), rejected_B.detach())

"""Pairs as ragged token log-probs, with their losses and gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from training.contract.config.loss import Loss
from training.losses.inputs import PairLogProbs
from training.losses.preference import PairLosses, preference_loss
from training.model.logprobs.response_logprobs import LogProbs


@dataclass(frozen=True)
class RaggedPairs:
    """2B responses, the chosen ones first; every token has a log-prob under both models and a collision."""

    counts_2B: list[int]
    policy_N: Tensor
    reference_N: Tensor
    collisions_N: Tensor

    def by_pair(self, values_2B: Tensor) -> Tensor:
        return values_2B.view(2, -1).T

    def logprobs(self, settings: Loss) -> PairLogProbs:
        counts_2B = torch.tensor(self.counts_2B)
        tokens_B2 = self.by_pair(counts_2B)
        common_2B = tokens_B2.amin(dim=1).repeat(2)
        policy = LogProbs(self.policy_N, counts_2B, self.collisions_N)
        reference = LogProbs(self.reference_N, counts_2B)
        return PairLogProbs(
            policy_B2=self.by_pair(policy.sums_S),
            reference_B2=self.by_pair(reference.sums_S),
            tokens_B2=tokens_B2,
            policy_tails_B2=self.by_pair(policy.tails_S(common_2B)),
            reference_tails_B2=self.by_pair(reference.tails_S(common_2B)),
            weights_B=self.by_pair(policy.typicality_S).prod(dim=1) if settings.weighting else None,
        )

    def loss(self, **settings: Any) -> PairLosses:
        loss = Loss.model_validate(settings)
        return preference_loss(loss, self.logprobs(loss))

    def value_and_gradient(self, **settings: Any) -> tuple[float, Tensor]:
        """Return the mean loss of the pairs, and its gradient by token."""
        value = self.loss(**settings).losses_B.mean()
        (gradient_N,) = torch.autograd.grad(value, self.policy_N)
        return value.item(), gradient_N


def ragged_pairs(pairs: int = 7, seed: int = 0, spread: float = 0.5) -> RaggedPairs:
    random = np.random.default_rng(seed)
    counts = random.integers(1, 12, size=2 * pairs).tolist()
    reference_N = -random.exponential(1.5, size=sum(counts))
    policy_N = np.minimum(reference_N + spread * random.normal(size=sum(counts)), -1e-3)
    collisions_N = -random.exponential(1.0, size=sum(counts))
    policy, reference, collisions = (torch.from_numpy(values) for values in (policy_N, reference_N, collisions_N))
    return RaggedPairs(counts, policy.requires_grad_(), reference, collisions)


@pytest.fixture
def ragged() -> Callable[..., RaggedPairs]:
    return ragged_pairs

"""Schedules, compared with transformers and numbers by hand; AdamW, compared with the update rule of its paper."""

import math

import pytest
import torch
from torch.nn import Parameter
from transformers import get_scheduler

from training.contract.config.optimizer import AdamW, Schedule
from training.optim.optimizer import build_optimizer, schedule_factor, set_learning_rate, warmup_steps


def test_linear_by_hand():
    """10 steps, warm-up ceil(0.25 * 10) = 3: 1/4, 2/4, 3/4, then from 1 down by 1/7 per step to 1/7."""
    schedule = Schedule(type="linear", warmup_ratio=0.25)
    expected = [0.25, 0.5, 0.75, 1.0, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7]
    assert [schedule_factor(schedule, step, 10) for step in range(1, 11)] == pytest.approx(expected)


def test_cosine_by_hand():
    """4 steps, no warm-up: (1 + cos(pi k / 4)) / 2."""
    schedule = Schedule(type="cosine", warmup_ratio=0.0)
    expected = [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]
    assert [schedule_factor(schedule, step, 4) for step in range(1, 5)] == pytest.approx(expected)


def test_constant_by_hand():
    schedule = Schedule(type="constant", warmup_ratio=0.5)
    assert [schedule_factor(schedule, step, 4) for step in range(1, 5)] == pytest.approx([1 / 3, 2 / 3, 1, 1])


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5])
@pytest.mark.parametrize(
    ("kind", "transformers_name"),
    [("linear", "linear"), ("cosine", "cosine"), ("constant", "constant_with_warmup")],
)
def test_schedule_after_the_warm_up_equals_transformers(kind: str, transformers_name: str, ratio: float):
    steps, schedule = 40, Schedule(type=kind, warmup_ratio=ratio)
    warmup = warmup_steps(schedule, steps)
    optimizer = torch.optim.SGD([Parameter(torch.zeros(1))], lr=1.0)
    oracle = get_scheduler(transformers_name, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
    for step in range(1, steps + 1):
        if step > warmup:
            assert schedule_factor(schedule, step, steps) == pytest.approx(oracle.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        oracle.step()


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 100, 999])
@pytest.mark.parametrize("ratio", [0.0, 0.03, 0.1, 0.99])
def test_schedule_factors_are_above_zero_and_at_most_one(kind: str, steps: int, ratio: float):
    factors = [schedule_factor(Schedule(type=kind, warmup_ratio=ratio), step, steps) for step in range(1, steps + 1)]
    assert all(0 < factor <= 1 for factor in factors)


@pytest.mark.parametrize(("ratio", "steps", "expected"), [(0.1, 100, 10), (0.07, 100, 7), (0.1, 101, 11), (0.0, 5, 0)])
def test_warmup_steps_are_rounded_up_without_float_errors(ratio: float, steps: int, expected: int):
    assert warmup_steps(Schedule(warmup_ratio=ratio), steps) == expected


def test_adamw_by_the_paper():
    """Three steps of Loshchilov and Hutter's algorithm 2 in float64, with decay for the matrix only."""
    settings = AdamW(learning_rate=0.1, betas=(0.8, 0.9), eps=0.03, weight_decay=0.5)
    parameters = {"layer.weight": Parameter(torch.full((1, 1), 2.0)), "norm.weight": Parameter(torch.full((1,), 2.0))}
    optimizer = build_optimizer(settings, parameters, {})
    gradients, factors = [0.3, -0.2, 0.7], [1.0, 0.5, 2.0]
    for gradient, factor in zip(gradients, factors, strict=True):
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, gradient)
        set_learning_rate(optimizer, factor)
        optimizer.step()
    rates = [0.1 * factor for factor in factors]
    assert parameters["layer.weight"].item() == pytest.approx(_adamw(2.0, gradients, rates, decay=0.5), rel=1e-6)
    assert parameters["norm.weight"].item() == pytest.approx(_adamw(2.0, gradients, rates, decay=0.0), rel=1e-6)


def _adamw(weight: float, gradients: list[float], rates: list[float], decay: float) -> float:
    first = second = 0.0
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        first, second = 0.8 * first + 0.2 * gradient, 0.9 * second + 0.1 * gradient**2
        unbiased = first / (1 - 0.8**step), second / (1 - 0.9**step)
        weight -= rate * decay * weight
        weight -= rate * unbiased[0] / (math.sqrt(unbiased[1]) + 0.03)
    return weight


def test_only_matrices_decay_and_not_stacked_biases():
    shapes = {"embed.weight": (4, 2), "proj.weight": (2, 2), "proj.bias": (2,), "norm.weight": (2,), "up_bias": (3, 2)}
    parameters = {name: Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    groups = build_optimizer(AdamW(weight_decay=0.1), parameters, {}).param_groups
    decayed = {name for group in groups if group["weight_decay"] for name in group["param_names"]}
    undecayed = {name for group in groups if not group["weight_decay"] for name in group["param_names"]}
    assert decayed == {"embed.weight", "proj.weight"}
    assert undecayed == {"proj.bias", "norm.weight", "up_bias"}

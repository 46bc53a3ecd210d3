"""Propose steps and a learning rate for a policy, from the number of pairs and the model's size.

The rule is a starting point, for a loss similar to DPO's at a `beta` of about 0.1:

1. A training needs at least `STEPS` steps.
2. The batch size is the largest power of two, from 4 to 64, at which `EPOCHS` epochs have that many steps. The epochs are as
   few as needed, and at most 10, as small data is soon memorized.
3. AdamW's learning rate is 5e-7 for 7 billion parameters. It grows with the inverse square root of their number, is rounded to
   1, 2 or 5 times a power of ten, and ends at 1e-4. A LoRA adapter takes ten times as much.

The rule agrees with these published recipes:

- Zephyr (Tunstall et al. 2023, arXiv 2310.16944), 7B: 5e-7, batch size 32, up to 3 epochs.
- Tulu 3 (Lambert et al. 2024, arXiv 2411.15124): 5e-7 for 8B and 2e-7 for 70B.
- SmolLM2 1.7B (alignment-handbook of Hugging Face, recipes/smollm2/dpo/config.yaml): 1e-6, 3 epochs.
- Zephyr with QLoRA (alignment-handbook, recipes/zephyr-7b-beta/dpo/config_qlora.yaml): 5e-6, ten times Zephyr's rate.

DPO itself (Rafailov et al. 2023, arXiv 2305.18290) used RMSprop at 1e-6 and batch size 64; TRL's default is 1e-6. SmolLM2 360M
and 135M (recipes/smollm2/dpo/config_smol.yaml) were trained at 1e-6 too, for about ten times as many steps as `STEPS`; the rule
gives 2e-6 and 5e-6. Below 100 million parameters the rule is our extrapolation.
"""

import math
from dataclasses import dataclass

from training.contract.config.optimizer import Muon
from training.contract.config.training import Training

STEPS, EPOCHS = 100, 3
_BATCH_SIZES, _MOST_EPOCHS = (4, 64), 10
_RATE, _PARAMETERS, _HIGHEST_RATE = 5e-7, 7e9, 1e-4
_ADAPTER = 10
_SLACK = 2  # of steps, and of steps times rate: advise only below half of the proposal
_DOCS = "docs/guides/choose-a-loss.md#learning-rate-and-steps"


@dataclass(frozen=True)
class SuggestedSettings:
    """Settings of `training`, and the resulting steps. `learning_rate` is None if the model's size is unknown."""

    batch_size: int
    epochs: int
    learning_rate: float | None
    steps: int


def propose(pairs: int, parameters: int | None, adapter: bool = False) -> SuggestedSettings:
    """Propose settings for `pairs` training pairs and a model with `parameters` parameters."""
    low, high = _BATCH_SIZES
    limit = max(low, min(high, pairs * EPOCHS // STEPS))
    batch_size = 1 << (limit.bit_length() - 1)
    steps_per_epoch = max(1, math.ceil(pairs / batch_size))
    epochs = min(_MOST_EPOCHS, math.ceil(STEPS / steps_per_epoch))
    return SuggestedSettings(batch_size, epochs, _learning_rate(parameters, adapter), epochs * steps_per_epoch)


def _learning_rate(parameters: int | None, adapter: bool) -> float | None:
    if not parameters:
        return None
    rate = min(_HIGHEST_RATE, _rounded(_RATE * math.sqrt(_PARAMETERS / parameters)))
    return float(f"{rate * (_ADAPTER if adapter else 1):.0e}")


def _rounded(rate: float) -> float:
    """Return the nearest 1, 2 or 5 times a power of ten, by ratio."""
    exponent = math.floor(math.log10(rate))
    candidates = [float(f"{digit}e{exponent}") for digit in (1, 2, 5, 10)]
    return min(candidates, key=lambda candidate: abs(math.log(candidate / rate)))


def advice(training: Training, pairs: int, parameters: int | None) -> str | None:
    """Return advice on settings if the policy will hardly differ from the reference; None if they suffice."""
    proposed, steps = propose(pairs, parameters, training.adapter is not None), training.steps(pairs)
    changes = _more_steps(training, proposed, steps) if steps * _SLACK < STEPS else []
    model_size = ""
    if _is_slow(training, max(steps, proposed.steps), proposed.learning_rate):
        changes.append(f"training.optimizer.learning_rate: {number(proposed.learning_rate)}")
        model_size = f" of {size(parameters or 0)} parameters"
    if not changes:
        return None
    current = f"{steps:,} {'step' if steps == 1 else 'steps'} at a learning rate of {number(training.optimizer.learning_rate)}"
    return f"{current} hardly change a model{model_size}; for {pairs:,} training pairs, set {_join_changes(changes)} ({_DOCS})"


def general_advice(training: Training, pairs: int) -> str:
    """Return advice if the policy hardly differs although steps and learning rate are as proposed."""
    rate = number(training.optimizer.learning_rate)
    current = f"{training.steps(pairs):,} steps at a learning rate of {rate} were too little"
    return f"{current}; raise training.optimizer.learning_rate, or training.epochs ({_DOCS})"


def _more_steps(training: Training, proposed: SuggestedSettings, steps: int) -> list[str]:
    """Return the fields to set for the proposed steps; nothing if there are enough."""
    if steps >= proposed.steps:
        return []
    if training.max_steps is not None:
        return [f"training.max_steps: {proposed.steps}"]
    sizes = [f"training.batch_size: {proposed.batch_size}"] if proposed.batch_size != training.batch_size else []
    return [*sizes, f"training.epochs: {proposed.epochs} ({proposed.steps:,} steps)"]


def _is_slow(training: Training, steps: int, proposed_rate: float | None) -> bool:
    """Return whether even `steps` move weights less than half as far as the proposed learning rate does in `STEPS`.

    AdamW moves a weight by at most about the learning rate in a step, and so does Muon if it is scaled to match.
    """
    optimizer = training.optimizer
    if proposed_rate is None or (isinstance(optimizer, Muon) and optimizer.adjust_lr == "original"):
        return False
    rate = optimizer.learning_rate
    return rate < proposed_rate and rate * steps * _SLACK < proposed_rate * STEPS


def _join_changes(changes: list[str]) -> str:
    return " and ".join([", ".join(changes[:-1]), changes[-1]] if len(changes) > 1 else changes)


def number(value: float | None) -> str:
    """Return a learning rate in its usual form: 5e-7."""
    digits, exponent = f"{value:e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def size(parameters: int) -> str:
    """Return a number of parameters in millions or billions."""
    return f"{parameters / 1e9:.3g} billion" if parameters >= 1e9 else f"{parameters / 1e6:.3g} million"

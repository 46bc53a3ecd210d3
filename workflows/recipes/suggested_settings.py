"""How many steps a policy should take, and at which learning rate, from the number of pairs and the model's size.

The rule is a place to start from, for a loss of DPO's kind at a `beta` of about 0.1:

1. An update needs a number of steps: at least `STEPS`.
2. The batch size is the largest power of two, from 4 to 64, at which `EPOCHS` epochs have that many steps. The epochs are as
   few as have that many, and at most 10, since small data is soon known by heart.
3. AdamW's learning rate is 5e-7 for 7 billion parameters. It grows with the inverse square root of their number, is rounded to
   1, 2 or 5 times a power of ten, and ends at 1e-4. A LoRA adapter takes ten times as much.

Published recipes that the rule agrees with:

- Zephyr (Tunstall et al. 2023, arXiv 2310.16944), 7B: 5e-7, batch size 32, up to 3 epochs.
- Tulu 3 (Lambert et al. 2024, arXiv 2411.15124): 5e-7 for 8B and 2e-7 for 70B.
- SmolLM2 1.7B (alignment-handbook of Hugging Face, recipes/smollm2/dpo/config.yaml): 1e-6, 3 epochs.
- Zephyr with QLoRA (alignment-handbook, recipes/zephyr-7b-beta/dpo/config_qlora.yaml): 5e-6, ten times Zephyr's own.

DPO itself (Rafailov et al. 2023, arXiv 2305.18290) used RMSprop at 1e-6 and batch size 64; TRL's default is 1e-6. SmolLM2 360M
and 135M (recipes/smollm2/dpo/config_smol.yaml) were trained at 1e-6 too, for about ten times as many steps as `STEPS`: the rule
gives 2e-6 and 5e-6. Below 100 million parameters the rule is our own extrapolation.
"""

import math
from dataclasses import dataclass

from training.contract.config.optimizer import Muon
from training.contract.config.recipe import Training

STEPS, EPOCHS = 100, 3
_BATCH_SIZES, _MOST_EPOCHS = (4, 64), 10
_RATE, _PARAMETERS, _HIGHEST_RATE = 5e-7, 7e9, 1e-4
_ADAPTER = 10
_SLACK = 2  # of steps and of their way: only what has less than half of what is proposed is told
_DOCS = "docs/recipe.md#learning-rate-and-steps"


@dataclass(frozen=True)
class SuggestedSettings:
    """Settings of `training`, and the steps they make. `learning_rate` is None if the model's size is unknown."""

    batch_size: int
    epochs: int
    learning_rate: float | None
    steps: int


def propose(pairs: int, parameters: int | None, adapter: bool = False) -> SuggestedSettings:
    """Propose settings for `pairs` to train on and a model of that many `parameters`."""
    low, high = _BATCH_SIZES
    most = max(low, min(high, pairs * EPOCHS // STEPS))
    batch_size = 1 << (most.bit_length() - 1)
    in_epoch = max(1, math.ceil(pairs / batch_size))
    epochs = min(_MOST_EPOCHS, math.ceil(STEPS / in_epoch))
    return SuggestedSettings(batch_size, epochs, _rate(parameters, adapter), epochs * in_epoch)


def _rate(parameters: int | None, adapter: bool) -> float | None:
    if not parameters:
        return None
    rate = min(_HIGHEST_RATE, _rounded(_RATE * math.sqrt(_PARAMETERS / parameters)))
    return float(f"{rate * (_ADAPTER if adapter else 1):.0e}")


def _rounded(rate: float) -> float:
    """The nearest 1, 2 or 5 times a power of ten, by ratio."""
    exponent = math.floor(math.log10(rate))
    candidates = [float(f"{digit}e{exponent}") for digit in (1, 2, 5, 10)]
    return min(candidates, key=lambda candidate: abs(math.log(candidate / rate)))


def steps_of(training: Training, pairs: int) -> int:
    """The optimizer steps that a policy takes."""
    return training.max_steps or training.epochs * math.ceil(pairs / training.batch_size)


def advice(training: Training, pairs: int, parameters: int | None) -> str | None:
    """Say which settings to change if the policy will hardly differ from the reference; None if they suffice."""
    proposed, steps = propose(pairs, parameters, training.adapter is not None), steps_of(training, pairs)
    changes = _more_steps(training, proposed, steps) if steps * _SLACK < STEPS else []
    of_model = ""
    if _is_slow(training, max(steps, proposed.steps), proposed.learning_rate):
        changes.append(f"training.optimizer.learning_rate: {number(proposed.learning_rate)}")
        of_model = f" of {size(parameters or 0)} parameters"
    if not changes:
        return None
    found = f"{steps:,} {'step' if steps == 1 else 'steps'} at a learning rate of {number(training.optimizer.learning_rate)}"
    return f"{found} hardly change a model{of_model}; for {pairs:,} training pairs, set {_listed(changes)} ({_DOCS})"


def general_advice(training: Training, pairs: int) -> str:
    """Say what to change of a policy that hardly differs although steps and learning rate are as many as proposed."""
    rate = number(training.optimizer.learning_rate)
    taken = f"{steps_of(training, pairs):,} steps at a learning rate of {rate} were too little"
    return f"{taken}; raise training.optimizer.learning_rate, or training.epochs ({_DOCS})"


def _more_steps(training: Training, proposed: SuggestedSettings, steps: int) -> list[str]:
    """The fields to set for the proposed steps; none if there are as many already."""
    if steps >= proposed.steps:
        return []
    if training.max_steps is not None:
        return [f"training.max_steps: {proposed.steps}"]
    sizes = [f"training.batch_size: {proposed.batch_size}"] if proposed.batch_size != training.batch_size else []
    return [*sizes, f"training.epochs: {proposed.epochs} ({proposed.steps:,} steps)"]


def _is_slow(training: Training, steps: int, proposed_rate: float | None) -> bool:
    """Whether even `steps` lead less than half as far as the proposed learning rate does in `STEPS`.

    AdamW moves a weight by at most about the learning rate in a step, and so does Muon if it is scaled to match.
    """
    optimizer = training.optimizer
    if proposed_rate is None or (isinstance(optimizer, Muon) and optimizer.adjust_lr == "original"):
        return False
    rate = optimizer.learning_rate
    return rate < proposed_rate and rate * steps * _SLACK < proposed_rate * STEPS


def _listed(changes: list[str]) -> str:
    return " and ".join([", ".join(changes[:-1]), changes[-1]] if len(changes) > 1 else changes)


def number(value: float | None) -> str:
    """A learning rate as a person writes it: 5e-7."""
    digits, exponent = f"{value:e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def size(parameters: int) -> str:
    """A number of parameters in millions or billions."""
    return f"{parameters / 1e9:.3g} billion" if parameters >= 1e9 else f"{parameters / 1e6:.3g} million"

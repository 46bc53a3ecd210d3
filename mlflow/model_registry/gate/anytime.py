"""The gate `anytime`: a candidate waits until the evidence that it is better reaches its level.

    differences   for each prompt, the mean over its pairs of the champion's value minus the candidate's
    clip          a difference of losses counts at most `clip`, and is divided by it; error rates are within [-1, 1] already
    evidence      the capital of a gambler who bets on these differences (betting.py)
    level         the hypothesis's part of alpha (e_lond.py)

The tested mean is that of the clipped differences. The first prompts of the held-out pairs, in the order of their digests, only
choose the clip, so it does not depend on the pairs bet on. A bound much larger than the usual differences would make every bet
small: with 20 standard deviations, no candidate was ever promoted in simulations.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model_registry.gate.betting import Floats, confidence_sequence, log_evidence, prompts_needed
from model_registry.gate.ledger import Bet, Hypothesis, Ledger, now
from model_registry.gate.scores import GateMetric, PairedScores
from training.contract.config.release import Gate

LOSSES = (GateMetric.LOSS, GateMetric.LOGISTIC_LOSS)
CLIP_DEVIATIONS = 4
CLIP_PROMPTS = 10  # at least; a fifth of the held-out prompts
_LARGEST_EXPONENT = 700.0
_THOUSAND = 1000


def prompt_differences(pairs: PairedScores) -> dict[str, float]:
    """Return the champion's mean value minus the candidate's by prompt, in the order of prompts, without leaked pairs."""
    if pairs.champion is None:
        return {}
    by_prompt: dict[str, list[float]] = defaultdict(list)
    for pair in sorted(pairs.shared - pairs.leaked):
        by_prompt[pairs.prompts.get(pair, pair)].append(pairs.champion[pair] - pairs.candidate[pair])
    return {prompt: statistics.fmean(by_prompt[prompt]) for prompt in sorted(by_prompt)}


def choose_clip(differences: Sequence[float], metric: GateMetric, gate: Gate) -> tuple[float | None, int]:
    """Return the clip, and how many of the first differences were used to choose it. None: they do not suffice."""
    if metric not in LOSSES:
        return 1.0, 0
    if gate.clip is not None:
        return gate.clip, 0
    count = len(differences)
    used = count if count < 2 * CLIP_PROMPTS else max(CLIP_PROMPTS, count // 5)
    return clip_of(differences[:used]), used


def clip_of(differences: Sequence[float]) -> float | None:
    """Return four standard deviations of these differences; None if they are too few, or all equal."""
    spread = statistics.stdev(differences) if len(differences) > 1 else 0.0
    return CLIP_DEVIATIONS * spread if spread > 0 else None


def place_bet(entry: Hypothesis, differences: Sequence[float], source: str, prompts: int, needed: float) -> Hypothesis:
    """Return the entry after a bet on `prompts` more prompts. `differences`: all so far, not clipped.

    `needed`: the logarithm of the needed evidence.
    """
    assert entry.clip is not None, "nothing is bet without a clip"
    values = clipped(differences, entry.clip)
    low, high = confidence_sequence(values)
    bet = Bet(
        source=source,
        time=now(),
        prompts=prompts,
        log_evidence=log_evidence(values),
        mean=entry.clip * float(values.mean()) if len(values) else 0.0,
        low=entry.clip * low,
        high=entry.clip * high,
        clipped=sum(abs(value) > entry.clip for value in differences) / max(1, len(differences)),
    )
    return entry.model_copy(update={"bets": (*entry.bets, bet), "prompts_needed": prompts_needed(values, needed)})


def clipped(differences: Sequence[float], clip: float) -> Floats:
    """Return the differences in units of `clip`, within [-1, 1]."""
    return np.clip(np.asarray(differences, dtype=np.float64) / clip, -1, 1)


@dataclass(frozen=True)
class Standing:
    """A hypothesis beside its level."""

    entry: Hypothesis
    level: float

    @classmethod
    def of(cls, entry: Hypothesis, ledger: Ledger) -> "Standing":
        return cls(entry, ledger.level_of(entry))

    @property
    def is_reached(self) -> bool:
        return self.entry.log_evidence >= self.needed

    @property
    def needed(self) -> float:
        """The logarithm of the needed evidence."""
        return -math.log(self.level)

    @property
    def surplus(self) -> float:
        """The logarithm of evidence times level: positive if the level is reached with evidence to spare."""
        return self.entry.log_evidence - self.needed

    def figures(self) -> dict[str, float]:
        last = self.entry.bets[-1] if self.entry.bets else None
        needed = {} if self.entry.prompts_needed is None else {"prompts_needed": float(self.entry.prompts_needed)}
        return {
            "hypothesis": float(self.entry.number),
            "evidence": amount(self.entry.log_evidence),
            "evidence_needed": amount(self.needed),
            "prompts": float(self.entry.prompts),
            **({"mean_difference": last.mean, "clipped_share": last.clipped} if last else {}),
            **needed,
        }

    def __str__(self) -> str:
        entry = self.entry
        text = (
            f"evidence {shown(self.entry.log_evidence)} of the {shown(self.needed)} needed against version {entry.champion}, "
            f"the champion (hypothesis {entry.number})"
        )
        if not entry.bets:
            return f"{text}, on no prompt yet; pairs that arrive will test it"
        last = entry.bets[-1]
        comparison = "lower" if last.mean >= 0 else "higher"
        low, high = (last.low, last.high) if last.mean >= 0 else (-last.high, -last.low)
        text += (
            f", on {entry.prompts:,} prompts: their {entry.metric} is {abs(last.mean):.4g} {comparison} than the champion's "
            f"(95% at any time: {low:.4g} to {high:.4g})"
        )
        if last.clipped:
            text += f"; {last.clipped:.1%} of the differences are clipped at {entry.clip:.4g}"
        return f"{text}; {self._prompts_left()}"

    def _prompts_left(self) -> str:
        needed = self.entry.prompts_needed
        if self.is_reached:
            return "the level is reached"
        if needed is None:
            return "at this difference, more prompts would not help it"
        return f"at this difference, about {needed:,} more prompts decide with power 0.8"


def waiting_sentences(ledger: Ledger, recipe: str) -> list[str]:
    """Return a sentence about each waiting candidate of a recipe, the newest first."""
    return [
        f"version {entry.candidate} of {ledger.name} waits: {Standing.of(entry, ledger)}"
        for entry in ledger.waiting(recipe)
    ]


def amount(log: float) -> float:
    """Return the evidence of this logarithm, as far as a float can hold it."""
    return math.exp(min(log, _LARGEST_EXPONENT))


def shown(log: float) -> str:
    """Return the evidence with three digits: `0.87`, `54.8`, `1,330`, `1.2e+09`."""
    return shown_amount(amount(log)) if log < _LARGEST_EXPONENT else f"e^{log:.0f}"


def shown_amount(value: float) -> str:
    """Return a number with three digits; thousands are whole, and millions have an exponent."""
    is_thousand = _THOUSAND <= abs(value) < _THOUSAND**2
    return f"{float(f'{value:.3g}'):,.0f}" if is_thousand else f"{value:.3g}"

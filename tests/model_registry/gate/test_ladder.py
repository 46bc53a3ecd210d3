"""The release decision against hand-derived cases, and as properties over any losses."""

import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import model_registry.gate.ladder
from model_registry.gate.ladder import rounded
from model_registry.gate.scores import MIN_PROMPTS, Decision, GateMetric, PairedScores, paired_difference
from training.contract.config.release import Gate

ACCURACY = "eval/rewards/accuracies"
losses = st.lists(st.floats(0, 50), min_size=MIN_PROMPTS, max_size=60)


def decide(candidate, champion, metrics=None, gate=None, **options) -> Decision:
    pairs = PairedScores(options.pop("measure", GateMetric.LOSS), candidate, champion, **options)
    return model_registry.gate.ladder.decide(pairs, metrics or {ACCURACY: 0.75}, gate or Gate())


def named(values: list[float]) -> dict[str, float]:
    return {f"pair-{index}": value for index, value in enumerate(values)}


# Sixteen pairs on which the candidate is better by 0.1 and 0.3 in turn: the mean gain is 0.2; each gain is 0.1 from the
# mean, so s = sqrt(16 * 0.01 / 15) = 0.103280 and the standard error is s / 4 = 0.025820.
CHAMPION = named([0.7] * 16)
BETTER = named([0.6, 0.4] * 8)


def test_decide_gain_above_standard_error_is_promoted_with_figures():
    decision = decide(BETTER, CHAMPION, gate=Gate(min_accuracy=0.6))
    assert decision.promote
    assert decision.figures["gain"] == pytest.approx(0.2)
    assert decision.figures["standard_error"] == pytest.approx(0.1 / math.sqrt(15))
    # Means 0.5 and 0.7, as multiples of 1/16: 8/16 and 11/16.
    assert (decision.figures["candidate_loss"], decision.figures["champion_loss"]) == (0.5, 0.6875)
    [reason] = decision.reasons
    assert reason.startswith("on 16 shared pairs the loss is 0.2 lower")
    assert reason.endswith("0.02582")


def test_paired_difference_uses_shared_pairs_only():
    difference = paired_difference(CHAMPION | {"old": 100.0}, BETTER | {"new": -100.0})
    assert (difference.pairs, difference.mean) == (16, pytest.approx(0.2))
    assert difference.standard_error == pytest.approx(0.1 / math.sqrt(15))


@given(losses)
def test_paired_difference_repeated_pairs_of_a_prompt_keep_the_standard_error(gains: list[float]):
    """As independent pairs, twice as many would make the standard error smaller by a factor of 1.4."""
    once, nothing = named(gains), dict.fromkeys(named(gains), 0.0)
    twice, prompts = (
        once | {f"again {pair}": gain for pair, gain in once.items()},
        {f"again {pair}": pair for pair in once},
    )
    alone = paired_difference(once, nothing)
    found = paired_difference(twice, dict.fromkeys(twice, 0.0), prompts)
    assert (found.pairs, found.prompts) == (2 * len(gains), len(gains))
    assert (found.mean, found.standard_error) == pytest.approx((alone.mean, alone.standard_error))


def test_decide_gain_on_few_prompts_keeps_the_champion():
    """The candidate is better on 20 of 40 pairs. They have ten prompts, with four pairs each of the same gain.

    Gains of 1 for five prompts, -0.5 for the others: mean 0.25, each 0.75 from it. With four pairs a prompt, the squares of
    the sums are 9, so the standard error is sqrt(10 / 9 * 90) / 40 = 0.25, and not sqrt(40 * 0.5625 / 39 / 40) = 0.12.
    """
    candidate = named(([0.0] * 4 + [1.5] * 4) * 5)
    prompts = {pair: f"prompt-{index // 4}" for index, pair in enumerate(candidate)}
    champion = named([1.0] * 40)
    decision = decide(candidate, champion, prompts=prompts)
    assert not decision.promote and decision.figures["standard_error"] == pytest.approx(0.25)
    assert decision.reasons[0].startswith("on 40 shared pairs of 10 prompts the loss is 0.25 lower")
    assert decide(candidate, champion).figures["standard_error"] == pytest.approx(0.1201, abs=1e-4)
    fewer = {pair: min(prompt, "prompt-8") for pair, prompt in prompts.items()}
    [reason] = decide(candidate, champion, prompts=fewer).reasons
    assert "40 held-out pairs of 9 prompts" in reason and "10 prompts are needed" in reason


def test_decide_leaked_pairs_are_left_out():
    """A champion has memorized six of twenty pairs. It is worse on all others, and is replaced."""
    names = list(named([0.0] * 20))
    candidate = dict.fromkeys(names, 0.5)
    champion = {pair: 0.0 if index < 6 else 0.6 for index, pair in enumerate(names)}
    leaked = frozenset(names[:6])
    decision = decide(candidate, champion, leaked=leaked)
    assert decision.promote and decision.figures["gain"] == pytest.approx(0.1)
    assert (decision.figures["shared_pairs"], decision.figures["leaked_pairs"]) == (14, 6)
    assert decision.reasons[0].startswith("on 14 shared pairs, without 6 ")
    assert "the loss is 0.1 lower" in decision.reasons[0]
    assert not decide(candidate, champion).promote
    [reason] = decide(candidate, champion, leaked=leaked | set(names[6:11])).reasons
    assert reason.startswith("only 9 held-out pairs, without 11 ")


def test_decide_gain_below_standard_error_keeps_the_champion():
    """Gains of +1 and -0.9 in turn: mean 0.05, s = sqrt(16 * 0.95^2 / 15) = 0.98115, standard error 0.24529."""
    decision = decide(named([0.0, 1.9] * 8), named([1.0] * 16))
    assert not decision.promote
    assert decision.figures["gain"] == pytest.approx(0.05)
    assert decision.figures["standard_error"] == pytest.approx(0.95 * 4 / math.sqrt(15) / 4)
    assert "the loss is 0.05 lower than the champion's" in decision.reasons[0]


def test_decide_worse_candidate_has_a_reason():
    decision = decide(CHAMPION, BETTER)
    assert not decision.promote
    assert "0.2 higher than the champion's" in decision.reasons[0]


def test_decide_equal_candidate_has_a_reason():
    assert decide(BETTER, BETTER).reasons[0].startswith("on 16 shared pairs the loss is the same as the champion's; ")


def test_decide_error_rate_has_a_reason_with_its_cause():
    """Four wrong pairs of sixteen instead of eight: a gain of 1/4 in the mean, s = sqrt(16 * (3/16) / 15) = 0.44721."""
    decision = decide(named([1.0] * 4 + [0.0] * 12), named([1.0] * 8 + [0.0] * 8), measure=GateMetric.ERROR_RATE)
    assert decision.promote
    assert (decision.figures["candidate_error_rate"], decision.figures["champion_error_rate"]) == (0.25, 0.5)
    [reason] = decision.reasons
    assert reason.startswith(GateMetric.ERROR_RATE.why)
    assert f"on 16 shared pairs the {GateMetric.ERROR_RATE} is 0.25 lower" in reason and reason.endswith("0.1118")


def test_decide_one_better_pair_is_not_promoted_by_rounding():
    """One better pair gains exactly one standard error. In floats the gain is above it for 430 of the counts up to 2,000."""
    for count in range(MIN_PROMPTS, 300):
        candidate, champion = named([0.0] * count), named([1.0] + [0.0] * (count - 1))
        decision = decide(candidate, champion, measure=GateMetric.ERROR_RATE)
        assert decision.figures["gain"] == pytest.approx(decision.figures["standard_error"])
        assert not decision.promote, count


def test_decide_without_champion_is_promoted():
    decision = decide(BETTER, None)
    assert decision.promote
    assert len(decision.reasons) == 1
    assert decision.figures == {"candidate_pairs": 16, "candidate_loss": 0.5, "accuracy": 0.75}
    assert decide(CHAMPION, None).figures["candidate_loss"] == 0.6875, "0.7, as a multiple of 1/16"


@pytest.mark.parametrize("champion", [None, CHAMPION])
@pytest.mark.parametrize("accuracy", [0.5999, math.nan])
def test_decide_below_the_floor_is_not_promoted(champion: dict[str, float] | None, accuracy: float):
    decision = decide(BETTER, champion, metrics={ACCURACY: accuracy}, gate=Gate(min_accuracy=0.6))
    assert not decision.promote
    assert "0.6" in decision.reasons[0]
    assert decide(BETTER, champion, metrics={ACCURACY: 0.6}, gate=Gate(min_accuracy=0.6)).promote


@pytest.mark.parametrize("champion", [None, CHAMPION])
def test_decide_below_the_floor_of_a_source_is_not_promoted(champion: dict[str, float] | None):
    metrics = {
        ACCURACY: 0.75,
        "eval/sources/help/rewards/accuracies": 0.9,
        "eval/sources/safety/rewards/accuracies": 0.6,
    }
    passed = decide(BETTER, champion, metrics=metrics, gate=Gate(min_accuracy_of={"help": 0.9, "safety": 0.6}))
    assert passed.promote
    assert (passed.figures["accuracy of safety"], passed.figures["min_accuracy of safety"]) == (0.6, 0.6)
    refused = decide(
        BETTER, champion, metrics=metrics, gate=Gate(min_accuracy=0.8, min_accuracy_of={"safety": 0.61, "style": 0.1})
    )
    assert not refused.promote and "accuracy of style" not in refused.figures
    overall, safety, style = refused.reasons[:3]
    assert "accuracy 0.75" in overall and "0.8" in overall
    assert "accuracy of safety 0.6" in safety and "0.61" in safety
    assert "no held-out pair of style" in style and "0.1" in style
    assert len(refused.reasons) == 3 + (champion is not None), "the last is that of the comparison"
    assert not decide(BETTER, champion, metrics=metrics, gate=Gate(min_accuracy_of={"style": 0})).promote


@pytest.mark.parametrize(("candidate", "champion"), [({}, None), ({}, CHAMPION)])
def test_decide_without_losses_is_not_promoted(candidate: dict[str, float], champion: dict[str, float] | None):
    decision = decide(candidate, champion)
    assert not decision.promote
    assert "the candidate" in decision.reasons[0]


def test_decide_non_finite_losses_are_not_promoted():
    broken = {**BETTER, "pair-3": math.nan, "pair-4": math.inf}
    for champion in (None, CHAMPION):
        decision = decide(broken, champion)
        assert not decision.promote
        assert decision.reasons[0].startswith("2 of the candidate's 16 ")
    [reason] = decide(BETTER, {**CHAMPION, "pair-0": math.inf}).reasons
    assert reason.startswith("1 of the champion's 16 ")


def test_decide_too_few_shared_pairs_keep_the_champion():
    """Nine pairs of sixteen shared, with a huge gain on each: one fewer than needed."""
    champion = {f"pair-{index}": 9.0 for index in range(7, 16)} | {f"old-{index}": 0.0 for index in range(50)}
    decision = decide(BETTER, champion)
    assert not decision.promote
    [reason] = decision.reasons
    assert reason.startswith("only 9 held-out pairs ") and "10 prompts are needed" in reason
    assert decision.figures["shared_pairs"] == 9
    assert decide(named([0.0, 0.1] * 5), CHAMPION).promote, "ten are enough"


def test_decide_unshared_pairs_do_not_count():
    alone = decide(BETTER | {"new": 1000.0}, CHAMPION | {"old": -1000.0, "broken": math.inf})
    both = decide(BETTER, CHAMPION)
    assert alone.promote and alone.reasons == both.reasons
    assert all(alone.figures[name] == both.figures[name] for name in ("gain", "candidate_loss", "champion_loss"))


@given(losses)
def test_decide_copy_of_the_champion_is_not_promoted(values: list[float]):
    assert not decide(named(values), named(values)).promote


@given(losses, losses, st.randoms(use_true_random=False))
def test_decide_is_independent_of_the_order_of_pairs(ours: list[float], theirs: list[float], dice: random.Random):
    candidate, champion = named(ours), named(theirs)
    shuffled = list(candidate.items())
    dice.shuffle(shuffled)
    assert decide(dict(shuffled), dict(reversed(champion.items()))) == decide(candidate, champion)


@given(losses, st.floats(-2, 2))
def test_decide_promotes_exactly_if_the_gain_is_above_the_standard_error(noise: list[float], factor: float):
    """Gains with a known standard error, shifted to a mean of `factor` times it; computed by the definition, without numpy."""
    mean = sum(noise) / len(noise)
    error = math.sqrt(sum((x - mean) ** 2 for x in noise) / (len(noise) - 1) / len(noise))
    assume(error > 1e-3 and abs(factor - 1) > 1e-6)
    champion = named([x - mean + factor * error for x in noise])
    assert decide(named([0.0] * len(noise)), champion).promote == (factor > 1)


@given(losses, losses)
def test_decide_two_models_never_beat_each_other(ours: list[float], theirs: list[float]):
    candidate, champion = named(ours), named(theirs)
    assert not (decide(candidate, champion).promote and decide(champion, candidate).promote)


@given(st.floats(0, 100), st.integers(1, 10_000))
def test_rounded_is_the_nearest_multiple(score: float, count: int):
    reported = rounded(score, count)
    assert abs(reported - score) <= 0.5 / count + 1e-9
    assert reported * count == pytest.approx(round(reported * count), abs=1e-6)

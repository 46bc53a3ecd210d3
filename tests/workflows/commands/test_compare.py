"""The comparison of evaluations, against figures worked out by hand."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from assets.comparison.paired_metrics import accuracy, margin
from tests.workflows.homes import check_values
from workflows.cli import tables
from workflows.commands.compare import Evaluated, compare


def values(accuracies: list[float], factor: float = 1.0, start: int = 0) -> dict[str, dict[str, float]]:
    """Return one value a pair, the same for each measure but for a factor."""
    names = [f"pair-{index}" for index in range(start, start + len(accuracies))]
    by_pair = dict(zip(names, accuracies, strict=True))
    return {
        "accuracy": by_pair,
        "margin": {k: factor * v for k, v in by_pair.items()},
        "loss": {k: 1 - v for k, v in by_pair.items()},
    }


# Ten pairs; the second evaluation ranks five more of them rightly than the first. The differences, five ones and five zeros,
# have the mean 1/2 and the variance 10 * (1/4) / 9; divided by 10 that is 1/36, so the standard error is 1/6.
FIRST = Evaluated("a", {"training.seed": "0", "training.loss.beta": "0.1"}, {"loss": "x"}, values([0.0] * 10))
SECOND = Evaluated(
    "a-b", {"training.seed": "0", "training.loss.beta": "0.5"}, {"loss": "y"}, values([0.0, 1.0] * 5, factor=4.0)
)


def test_the_difference_of_each_to_the_first_with_its_standard_error():
    found = compare([FIRST, SECOND])
    assert found.against == "a"
    first, second = found.recipes
    assert first.means == {"accuracy": 0.0, "margin": 0.0, "loss": 1.0} and not first.differences
    assert second.means == {"accuracy": 0.5, "margin": 2.0}
    assert (second.differences["accuracy"].mean, second.differences["margin"].mean) == (0.5, 2.0)
    assert second.differences["accuracy"].standard_error == pytest.approx(1 / 6)
    assert second.differences["margin"].standard_error == pytest.approx(4 / 6)


def test_pairs_of_one_prompt_count_together():
    """Each prompt's two pairs differ by the same amount: the standard error counts ten pairs, not twenty."""
    prompts = {f"pair-{index}": f"prompt-{index % 10}" for index in range(20)}
    first = replace(FIRST, values=values([0.0] * 20), prompts=prompts)
    second = replace(SECOND, values=values([0.0, 1.0] * 10), prompts=prompts)
    assert compare([first, second]).recipes[1].differences["accuracy"].standard_error == pytest.approx(1 / 6)
    few = {pair: f"prompt-{int(pair[5:]) % 9}" for pair in prompts}
    found = compare([first, replace(second, prompts=few)]).recipes[1]
    assert not found.differences
    check_values(found.notes[0], "20 held-out pairs", "10 prompts")


def test_another_reference_is_noted():
    found = compare(
        [replace(FIRST, reference="r"), replace(SECOND, reference="s"), replace(SECOND, reference="r")]
    ).recipes
    assert [len(each.notes) for each in found] == [0, 1, 0]
    [note] = found[1].notes
    check_values(note, "reference", " a", "accuracy", "margin")
    few = replace(SECOND, reference="s", values=values([1.0] * 10, start=5))
    assert compare([replace(FIRST, reference="r"), few]).recipes[1].notes[-1] == note, (
        "their means are shown all the same"
    )


def test_only_different_settings_are_shown():
    found = compare([FIRST, SECOND])
    assert [each.settings for each in found.recipes] == [{"training.loss.beta": "0.1"}, {"training.loss.beta": "0.5"}]
    other = replace(SECOND, settings={"training.seed": "0", "training.loss.beta": "0.1", "training.loss.tau": "1"})
    assert [each.settings for each in compare([FIRST, other]).recipes] == [
        {"training.loss.tau": None},
        {"training.loss.tau": "1"},
    ]


def test_only_losses_of_one_scale_are_compared():
    alike = replace(SECOND, scale=FIRST.scale)
    found = compare([FIRST, alike]).recipes[1]
    assert found.means["loss"] == 0.5
    assert (found.differences["loss"].mean, found.differences["loss"].standard_error) == (-0.5, pytest.approx(1 / 6))
    other = compare([FIRST, SECOND]).recipes[1]
    assert "loss" not in other.means and "loss" not in other.differences


def test_recipe_without_an_evaluation_is_noted_and_the_next_is_first():
    found = compare([Evaluated("new", notes=("never evaluated",)), FIRST, SECOND])
    assert found.against == "a"
    assert (found.recipes[0].notes, found.recipes[0].pairs, found.recipes[0].means) == (["never evaluated"], 0, {})
    assert found.recipes[2].differences["accuracy"].mean == 0.5
    nothing = compare([Evaluated("new", notes=("never evaluated",))])
    assert nothing.against is None and len(nothing.recipes) == 1


def test_only_common_pairs_count_and_others_are_noted():
    """Two pairs of twelve are only the second's, ranked rightly: they count for its mean, but not for the difference."""
    more = replace(SECOND, values=values([0.0, 1.0] * 5 + [1.0, 1.0]))
    found = compare([FIRST, more]).recipes[1]
    assert found.pairs == 12 and found.means["accuracy"] == pytest.approx(7 / 12)
    assert (found.differences["accuracy"].pairs, found.differences["accuracy"].mean) == (10, 0.5)
    [note] = found.notes
    check_values(note, " a: ", "10 of 12 ")
    [note] = compare([more, FIRST]).recipes[1].notes
    check_values(note, " a-b: ", "10 of 10 ")


@pytest.mark.parametrize(("start", "common"), [(1, 9), (10, 0)])
def test_too_few_common_pairs_give_no_difference(start, common):
    found = compare([FIRST, replace(SECOND, values=values([1.0] * 10, start=start))]).recipes[1]
    assert not found.differences and found.means["accuracy"] == 1.0
    [note] = found.notes
    check_values(note, " a: ", f" {common} of 10 ", "10 prompts")


def test_nine_pairs_that_both_have_give_no_difference_and_a_note_says_why():
    nine = [replace(each, values=values([1.0] * 9)) for each in (FIRST, SECOND)]
    first, second = compare(nine).recipes
    assert not second.differences and first.notes == []
    [note] = second.notes
    check_values(note, "9 held-out pairs", "10 prompts")


def test_margin_is_in_nats_and_a_tie_is_not_a_success():
    """(-10 + 12) - (-20 + 15) = 2 + 5. The loss's rewards do not count: a loss without a reference has others."""
    row = {
        "policy_chosen_logprob": -10.0,
        "reference_chosen_logprob": -12.0,
        "policy_rejected_logprob": -20.0,
        "reference_rejected_logprob": -15.0,
        "margin": -0.5,
    }
    assert margin(row) == 7.0
    assert [accuracy(row | {"policy_chosen_logprob": value}) for value in (-10.0, -17.0, -24.0)] == [1.0, 0.0, 0.0]


def test_table_of_a_comparison_fits_80_columns():
    written = io.StringIO()
    third = Evaluated("a-new", notes=("never evaluated; run `pedigree run a/new` first",))
    first, second = (
        replace(each, settings={**each.settings, "data.validation_fraction": share})
        for each, share in ((FIRST, "0.1"), (SECOND, "0.3"))
    )
    tables.comparison(Console(file=written, width=80), compare([first, second, third]))
    text = written.getvalue()
    settings = ("  loss.beta 0.5", "  data.validation_fraction 0.3 ")
    for part in ("on 10 held-out pairs", *settings, "+0.500 ± 0.167", "+2.000 ± 0.667", "other loss"):
        assert part in text
    assert "a-new: never evaluated; run `pedigree run a/new` first" in text


@pytest.mark.parametrize(("lost", "style"), [(-5, "1"), (-4, "1"), (-3, "2"), (3, "2"), (4, "1")])
def test_difference_above_two_standard_errors_is_marked(lost: int, style: str):
    """Better or worse. If k of ten pairs differ by 1, that is sqrt(k/10 (1 - k/10) / 9): 0.153 for three, 0.163 for four."""
    changed = values([float(index < abs(lost)) for index in range(10)])
    first, second = replace(FIRST, values=values([0.0] * 10)), replace(FIRST, recipe="b", values=changed)
    written = io.StringIO()
    terminal = Console(file=written, width=80, force_terminal=True, color_system="standard")
    tables.comparison(terminal, compare([second, first] if lost < 0 else [first, second]))
    mean, error = abs(lost) / 10, (abs(lost) / 10 * (1 - abs(lost) / 10) / 9) ** 0.5
    assert f"\x1b[{style}m{'-' if lost < 0 else '+'}{mean:.3f} ± {error:.3f}\x1b[0m" in written.getvalue()

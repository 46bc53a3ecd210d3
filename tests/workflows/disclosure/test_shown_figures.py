"""`evaluation.disclosure`: what is shown of held-out pairs, and the meter."""

import json
import shutil

import pytest

from assets.bodies.checks import DISCLOSURE
from assets.views.pair_reader import read_pairs
from tests.workflows.disclosure.shown_texts import held_out_numbers, held_out_texts, leaks, shown_texts
from tests.workflows.disclosure.voted_home import EVALUATION_KEY, meter_lines, run
from tests.workflows.homes import check_error, latest
from tests.workflows.in_process import Baseline
from training.contract.errors import UsageError
from workflows.api.recipe import Recipe
from workflows.commands.compare import last_evaluated
from workflows.commands.inspect_pair import inspect_row
from workflows.recipes.discovery import load_recipe


def test_votes_show_one_figure_of_an_evaluation_and_nothing_else(baseline: Baseline) -> None:
    report = run(baseline, "evaluation", training={"seed": 3})
    shown = list(shown_texts(baseline, "plain", report))
    assert list(report.metrics) == ["eval/votes/accuracy"] and report.samples == []
    hidden = held_out_numbers(baseline, "plain") | held_out_texts(baseline, "plain")
    assert leaks(shown, hidden) == set()


def test_exact_figures_are_found_where_votes_hide_them(baseline: Baseline) -> None:
    """The search above would find them."""
    report = run(baseline, training={"seed": 3}, evaluation={"disclosure": "exact"})
    numbers = {place for place, _ in leaks(shown_texts(baseline, "plain", report), held_out_numbers(baseline, "plain"))}
    assert numbers >= {
        "metadata of policy",
        "metadata of evaluation",
        "check held_out_accuracy_above_chance",
        "run in MLflow",
        "version in MLflow",
        "logged model",
        "page plain-report.html",
        "page plain-evaluation.svg",
        "file report.html in MLflow",
        "file README.md in MLflow",
        "file metrics.json in MLflow",
        "run --json",
        "text of run and status",
    }
    texts = {place for place, _ in leaks(shown_texts(baseline, "plain", report), held_out_texts(baseline, "plain"))}
    assert texts >= {"metadata of evaluation", "page plain-report.html", "run --json"}


def test_requests_for_held_out_pairs_are_refused_with_votes(baseline: Baseline) -> None:
    pipeline = load_recipe(baseline.folders["plain"]).pipeline
    recipe = Recipe(baseline.home, load_recipe(baseline.folders["plain"]))
    fingerprint = baseline.fingerprints["plain"]["tokenized_pairs"] or ""
    pairs = (
        read_pairs(baseline.services.store.open("tokenized_pairs", fingerprint)).select(["row", "split"]).to_pylist()
    )
    rows = {pair["split"]: pair["row"] for pair in pairs}
    requests = {
        f"row {rows['validation']}": lambda: inspect_row(
            pipeline, baseline.services, baseline.instance, rows["validation"]
        ),
        "comparison": lambda: last_evaluated(pipeline, baseline.services, baseline.instance),
        "table": lambda: recipe.table("evaluation"),
    }
    for name, request in requests.items():
        with pytest.raises(UsageError) as refused:
            request()
        check_error(refused.value, "held-out-hidden", name, "evaluation.disclosure: exact")
    assert inspect_row(pipeline, baseline.services, baseline.instance, rows["train"]).split == "train"


def test_meter_counts_each_evaluation_once(baseline: Baseline) -> None:
    """With n held-out prompts, 100 votes about one figure add 400 / n nats."""
    run(baseline, "evaluation")
    run(baseline, "evaluation")
    [first] = [line for line in meter_lines(baseline) if line["figure"] == "accuracy"]
    pairs = first["pairs"]
    assert first["of"] == baseline.fingerprints["plain"]["evaluation"]
    nats = latest(baseline.instance, EVALUATION_KEY).metadata["disclosed_nats"]
    assert nats == pytest.approx(2 * 400 / pairs, rel=1e-3)  # the accuracy, and the win that a release draws
    report = run(baseline, "evaluation", training={"seed": 3})
    shown = latest(baseline.instance, EVALUATION_KEY).metadata
    assert shown["disclosed_nats"] == pytest.approx(4 * 400 / pairs, rel=1e-3)
    assert shown["bias_bound"] == pytest.approx((4 * 400 / pairs / (2 * pairs)) ** 0.5, rel=1e-3)
    [check] = [check for check in report.checks if check.check == DISCLOSURE]
    assert not check.passed and not check.stops and "hold out new pairs" in check.description


def test_removed_and_recomputed_evaluation_has_the_same_votes_and_adds_no_line(baseline: Baseline) -> None:
    before = run(baseline, "evaluation")
    lines, fingerprint = meter_lines(baseline), baseline.fingerprints["plain"]["evaluation"] or ""
    for folder in (f"evaluation/{fingerprint}", "keys/evaluation"):
        shutil.rmtree(baseline.home / "store" / folder)
    after = run(baseline, "evaluation")
    [evaluation] = [asset for asset in after.assets if asset.asset == "evaluation"]
    assert (evaluation.outcome, evaluation.fingerprint) == ("computed", fingerprint)
    assert (after.metrics, meter_lines(baseline)) == (before.metrics, lines)


def test_exact_evaluation_makes_the_meter_unbounded_until_all_prompts_are_new(baseline: Baseline) -> None:
    exact = run(baseline, "evaluation", evaluation={"disclosure": "exact"})
    assert [check.passed for check in exact.checks if check.check == DISCLOSURE] == [True]
    assert latest(baseline.instance, EVALUATION_KEY).metadata["disclosed_nats"] == "unbounded"
    again = run(baseline, "evaluation")
    [check] = [check for check in again.checks if check.check == DISCLOSURE]
    assert not check.passed and "because exact figures were shown" in check.description
    file = baseline.folders["plain"] / "preferences.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["prompt"][-1]["content"] = f"Please, {row['prompt'][-1]['content']}"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    run(baseline, "evaluation")
    assert latest(baseline.instance, EVALUATION_KEY).metadata["disclosed_nats"] != "unbounded"


def test_budget_changes_no_key(baseline: Baseline) -> None:
    run(baseline, "evaluation")
    report = run(baseline, "evaluation", evaluation={"disclosure_budget": 1.0})
    assert {asset.outcome for asset in report.assets} == {"reused"}

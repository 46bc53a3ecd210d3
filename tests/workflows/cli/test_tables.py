"""Output in a terminal: the end of a run, and the tables of the other commands."""

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from assets.pipeline.pipeline import Pipeline
from assets.views.pair_reader import TokenizedSide
from tests.workflows.homes import ATTRIBUTES, check_values
from training.contract.config.recipe import Recipe
from training.contract.protocol.details import RescoredPair
from training.contract.protocol.events import make_event
from workflows.cli import tables
from workflows.cli.output import SanitizedConsole
from workflows.cli.progress import ProgressBars
from workflows.cli.tables import run_report
from workflows.commands.gc import GarbageItem, GcReport
from workflows.commands.inspect_pair import InspectedRow
from workflows.commands.plan import PlannedAsset
from workflows.commands.run_report import AssetRun, CheckRun, RunReport
from workflows.commands.verify import Verification, VerifiedAsset
from workflows.state.status import AssetStatus

PATH = f"/home/somebody/{'a-long-folder-name/' * 8}base"
CHARTS = f"http://127.0.0.1:5000/#/experiments/1/runs/{'1f' * 16}/model-metrics?workflowType=machine_learning"
MADE = AssetRun("tokenization_spec", "computed", "ab" * 32, 1.0)


def shown(report: RunReport, with_samples: bool = True) -> list[str]:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))
    run_report(console, report, with_samples)
    return console.export_text().splitlines()


def report(
    assets: list[AssetRun],
    is_champion: bool | None = None,
    samples: list[dict[str, str]] | None = None,
    checks: list[CheckRun] | None = None,
) -> RunReport:
    version, reasons = (None, None) if is_champion is None else ("3", "held-out loss 0.51 against 0.62")
    about: dict[str, Any] = {"metrics": {"eval/pairs": 8}, "mlflow_run_id": "1f" * 16, "samples": samples or []}
    about |= {"mlflow_url": CHARTS, "is_served": False}
    about |= {"model_version": version, "is_champion": is_champion, "reasons": reasons}
    return RunReport("weekly", "run", True, assets, checks or [], **about)


def test_one_cause_of_two_failures_is_printed_once_and_last_with_an_unwrapped_path():
    error = f"there is no folder {PATH}/[new]; `reference.model` is a folder beside the recipe, or a hub id"
    failed = [AssetRun(name, "failed", None, 0.0, error) for name in ("base_model", "tokenization_spec")]
    lines = shown(report(failed))
    assert lines[-1] == f"base_model, tokenization_spec failed: {error}"
    assert sum("failed:" in line for line in lines) == 1


def test_a_run_ends_with_what_the_gate_decided():
    reasons = "held-out loss 0.51 against 0.62"
    about: dict[str, Any] = {"result": "98 of 100 pairs.", "report": PATH, "version_url": CHARTS}
    about["gate"] = {"candidate_loss": 0.51, "champion_loss": 0.62, "gain": 0.11, "standard_error": 0.02}
    for is_champion, verdict in ((True, "is champion"), (False, "is not champion")):
        assert shown(replace(report([MADE], is_champion=is_champion), **about))[-6:] == [
            "result: 98 of 100 pairs.",
            f"version 3 {verdict}: {reasons}",
            "compared with the champion before: candidate loss 0.51, champion loss 0.62, gain 0.11, standard error 0.02",
            f"report: {PATH}",
            f"charts (served by `pedigree ui`): {CHARTS}",
            f"version (served by `pedigree ui`): {CHARTS}",
        ]


def test_address_of_the_charts_is_unwrapped():
    """It is longer than a line, and a terminal opens only one word."""
    made = report([MADE])
    for served, needs_server in ((made, True), (replace(made, is_served=True), False)):
        [line] = [line for line in shown(served) if CHARTS in line]
        assert ("`pedigree ui`" in line) is needs_server and line.startswith("charts")
    assert not any("charts" in line for line in shown(replace(made, mlflow_url=None)))


def test_failed_check_is_printed_once():
    passed, polite = (
        CheckRun("policy", "rewards_finite", True, False, ""),
        CheckRun("policy", "polite", False, False, ""),
    )
    short = CheckRun("policy", "short", False, False, "[too] long")
    *_, first, second, verdict, _ = shown(report([MADE], is_champion=True, checks=[passed, short, polite]))
    assert (first, second) == ("policy: the check short failed: [too] long", "policy: the check polite failed")
    assert verdict.startswith("version 3 is champion")
    failed = AssetRun("policy", "failed", "cd" * 32, 1.0, short.failure)
    *_, first, _, second = shown(report([MADE, failed], checks=[passed, replace(short, stops=True), polite]))
    assert (first, second) == ("policy: the check polite failed", "policy failed: the check short failed: [too] long")


def test_samples_show_ends_of_prompts_and_beginnings_of_answers():
    """200 characters in a column of 23 are 9 lines; a page of 4,000 would be 170."""
    page = {"prompt": "word " * 800 + "Why?", "before": "No. " + "said " * 800 + "End.", "after": "yes"}
    lines = shown(report([MADE], samples=[page]))
    assert len(lines) < 30 and sum("..." in line for line in lines) == 2
    assert any("Why?" in line for line in lines) and any("No." in line for line in lines)
    assert not any("End." in line for line in lines)
    assert not any("word" in line for line in shown(report([MADE], samples=[page]), with_samples=False))


@pytest.mark.parametrize(("count", "seen"), [(8, range(8)), (40, range(0, 40, 5))])
def test_eight_of_many_samples_are_shown_evenly_spread(count: int, seen: range):
    """The default recipe has eight, and its table has them all."""
    samples = [{"prompt": f"Ask {n}?", "before": f"was {n}.", "after": f"is {n}."} for n in range(count)]
    lines = shown(report([MADE], samples=samples))
    assert [n for n in range(count) if any(f"Ask {n}?" in line for line in lines)] == list(seen)
    assert any("(8 of 40)" in line for line in lines) == (count == 40)


def test_progress_without_a_terminal_is_a_line_each_phase_and_ten_seconds():
    """Otherwise a training in CI would print nothing. A phase ends with its last count. A path in brackets is not markup."""
    console = Console(width=40, record=True, file=open("/dev/null", "w"))
    steps: list[dict[str, Any]] = [
        {"event": "progress", "done": n, "total": 300, "unit": "steps", "seconds_left": 300.0 - n, "time": 1000.0 + n}
        for n in range(1, 131)
    ]
    with ProgressBars(console) as progress:
        loss: dict[str, Any] = {"event": "step", "step": 1, "loss": 0.5, "time": 1000.0}
        for event in [{"event": "phase", "phase": "training", "time": 1000.0}, loss, *steps]:
            progress.on_event(make_event(**event, asset="policy"))
        progress.on_event({"event": "phase", "phase": "saving", "time": 1131.0, "asset": "policy"})
        progress.on_event({"event": "note", "text": "[/a/path] is a file", "time": 1200.0, "asset": "policy"})
    assert console.export_text().splitlines() == [
        "policy: training",
        *(f"policy: {n} of 300 steps, loss 0.5000, {300 - n} s left" for n in (*range(1, 131, 11), 130)),
        "policy: saving",
        "policy: [/a/path] is a file",
    ]


def text_of(show_it: Callable[..., None], *things: object) -> list[str]:
    """Return the cells of each line at 100 columns, without the frames of tables."""
    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    show_it(console, *things)
    lines = (" | ".join(part.strip() for part in re.split("[│┃]", line)) for line in console.export_text().splitlines())
    return [line.strip(" |") for line in lines if re.search(r"\w", line)]


def test_progress_in_a_terminal_is_one_line():
    console = Console(force_terminal=True, width=120, file=(written := io.StringIO()))
    events: list[dict[str, Any]] = [
        {"event": "phase", "phase": "training"},
        {"event": "progress", "done": 3, "total": 10, "unit": "steps", "seconds_left": 7.0},
        {"event": "step", "step": 3, "loss": 0.5},
    ]
    with ProgressBars(console) as progress:
        for event in events:
            progress.on_event(make_event(**event, asset="policy", time=1.0))
    last = written.getvalue().rpartition("policy ")[2]
    assert all(text in last for text in ("3/10", "steps", "7 s left", "loss 0.5000"))


def test_new_phase_has_no_known_end():
    console = Console(force_terminal=True, width=120, file=(written := io.StringIO()))
    events: list[dict[str, Any]] = [
        {"event": "progress", "done": 10, "total": 10, "unit": "steps", "seconds_left": 0.0},
        {"event": "phase", "phase": "saving"},
    ]
    with ProgressBars(console) as progress:
        for event in events:
            progress.on_event(make_event(**event, asset="policy", time=1.0))
    last = written.getvalue().rpartition("policy ")[2]
    assert "?" not in last.replace("\x1b[?25h", "") and "saving" in last and "steps" not in last


def test_narrow_terminal_shortens_text_before_figures():
    """80 columns show only the beginning of a path."""
    console = Console(force_terminal=True, color_system=None, width=80, file=(written := io.StringIO()))
    figures: dict[str, Any] = {
        "event": "progress",
        "done": 12_345,
        "total": 140_000,
        "unit": "MB",
        "seconds_left": 1234.0,
    }
    with ProgressBars(console) as progress:
        for event in ({"event": "phase", "phase": "hashing /models/" + "long/" * 20}, figures):
            progress.on_event(make_event(**event, asset="reference_logprobs", time=1.0))
    last = written.getvalue().rpartition("reference_logprobs ")[2]
    assert all(text in last for text in ("━", "12345/140000", "MB", "1234 s left", "hashing", "…"))
    assert "long/" not in last


@pytest.mark.parametrize("is_terminal", [True, False])
def test_control_sequences_in_text_are_escaped(is_terminal):
    """Sequences of ECMA-48 and xterm: name the window, clear it, fill the clipboard, colour (CSI as one character), return."""
    text = "a\x1b]0;name\x07 b\x1b[2J c\x1b]52;c;eA==\x1b\\ d\x9b31m e\x7f\rf"
    console = SanitizedConsole(force_terminal=is_terminal, width=100, file=(written := io.StringIO()))
    console.print(text, markup=False)
    console.print(Text.assemble(("error: ", "bold"), text), soft_wrap=True)
    console.print(Table(text, title=text))
    with ProgressBars(console) as progress:
        progress.on_event({"event": "phase", "phase": text, "asset": "policy", "time": 1.0})
    shown = re.sub(r"\x1b\[(?:[0-9;]*m|[0-9]*A|2K|\?25[lh])|\r", "", written.getvalue())  # styles and bars of rich
    assert "name" in shown and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)


FINGERPRINT = "0123456789ab" + "c" * 52
WEEKLY = Pipeline("weekly", Recipe.model_validate(ATTRIBUTES), Path("weekly/defs.yaml"))


def test_the_table_of_a_status_says_why_in_its_last_column():
    found = [
        AssetStatus("policy", "stale", ("loss.beta 0.1 -> 0.2", "[x] added"), FINGERPRINT),
        AssetStatus("evaluation", "missing", ("never materialized",), None),
    ]
    assert text_of(tables.status, WEEKLY, found) == [
        "Recipe weekly",
        "asset | state | fingerprint | cause",
        "policy | stale | 0123456789ab | loss.beta 0.1 -> 0.2",
        "[x] added",
        "evaluation | missing | - | never materialized",
    ]


def test_the_table_of_a_status_shows_each_cause_once():
    """Assets below name the asset with the cause. So three edits of a template do not fill the screen."""
    template, rows = "chat template changed: line 2", "2 pairs added"
    found = [
        AssetStatus("tokenization_spec", "stale", (template, "max_length 128 -> 64"), FINGERPRINT),
        AssetStatus("raw_preferences", "stale", (rows,), FINGERPRINT),
        AssetStatus(
            "tokenized_pairs",
            "stale",
            (f"tokenization_spec: {template}", "tokenization_spec: max_length 128 -> 64", f"raw_preferences: {rows}"),
            FINGERPRINT,
        ),
        AssetStatus("policy", "stale", ("loss.beta 0.1 -> 0.2", f"raw_preferences: {rows}"), FINGERPRINT, "job 7 runs"),
        AssetStatus("evaluation", "missing", ("never materialized",), None),
        AssetStatus("released_model", "missing", ("never materialized",), None),
    ]
    _, _, *table = text_of(tables.status, WEEKLY, found)
    assert table == [
        f"tokenization_spec | stale | 0123456789ab | {template}",
        "max_length 128 -> 64",
        f"raw_preferences | stale | 0123456789ab | {rows}",
        "tokenized_pairs | stale | 0123456789ab | because of tokenization_spec",
        "because of raw_preferences",
        "policy | stale | 0123456789ab | loss.beta 0.1 -> 0.2",
        "because of raw_preferences",
        "job 7 runs",
        "evaluation | missing | - | never materialized",
        "released_model | missing | - | never materialized",
    ]


def test_the_table_of_a_plan_counts_the_work():
    planned = [
        PlannedAsset("reference_logprobs", "reuse", (), {"sequences": 2000, "missing": 0}),
        PlannedAsset("policy", "compute", ("loss.beta 0.1 -> 0.2",), {"steps": 1200, "pairs": None}),
    ]
    summary, title, *table = text_of(tables.plan, WEEKLY, planned)
    check_values(summary, "weekly: ", " 1,200 steps", "reference_logprobs")
    assert "weekly" in title
    assert table == [
        "asset | action | work | cause",
        "reference_logprobs | reuse | 2,000 sequences, 0 missing",
        "policy | compute | 1,200 steps, unknown pairs | loss.beta 0.1 -> 0.2",
    ]


def test_verification_tables_name_the_row_that_differs():
    agreeing = {"stored": -5.0, "live": -5.0001, "allowed": 0.01}
    rows = [
        RescoredPair.model_validate({"row": n, "chosen": agreeing, "rejected": {**agreeing, "live": -5.0 - n}})
        for n in (0, 7)
    ]
    artifacts = [VerifiedAsset("policy", FINGERPRINT, False, "file [a] is corrupt")]
    title, *lines, tolerance = text_of(tables.verification, Verification("weekly", artifacts, rows, 0.001, False))
    assert "weekly" in title and " 0.001 nats " in tolerance
    assert lines == [
        "asset | fingerprint | result | fault",
        "policy | 0123456789ab | differs | file [a] is corrupt",
        "Scored again, in nats",
        "row | chosen stored | live | rejected stored | live | result",
        "0 | -5.00000 | -5.00010 | -5.00000 | -5.00000 | ok",
        "7 | -5.00000 | -5.00010 | -5.00000 | -12.00000 | differs",
    ]
    nothing = text_of(tables.verification, Verification("weekly", [], [], None, True))
    assert not any("nats" in line for line in nothing)


def test_collection_table_shows_freed_bytes():
    garbage = [GarbageItem(f"memo/{FINGERPRINT}", FINGERPRINT, 2048), GarbageItem("job", "policy-0123456789ab", 1)]
    _, *lines, summary = text_of(tables.collection, GcReport(garbage, 2049, 12, deleted=False))
    assert lines == [
        "kind | fingerprint or folder | bytes",
        "memo/0123456789ab | 0123456789ab | 2,048",
        "job | policy-0123456789ab | 1",
    ]
    check_values(summary, "2 items", "2,049 bytes", "--delete", "12 artifacts")
    [summary] = text_of(tables.collection, GcReport([], 0, 12, deleted=True))
    check_values(summary, "0 items", "0 bytes", "12 artifacts")
    assert "--delete" not in summary


def test_pair_is_shown_with_its_known_values():
    chosen, rejected = (
        TokenizedSide([5, 6], ["Q", f"[{name}]"], [False, True], -2.5, [None, -2.5], policy_logprob=policy)
        for name, policy in (("yes", -1.5), ("no", None))
    )
    call = '[{"name": "ask"}]'
    prompt = [{"role": "user", "content": "[Why]?"}, {"role": "assistant", "content": "", "tool_calls": call}]
    origin = {"source": "[a].jsonl", "line": 4}
    messages = {"prompt": prompt, "tools": '[{"name": "ask"}]', "chat_template_kwargs": '{"a": 1}', **origin}
    assert text_of(tables.inspected, InspectedRow(3, "train", chosen, rejected, messages)) == [
        "row 3, train split, from [a].jsonl, line 4",
        'tools: [{"name": "ask"}]',
        'chat_template_kwargs: {"a": 1}',
        "user: [Why]?",
        'assistant: [{"name": "ask"}]',
        "chosen: 2 tokens, 1 of them trained",
        "Q [yes]",
        "reference, nats a token: '[yes]' -2.50",
        "reference log-prob -2.5000, policy log-prob -1.5000",
        "rejected: 2 tokens, 1 of them trained",
        "Q [no]",
        "reference, nats a token: '[no]' -2.50",
        "reference log-prob -2.5000, policy log-prob not computed",
    ]

"""What a run ends with in a terminal: the last lines are what a person has to know."""

from rich.console import Console

from workflows.execution import AssetRun, RunReport
from workflows.show import Progress, run_report

PATH = f"/home/somebody/{'a-long-folder-name/' * 8}base"
MADE = AssetRun("tokenization_spec", "computed", "ab" * 32, 1.0)


def shown(report: RunReport, with_samples: bool = True) -> list[str]:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))
    run_report(console, report, with_samples)
    return console.export_text().splitlines()


def report(
    assets: list[AssetRun], is_champion: bool | None = None, samples: list[dict[str, str]] | None = None
) -> RunReport:
    version, reasons = (None, None) if is_champion is None else ("3", "held-out loss 0.51 against 0.62")
    return RunReport(
        "weekly", "run", True, assets, {"eval/pairs": 8}, "1f" * 16, version, is_champion, reasons, samples or []
    )


def test_one_cause_of_two_failures_is_told_once_and_last_with_its_path_in_one_piece():
    error = f"there is no folder {PATH}; `reference.model` is a folder beside the recipe, or a hub id"
    failed = [AssetRun(name, "failed", None, 0.0, error) for name in ("base_model", "tokenization_spec")]
    assert shown(report(failed))[-1] == f"base_model, tokenization_spec failed: {error}"


def test_a_run_ends_with_what_the_gate_decided():
    told = "held-out loss 0.51 against 0.62"
    assert shown(report([MADE], is_champion=True))[-1] == f"version 3 is champion: {told}"
    assert shown(report([MADE], is_champion=False))[-1] == f"version 3 is not champion: {told}"


def test_of_long_prompts_and_answers_the_beginnings_are_shown_and_in_a_sweep_none():
    """200 characters in a column of 23 are 9 lines; a page of 4,000 would be 170."""
    page = {"prompt": "word " * 800, "before": "no", "after": "yes"}
    lines = shown(report([MADE], samples=[page]))
    assert len(lines) < 30 and any("..." in line for line in lines)
    assert not any("word" in line for line in shown(report([MADE], samples=[page]), with_samples=False))


def test_where_nobody_sees_bars_each_phase_is_a_line_and_progress_one_a_minute():
    """Three hours of training in CI would else say nothing until its end. A path in brackets is no markup."""
    console = Console(width=40, record=True, file=open("/dev/null", "w"))
    steps = [
        {"event": "progress", "done": n, "total": 300, "unit": "steps", "seconds_left": 300.0 - n, "time": 1000.0 + n}
        for n in range(1, 131)
    ]
    with Progress(console) as progress:
        for event in [{"event": "phase", "phase": "training", "time": 1000.0}, *steps]:
            progress.hear({**event, "asset": "policy"})
        progress.hear({"event": "note", "text": "[/a/path] is a file", "time": 1200.0, "asset": "policy"})
    assert console.export_text().splitlines() == [
        "policy: training",
        "policy: 1 of 300 steps, 299 s left",
        "policy: 62 of 300 steps, 238 s left",
        "policy: 123 of 300 steps, 177 s left",
        "policy: [/a/path] is a file",
    ]

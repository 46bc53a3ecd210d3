"""The results of commands in the terminal: tables, with a few lines below."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from assets.execution.rescore import SetAside
from assets.pipeline.graph import GRAPH
from assets.pipeline.pipeline import Pipeline
from assets.views.pair_page import shown_logprob
from assets.views.pair_reader import TokenizedSide
from model_registry.model_version import Version
from training.contract.identity.fingerprint import short, shortened
from workflows.commands.compare import SHOWN_VALUES, Compared, Comparison
from workflows.commands.gc import GcReport
from workflows.commands.inspect_pair import InspectedRow
from workflows.commands.plan import PlannedAsset, sentence
from workflows.commands.run_report import RunReport
from workflows.commands.verify import Verification, agrees
from workflows.state.status import AssetStatus

_COLOURS = {
    **dict.fromkeys(("computed", "fresh", "ok"), "green"),
    **dict.fromkeys(("reused", "reuse"), "cyan"),
    **dict.fromkeys(("stale", "compute"), "yellow"),
    **dict.fromkeys(("failed", "missing", "differs"), "red"),
}
_SHOWN_CHARACTERS = 200  # of a held-out prompt or answer
_SHOWN_SAMPLES = 8


def new_recipe(console: Console, file: Path, missing: Sequence[str]) -> None:
    """Show the path of the recipe, the `missing` fields, and the next command."""
    fill_in = f"Fill in {' and '.join(f'`{field}`' for field in missing)}; then " if missing else ""
    console.print(
        f"Written: {file}. {fill_in}`pedigree plan {shlex.quote(str(file.parent))}` shows the work of a run.",
        markup=False,
        soft_wrap=True,
    )


def run_report(console: Console, report: RunReport, with_samples: bool) -> None:
    """Show the assets with their outcome, sampled answers and held-out metrics, then one summary, and failures at the end."""
    table = Table("asset", "stage", "outcome", "fingerprint", "seconds", title=f"Recipe {report.recipe}")
    for asset in report.assets:
        outcome, seconds = _coloured(asset.outcome), f"{asset.seconds:.1f}"
        table.add_row(asset.asset, GRAPH[asset.asset].stage, outcome, short(asset.fingerprint), seconds)
    console.print(table)
    if with_samples and report.samples:
        _samples(console, report.samples)
    if report.metrics:
        _metrics(console, report.metrics)
    for check in report.warnings:
        console.print(f"[yellow]{check.asset}:[/] {escape(check.failure)}", soft_wrap=True)
    for note in report.notes:
        console.print(f"[yellow]policy:[/] {escape(note)}", soft_wrap=True)
    _summary(console, report)
    failed = [asset for asset in report.assets if asset.error is not None]
    for error in dict.fromkeys(asset.error for asset in failed):  # one cause, such as a missing model, may fail several
        names = ", ".join(asset.asset for asset in failed if asset.error == error)
        console.print(f"[red]{names} failed:[/] {escape(error or '')}", soft_wrap=True)
    if report.error is not None:
        console.print(f"[red]the run failed:[/] {escape(report.error)}", soft_wrap=True)


def _samples(console: Console, samples: Sequence[dict[str, str]]) -> None:
    """Show at most `_SHOWN_SAMPLES`, evenly spread; the evaluation's report.html has all."""
    count = min(len(samples), _SHOWN_SAMPLES)
    title = "Held-out answers" if count == len(samples) else f"Held-out answers ({count} of {len(samples)})"
    table = Table("prompt", "before", "after", title=title, show_lines=True)
    for sample in (samples[index * len(samples) // count] for index in range(count)):
        cells = (_end(sample["prompt"]), _beginning(sample["before"]), _beginning(sample["after"]))
        table.add_row(*map(escape, cells))
    console.print(table)


def _beginning(text: str) -> str:
    """Return the beginning of the text; the evaluation's report has all of it."""
    return text.strip() if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS].strip()} ..."


def _end(text: str) -> str:
    """Return the end of a prompt, as many begin with the same long system message."""
    return text.strip() if len(text) <= _SHOWN_CHARACTERS else f"... {text[-_SHOWN_CHARACTERS:].strip()}"


def _summary(console: Console, report: RunReport) -> None:
    """Show the result, whether the version is champion and why, and the addresses, unwrapped."""
    if report.result:
        console.print(f"[bold]result:[/] {escape(report.result)}", soft_wrap=True)
    if report.model_version:
        verdict = "[green]is champion[/]" if report.is_champion else "[yellow]is not champion[/]"
        console.print(f"version {report.model_version} {verdict}: {escape(report.reasons or '')}", soft_wrap=True)
    if report.gate:
        figures = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in report.gate.items())
        console.print(f"compared with the champion before: {figures}", soft_wrap=True)
    server = "" if report.is_served else " (served by `pedigree ui`)"
    addresses = {"report": report.report, f"charts{server}": report.mlflow_url, f"version{server}": report.version_url}
    for name, address in addresses.items():
        if address:
            console.print(f"{name}: {address}", markup=False, soft_wrap=True)


def _metrics(console: Console, metrics: Mapping[str, float]) -> None:
    table = Table("held-out metric", "value", title="Evaluation")
    for name, value in metrics.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:.4f}")
    console.print(table)


def status(console: Console, pipeline: Pipeline, found: Sequence[AssetStatus]) -> None:
    """Show the assets with their state. A cause is shown at its asset, and assets below name that asset."""
    shown: set[str] = set()
    table = Table("asset", "state", "fingerprint", "cause", title=f"Recipe {pipeline.name}")
    for asset in found:
        lines = [f"because of {cause.partition(': ')[0]}" if cause in shown else cause for cause in asset.causes]
        shown |= {f"{asset.asset}: {cause}" for cause in asset.causes}
        causes = escape("\n".join([*dict.fromkeys(lines), *filter(None, [asset.job])]))
        table.add_row(asset.asset, _coloured(asset.state), short(asset.fingerprint), causes)
    console.print(table)
    for asset in found:
        for note in asset.notes:
            console.print(f"[yellow]{asset.asset}:[/] {escape(note)}", soft_wrap=True)


def plan(console: Console, pipeline: Pipeline, planned: Sequence[PlannedAsset]) -> None:
    """Show one sentence, then the assets with their work and causes."""
    console.print(f"{escape(pipeline.name)}: {sentence(planned)}")
    table = Table("asset", "action", "work", "cause", title=f"Plan of {pipeline.name}")
    for asset in planned:
        work = ", ".join(_counted(count, name) for name, count in asset.work.items())
        table.add_row(asset.asset, _coloured(asset.action), work, escape("\n".join(asset.causes)))
    console.print(table)
    for asset in planned:
        for note in asset.notes:
            console.print(f"[yellow]{asset.asset}:[/] {escape(note)}")


def comparison(console: Console, found: Comparison) -> None:
    """Show a row per recipe, with its settings; each mean with its difference to the first, bright if above noise."""
    first = next((item for item in found.recipes if item.recipe == found.against), None)
    title = "As last evaluated" + (f", on {first.pairs} held-out pairs" if first else "")
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("recipe and its settings", overflow="fold")
    for name in SHOWN_VALUES:
        table.add_column(name, no_wrap=True)
    for item in found.recipes:
        settings = item.settings.items() if first in (item, None) else item.settings.items() - first.settings.items()
        lines = [f"  {name.removeprefix('training.')} {value}" for name, value in sorted(settings) if value is not None]
        cell = "\n".join([f"[bold]{item.recipe}[/]", *map(escape, lines)])
        table.add_row(cell, *(_compared_value(item, name) for name in SHOWN_VALUES), end_section=True)
    console.print(table)
    for item in found.recipes:
        for note in item.notes:
            console.print(f"[yellow]{item.recipe}:[/] {escape(note)}")
    if any(item.means for item in found.recipes):
        console.print("Margins are in nats, before beta: the reward margins of an evaluation are beta times as large.")
    if any(item.differences for item in found.recipes):
        console.print(
            f"Below a value: its difference to {found.against} on the same pairs ± one standard error, dim if less than two of "
            "them: chance explains it. A loss is shown only if it is the same function of the same reference."
        )


def _compared_value(item: Compared, measure: str) -> str:
    if measure not in item.means:
        return "other loss" if item.means else ""
    value = f"{item.means[measure]:.3f}"
    if (difference := item.differences.get(measure)) is None:
        return value
    style = "bold" if abs(difference.mean) > 2 * difference.standard_error else "dim"
    return f"{value}\n[{style}]{difference.mean:+.3f} ± {difference.standard_error:.3f}[/]"


def verification(console: Console, found: Verification) -> None:
    """Show the assets hashed again and the pairs scored again, with differences."""
    table = Table("asset", "fingerprint", "result", "fault", title=f"Recipe {found.recipe}: hashed again")
    for asset in found.artifacts:
        verdict = _coloured("ok" if asset.ok else "differs")
        table.add_row(asset.asset, short(asset.fingerprint), verdict, escape(asset.fault or ""))
    console.print(table)
    if not found.rescored:
        console.print("No pair was scored again.")
        return
    table = Table("row", "chosen stored", "live", "rejected stored", "live", "result", title="Scored again, in nats")
    for row in found.rescored:
        values = [f"{value:.5f}" for side in (row.chosen, row.rejected) for value in (side.stored, side.live)]
        table.add_row(str(row.row), *values, _coloured("ok" if agrees(row) else "differs"))
    console.print(table)
    console.print(f"Tolerance: {found.tolerance} nats times the square root of the response's number of tokens")
    if found.advice:
        console.print(found.advice, style="yellow", markup=False, soft_wrap=True)


def set_aside(console: Console, pipeline: Pipeline, found: SetAside) -> None:
    """Show how many log-probs were set aside, their folders, and the command that scores them again."""
    shards, tables = _counted(found.shards, "shards"), _counted(len(found.tables), "tables")
    console.print(
        f"Set aside: the log-probs of {found.sequences:,} sequences ({shards}) and {tables} made of them. Until "
        f"`pedigree gc --delete` they are kept in {', '.join(map(str, found.folders))}. The next "
        f"`pedigree run {pipeline.argument}` scores them again.",
        markup=False,
        soft_wrap=True,
    )


def _counted(count: int | None, what: str) -> str:
    """Return a count with the plural `what`: `1 file`, `2 files`, `unknown rows`."""
    if count is None:
        return f"unknown {what}"
    return f"{count:,} {what.removesuffix('s') if count == 1 else what}"


def rolled_back(console: Console, name: str, restored: Version, left: Version) -> None:
    """Show which version of the model is champion again."""
    console.print(
        f"Version {restored.number} of {name} is champion again; version {left.number} is marked as rolled back and will not "
        "be promoted again.",
        markup=False,
    )


def collection(console: Console, found: GcReport) -> None:
    table = Table("kind", "fingerprint or folder", "bytes", title="Deleted" if found.deleted else "Would be deleted")
    for item in found.garbage:
        table.add_row(escape(_short_kind(item.kind)), escape(shortened(item.fingerprint)), f"{item.bytes:,}")
    if found.garbage:
        console.print(table)
    verb = "freed" if found.deleted else "would be freed with --delete"
    items, kept = _counted(len(found.garbage), "items"), _counted(found.kept, "artifacts")
    console.print(f"{items}, {found.bytes:,} bytes {verb}; {kept} {'is' if found.kept == 1 else 'are'} kept")


def _short_kind(kind: str) -> str:
    name, _, rule = kind.partition("/")
    return f"{name}/{short(rule)}" if rule else kind


def inspected(console: Console, found: InspectedRow) -> None:
    """Show the pair's messages, then each response with its trained tokens underlined and its log-probs."""
    origin = f"{found.messages['source']}, line {found.messages['line']}"
    console.print(f"[bold]row {found.row}[/], {found.split} split, from {escape(origin)}", soft_wrap=True)
    for name in ("tools", "chat_template_kwargs"):
        if value := found.messages.get(name):
            console.print(f"[dim]{name}:[/] {escape(value)}")
    for message in found.messages["prompt"]:
        text = " ".join(filter(None, (message.get(part) for part in ("reasoning_content", "content", "tool_calls"))))
        console.print(f"[dim]{escape(message['role'])}:[/] {escape(text)}")
    for name, side in (("chosen", found.chosen), ("rejected", found.rejected)):
        console.print(f"\n[bold]{name}[/]: {len(side.token_ids)} tokens, {sum(side.mask)} of them trained")
        console.print(_tokens(side), soft_wrap=True)
        if any(value is not None for value in side.reference_token_logprobs):
            console.print(f"[dim]reference, nats a token:[/] {_token_logprobs(side)}", soft_wrap=True)
        reference, policy = shown_logprob(side.reference_logprob), shown_logprob(side.policy_logprob)
        console.print(f"reference log-prob {reference}, policy log-prob {policy}")
    if found.chosen.policy_logprob is None:
        console.print("[dim]The policy was evaluated on held-out pairs only; --score computes its log-probs here.[/]")


def _tokens(side: TokenizedSide) -> str:
    return " ".join(
        f"[underline]{escape(text)}[/]" if trained else f"[dim]{escape(text)}[/]"
        for text, trained in zip(side.texts, side.mask, strict=True)
    )


def _token_logprobs(side: TokenizedSide) -> str:
    pairs = zip(side.texts, side.reference_token_logprobs, strict=True)
    return " ".join(f"{escape(repr(text))} {value:.2f}" for text, value in pairs if value is not None)


def _coloured(word: str) -> str:
    return f"[{_COLOURS[word]}]{word}[/]"

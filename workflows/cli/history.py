"""The command `history`."""

from dataclasses import asdict

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from model_registry.gate.history import Comparison, ModelHistory, model_history
from workflows.cli.options import as_json_option
from workflows.cli.output import print_found, reporting
from workflows.orchestration.resources import build_services, pedigree_home, prepare_home


@click.command()
@click.argument("model")
@as_json_option
@reporting
def history(model: str, as_json: bool) -> None:
    """Show every candidate of MODEL, its evidence over time, and the gate's decision. MODEL is a `release.model_name`."""
    prepare_home(pedigree_home())
    found = model_history(build_services(pedigree_home()).registry, model)
    print_found(as_json, asdict(found), show_history, found)


def show_history(console: Console, found: ModelHistory) -> None:
    """Show the candidates, then the evidence of each hypothesis after each bet."""
    table = Table("version", "decision", "reasons", title=f"Candidates of {found.model}")
    for candidate in found.candidates:
        table.add_row(str(candidate.version), candidate.decision, escape(candidate.reasons))
    console.print(table)
    if not found.comparisons:
        console.print("No candidate was compared by the gate `anytime` yet.")
        return
    for comparison in found.comparisons:
        _show_comparison(console, comparison)


def _show_comparison(console: Console, comparison: Comparison) -> None:
    reason = f": {comparison.reason}" if comparison.reason else ""
    console.print(
        f"Hypothesis {comparison.number}, version {comparison.candidate} against version {comparison.champion}: "
        f"{comparison.state}{reason}; evidence needed {comparison.evidence_needed:.3g}",
        markup=False,
        soft_wrap=True,
    )
    if not comparison.evidence:
        return
    table = Table(
        "time", "pairs", "prompts", "evidence", "mean difference, 95% at any time", "clipped", box=SIMPLE_HEAD
    )
    for bet in comparison.evidence:
        mean = f"{bet.mean:.3g} ({bet.low:.3g} to {bet.high:.3g})"
        table.add_row(bet.time, bet.pairs, f"{bet.prompts:,}", f"{bet.evidence:.3g}", mean, f"{bet.clipped:.1%}")
    console.print(table)

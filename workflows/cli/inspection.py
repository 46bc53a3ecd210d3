"""The commands about results: `inspect` for one pair, `compare` for evaluations, `history` for a registered model."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from assets.views.pages import write_page
from model_registry.gate.anytime import shown_amount
from model_registry.gate.history import Comparison, ModelHistory, model_history
from training.contract.errors import StoreError, UsageError
from workflows.cli import tables
from workflows.cli.options import as_json_option, find_free, recipe_argument
from workflows.cli.output import print_found, reporting, user_console
from workflows.cli.progress import at_work
from workflows.commands.compare import compare as do_compare
from workflows.commands.compare import last_evaluated
from workflows.commands.inspect_pair import inspect_row, inspection_page
from workflows.orchestration.resources import build_services, pedigree_home, prepare_home


@click.command()
@recipe_argument
@click.option("--row", type=click.IntRange(min=0), required=True, help="A row of raw_preferences.")
@click.option("--score", is_flag=True, help="Compute the policy's log-probs if its evaluation lacks them.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write the pair as a page to this file.")
@as_json_option
@reporting
def inspect(recipe: str, row: int, score: bool, html: Path | None, as_json: bool) -> None:
    """Show one pair: its messages, tokens, trained tokens and log-probs."""
    loaded = find_free(recipe)[0]
    with at_work() as (services, instance):
        found = inspect_row(loaded.pipeline, services, instance, row, score)
    if html is not None:
        page = inspection_page(loaded.pipeline, found)
        try:
            write_page(html, page)
        except OSError as error:
            raise StoreError(
                f"`--html {html}` cannot be written: {error.filename or html}: {error.strerror}; name another file",
                "unwritable-file",
            ) from error
        user_console.print(f"Written: {html.absolute()}", markup=False)
    print_found(as_json, asdict(found), tables.inspected, found)


@click.command()
@click.argument("recipes", nargs=-1, required=True)
@click.option("--source", metavar="NAME", help="Use only the held-out pairs of sources with this `name`.")
@as_json_option
@reporting
def compare(recipes: tuple[str, ...], source: str | None, as_json: bool) -> None:
    """Compare the latest evaluations side by side.

    Show different settings, results, and the paired differences to the first recipe. A single RECIPE is compared with its
    variants.
    """
    found = find_free(recipes[0]) if len(recipes) == 1 else [find_free(recipe)[0] for recipe in recipes]
    names = [loaded.pipeline.name for loaded in found]
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise UsageError(f"{times} of the recipes to compare are called {name}; name each once", "duplicate-recipe")
    with at_work() as (services, instance):
        comparison = do_compare([last_evaluated(loaded.pipeline, services, instance, source) for loaded in found])
    print_found(as_json, asdict(comparison), tables.comparison, comparison)


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
        f"{comparison.state}{reason}; evidence needed {shown_amount(comparison.evidence_needed)}",
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
        table.add_row(bet.time, bet.pairs, f"{bet.prompts:,}", shown_amount(bet.evidence), mean, f"{bet.clipped:.1%}")
    console.print(table)

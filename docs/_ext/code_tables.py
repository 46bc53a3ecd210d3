"""Tables of checks, metrics, assets and losses, as Markdown, from the tables in the code."""

from pathlib import Path

from assets.bodies.checks import check_specs
from assets.pipeline.graph import GRAPH
from docs._ext.field_tables import markdown_table
from training.contract.config.loss import LossType
from training.contract.protocol.metrics import HELD_OUT_METRICS, STEP_METRICS, VOTED_METRICS
from workflows.recipes.discovery import load_recipe

_DEMO = Path(__file__).resolve().parents[2] / "workflows" / "defs" / "demo"
METRICS = {"step": STEP_METRICS, "held-out": HELD_OUT_METRICS, "votes": VOTED_METRICS}


def metrics_table(kind: str) -> str:
    return markdown_table(("metric", "meaning"), [(f"`{name}`", text) for name, text in METRICS[kind].items()])


def checks_table() -> str:
    pipeline = load_recipe(_DEMO).pipeline
    rows = [
        (f"`{asset}`", f"`{spec.name}`", "the run stops" if spec.blocking else "a warning", spec.description or "")
        for asset in GRAPH
        for spec in check_specs(pipeline, asset)
    ]
    return markdown_table(("asset", "check", "if it fails", "condition"), rows)


def assets_table() -> str:
    """Return the graph: each asset, its inputs, and whether it uses the pool `gpu`."""
    rows = [
        (f"`{name}`", ", ".join(f"`{need}`" for need in node.needs), node.stage, "yes" if node.pool else "")
        for name, node in GRAPH.items()
    ]
    return markdown_table(("asset", "made from", "stage", "pool `gpu`"), rows)


def losses_table() -> str:
    """Return the traits of each loss, by which options are allowed and artifacts needed."""
    rows = [
        (
            f"`{kind.value}`",
            ", ".join(f"`{name}`" for name in kind.traits.own_settings),
            _mark(kind.traits.needs_reference),
            _mark(kind.traits.averages_tokens),
            _mark(kind.traits.couples_pairs),
            _mark(kind.traits.compares_scores),
        )
        for kind in LossType
        if kind is not LossType.MIXTURE
    ]
    head = ("type", "own settings", "uses the reference", "averages tokens", "couples pairs", "allows `divergence`")
    return markdown_table(head, rows)


def _mark(trait: bool) -> str:
    return "yes" if trait else ""

"""A picture of the gate's comparisons: each mean difference with its confidence sequence, and the evidence beside its level."""

import io
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import dagster as dg

from assets.views.metadata import new_figure, picture
from model_registry.gate.history import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#2a9d8f", "#e76f51", "#264653", "#6d597a", "#b5838d", "#457b9d")
_SHOWN = ("waiting", "promoted")
_SMALLEST = 1e-6  # on the logarithmic axis of the evidence


def evidence_picture(comparisons: Sequence[Comparison]) -> dict[str, dg.MarkdownMetadataValue]:
    """Return the metadata `confidence_sequence` with the picture of the newest comparisons; nothing if none has bet yet."""
    figure = _draw(comparisons)
    return {} if figure is None else {"confidence_sequence": picture(figure, "evidence of the waiting candidates")}


def evidence_svg(comparisons: Sequence[Comparison]) -> str:
    """Return the picture as an `<svg>` element for a page; empty if none has bet yet."""
    figure = _draw(comparisons)
    if figure is None:
        return ""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _draw(comparisons: Sequence[Comparison]) -> "Figure | None":
    """Draw the newest waiting and promoted comparisons, as many as there are colours."""
    shown = [found for found in comparisons if found.evidence and found.state in _SHOWN][: len(_COLOURS)]
    if not shown:
        return None
    figure = new_figure()
    differences, evidence = figure.subplots(1, 2)
    for comparison, colour in zip(shown, _COLOURS, strict=False):
        _draw_differences(differences, comparison, colour)
        _draw_evidence(evidence, comparison, colour)
    differences.axhline(0, color="#888", linewidth=0.8)
    differences.set(xlabel="prompts", title="mean difference / largest counted one")
    evidence.axhline(1, color="#888", linewidth=0.8)
    evidence.set(xlabel="prompts", yscale="log", title="evidence times level: champion at 1")
    for axes in (differences, evidence):
        axes.title.set_fontsize(9)
    differences.legend(fontsize=7)
    return figure


def _draw_differences(axes: "Axes", comparison: Comparison, colour: str) -> None:
    prompts = list(accumulate(bet.prompts for bet in comparison.evidence))
    label = f"{comparison.candidate} against {comparison.champion}"
    unit = comparison.clip or 1.0
    low, mean, high = ([getattr(bet, name) / unit for bet in comparison.evidence] for name in ("low", "mean", "high"))
    axes.plot(prompts, mean, color=colour, marker="o", markersize=3, label=label)
    axes.vlines(prompts, low, high, color=colour, alpha=0.4, linewidth=3)
    axes.fill_between(prompts, low, high, color=colour, alpha=0.12)


def _draw_evidence(axes: "Axes", comparison: Comparison, colour: str) -> None:
    prompts = [0, *accumulate(bet.prompts for bet in comparison.evidence)]
    values = [max(_SMALLEST, value * comparison.level) for value in (1.0, *(b.evidence for b in comparison.evidence))]
    axes.plot(prompts, values, color=colour, marker="o", markersize=3)

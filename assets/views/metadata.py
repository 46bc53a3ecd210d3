"""Metadata of an artifact for Dagster's UI: tables, pictures and links, from the details in its manifest."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from assets.views.sentences import sized
from training.contract.identity.fingerprint import short
from training.contract.protocol.details import LengthHistogram, ModelDetails, PairText, SampledAnswer, SourceDetails
from training.contract.store.artifact import Artifact
from training.contract.store.manifest import Derivation
from training.contract.system.imports import import_without_gc

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZE_INCHES = (7.0, 3.0)
_REWARD_NATS = "nats"
_UNITS = {
    "loss": "mean of the pairs",
    "rewards/chosen": _REWARD_NATS,
    "rewards/rejected": _REWARD_NATS,
    "rewards/margins": _REWARD_NATS,
    "rewards/accuracies": "share",
    "logps/chosen": "nats a response",
    "logps/rejected": "nats a response",
    "tokens_per_second": "tokens/s",
    "peak_memory_mb": "MB",
    "pairs": "pairs",
    "prompts": "prompts",
    "accuracies/chosen_longer": "share",
    "accuracies/chosen_shorter": "share",
    "accuracies/same_length": "share",
}


def artifact_metadata(artifact: Artifact) -> dict[str, Any]:
    """Return the metadata of every asset: inputs, identity, folder and size.

    An artifact that only records a model or data shows their size, not its own.
    """
    details = artifact.details
    own_size = sum(entry.bytes for entry in artifact.manifest.files.values())
    size = details.bytes if isinstance(details, SourceDetails | ModelDetails) else own_size
    return {
        **optional_table("made_from", _inputs(artifact.derivation), ("input", "fingerprint")),
        "fingerprint": artifact.fingerprint,
        "key": artifact.derivation.key,
        "size": sized(size),
        "dagster/uri": artifact.folder.as_uri(),
        "folder": dg.MetadataValue.path(str(artifact.folder)),
    }


def inputs_table(derivation: Derivation) -> dg.TableMetadataValue:
    return table(_inputs(derivation), ("input", "fingerprint"))


def _inputs(derivation: Derivation) -> list[dict[str, str]]:
    return [{"input": name, "fingerprint": short(source.fingerprint)} for name, source in derivation.inputs.items()]


def optional_table(
    name: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]
) -> dict[str, dg.TableMetadataValue]:
    """Return the metadata `name` with a table; nothing for an empty one."""
    return {name: table(rows, columns)} if rows else {}


def rounded(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures with four significant digits, for pages and Dagster's plots. Whole numbers stay."""
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in figures.items()}


def figures_table(held_out: Mapping[str, float], last_batch: Mapping[str, float]) -> dict[str, dg.TableMetadataValue]:
    """Return a table of figures with their units: of all held-out pairs, then of the last batch, which may be small."""
    held_out = {name.removeprefix("eval/"): value for name, value in held_out.items()}
    rows = [
        {
            "figure": name,
            **({"held-out": _cell(held_out[name])} if name in held_out else {}),
            **({"last batch": _cell(last_batch[name])} if name in last_batch else {}),
            "unit": _UNITS.get(name, ""),
        }
        for name in dict.fromkeys([*held_out, *last_batch])
    ]
    columns = ["figure", *(["held-out"] if held_out else []), *(["last batch"] if last_batch else []), "unit"]
    return optional_table("figures", rows, columns)


def _cell(value: float) -> str:
    is_whole = isinstance(value, int) or abs(value) >= 1000
    return f"{value:,.0f}" if is_whole else f"{value:.4g}"


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> dg.TableMetadataValue:
    """Return rows as a table; None becomes an empty cell. The schema is explicit, so an empty table has columns too."""
    cells = [{name: "" if row.get(name) is None else str(row[name]) for name in columns} for row in rows]
    records = [dg.TableRecord(row) for row in cells]  # type: ignore[call-arg]
    schema = dg.TableSchema([dg.TableColumn(name, "string") for name in columns])
    return dg.MetadataValue.table(records, schema=schema)


def length_histogram(histogram: LengthHistogram) -> dg.MarkdownMetadataValue:
    """Draw the token counts of chosen and rejected sequences."""
    figure = new_figure()
    axes = figure.subplots()
    for side, counts, colour in (("chosen", histogram.chosen, "#2a9d8f"), ("rejected", histogram.rejected, "#e76f51")):
        axes.stairs(counts, histogram.edges, label=side, color=colour, fill=True, alpha=0.5)
    axes.set(xlabel="tokens of prompt and response", ylabel="pairs")
    axes.legend()
    return picture(figure, "sequence lengths")


def margin_histogram(margins: Sequence[float]) -> dg.MarkdownMetadataValue:
    """Draw the reward margins of held-out pairs. A pair to the right of zero is ranked as in the data."""
    figure = new_figure()
    axes = figure.subplots()
    axes.hist(margins, bins=40, color="#2a9d8f")
    axes.axvline(0, color="#264653", linewidth=1)
    axes.set(xlabel="margin between the rewards of chosen and rejected, in nats", ylabel="held-out pairs")
    return picture(figure, "margins of held-out pairs")


def reward_curves(series: Mapping[str, Sequence[float]]) -> dg.MarkdownMetadataValue:
    """Draw chosen rewards, rejected rewards and margins by training step, with the loss beside them."""
    figure = new_figure()
    rewards, loss = figure.subplots(1, 2)
    colours = {"rewards/chosen": "#2a9d8f", "rewards/rejected": "#e76f51", "rewards/margins": "#264653"}
    for name, colour in colours.items():
        rewards.plot(series["steps"], series[name], label=name.removeprefix("rewards/"), color=colour)
    rewards.set(xlabel="step", title="rewards")
    rewards.legend()
    loss.plot(series["steps"], series["loss"], color="#6d597a")
    loss.set(xlabel="step", title="loss")
    return picture(figure, "rewards by step")


def new_figure() -> "Figure":
    """Return an empty figure. Import matplotlib only here: it takes a third of a second, and most commands draw nothing."""
    figure: Figure = import_without_gc("matplotlib.figure").Figure(figsize=_SIZE_INCHES, layout="constrained")
    return figure


def picture(figure: "Figure", alternative: str) -> dg.MarkdownMetadataValue:
    """Return a figure as a PNG within Markdown, the form in which Dagster's UI shows pictures."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return dg.MetadataValue.md(
        f"![{alternative}](data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()})"
    )


def shown_changes(changes: Sequence[str] | None) -> dg.MarkdownMetadataValue:
    """Return the changes since the latest materialization as Markdown; None marks the first one."""
    if not changes:
        return dg.MetadataValue.md("first materialization" if changes is None else "nothing")
    return verbatim(changes)


def sample_answers(samples: Sequence[SampledAnswer]) -> dict[str, dg.MarkdownMetadataValue]:
    """Return held-out prompts with the answers before and after, one below the other: a row of a table would be cut off."""
    texts = [
        f"{sample.prompt}\n--- before (reference model)\n{sample.before}\n--- after (policy)\n{sample.after}"
        for sample in samples
    ]
    return {"samples": verbatim(texts)} if texts else {}


def rendered_pairs(examples: Sequence[PairText]) -> dict[str, dg.MarkdownMetadataValue]:
    """Return pairs as Markdown, in the model's format; nothing without pairs."""
    texts = [
        f"row {pair.row}\n{pair.prompt}\n--- chosen\n{pair.chosen}\n--- rejected\n{pair.rejected}" for pair in examples
    ]
    return {"examples": verbatim(texts)} if texts else {}


def plain_values(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of metadata as Dagster's records have them."""
    return {name: value.value if isinstance(value, dg.MetadataValue) else value for name, value in metadata.items()}


def verbatim(texts: Sequence[str], language: str = "text") -> dg.MarkdownMetadataValue:
    """Return each text as a Markdown code block."""
    blocks = (f"~~~~{language}\n{text.replace('~~~~', '~ ~ ~ ~')}\n~~~~" for text in texts)
    return dg.MetadataValue.md("\n\n".join(blocks))

"""Metadata of an artifact for Dagster's UI: tables, pictures and links, from the details in its manifest."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from training.contract.identity.fingerprint import short
from training.contract.store.manifest import Derivation
from training.contract.store.store import Artifact
from training.contract.system.imports import import_without_gc

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZE_INCHES = (7.0, 3.0)


def artifact_metadata(artifact: Artifact) -> dict[str, Any]:
    """Return the metadata of every asset: inputs, identity, folder and size."""
    return {
        "made_from": inputs_table(artifact.derivation),
        "fingerprint": artifact.fingerprint,
        "key": artifact.derivation.key,
        "bytes": sum(entry.bytes for entry in artifact.manifest.files.values()),
        "dagster/uri": artifact.folder.as_uri(),
        "folder": dg.MetadataValue.path(str(artifact.folder)),
    }


def inputs_table(derivation: Derivation) -> dg.TableMetadataValue:
    rows = [{"input": name, "fingerprint": short(source.fingerprint)} for name, source in derivation.inputs.items()]
    return table(rows, ("input", "fingerprint"))


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> dg.TableMetadataValue:
    """Return rows as a table; None becomes an empty cell. The schema is explicit, so an empty table has columns too."""
    cells = [{name: "" if row.get(name) is None else str(row[name]) for name in columns} for row in rows]
    records = [dg.TableRecord(row) for row in cells]  # type: ignore[call-arg]
    schema = dg.TableSchema([dg.TableColumn(name, "string") for name in columns])
    return dg.MetadataValue.table(records, schema=schema)


def length_histogram(histogram: Mapping[str, Sequence[float]]) -> dg.MarkdownMetadataValue:
    """Draw the token counts of chosen and rejected sequences. `edges` has one entry more than `chosen` and `rejected`."""
    figure = _figure()
    axes = figure.subplots()
    for side, colour in (("chosen", "#2a9d8f"), ("rejected", "#e76f51")):
        axes.stairs(histogram[side], histogram["edges"], label=side, color=colour, fill=True, alpha=0.5)
    axes.set(xlabel="tokens of prompt and response", ylabel="pairs")
    axes.legend()
    return _picture(figure, "sequence lengths")


def reward_curves(series: Mapping[str, Sequence[float]]) -> dg.MarkdownMetadataValue:
    """Draw chosen rewards, rejected rewards and margins by training step, with the loss beside them."""
    figure = _figure()
    rewards, loss = figure.subplots(1, 2)
    colours = {"rewards/chosen": "#2a9d8f", "rewards/rejected": "#e76f51", "rewards/margins": "#264653"}
    for name, colour in colours.items():
        rewards.plot(series["steps"], series[name], label=name.removeprefix("rewards/"), color=colour)
    rewards.set(xlabel="step", title="rewards")
    rewards.legend()
    loss.plot(series["steps"], series["loss"], color="#6d597a")
    loss.set(xlabel="step", title="loss")
    return _picture(figure, "rewards by step")


def _figure() -> "Figure":
    """Return an empty figure. Import matplotlib only here: it takes a third of a second, and most commands draw nothing."""
    figure: Figure = import_without_gc("matplotlib.figure").Figure(figsize=_SIZE_INCHES, layout="constrained")
    return figure


def _picture(figure: "Figure", alternative: str) -> dg.MarkdownMetadataValue:
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


def rendered_pairs(examples: Sequence[Mapping[str, Any]]) -> dg.MarkdownMetadataValue:
    """Return pairs as Markdown, in the model's format."""
    texts = [
        f"row {pair['row']}\n{pair['prompt']}\n--- chosen\n{pair['chosen']}\n--- rejected\n{pair['rejected']}"
        for pair in examples
    ]
    return verbatim(texts or ["none"])


def verbatim(texts: Sequence[str], language: str = "text") -> dg.MarkdownMetadataValue:
    """Return each text as a Markdown code block."""
    blocks = (f"~~~~{language}\n{text.replace('~~~~', '~ ~ ~ ~')}\n~~~~" for text in texts)
    return dg.MetadataValue.md("\n\n".join(blocks))

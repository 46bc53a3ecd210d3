"""A recipe, a lineage, a data set and a job's events as MLflow types, within MLflow's limits.

Names have at most 250 characters of a small alphabet, parameters 6,000 characters, tags 8,000, data set digests 36. A longer
value is cut, with its length and sha256 at the end. Nothing is refused: a trainable recipe must also be loggable.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from model_registry.client import mlflow_api
from training.contract.protocol.events import Event

if TYPE_CHECKING:
    from mlflow.entities import Dataset, DatasetInput, Metric

NAME_CHARACTERS = 250
PARAM_CHARACTERS = 6000
TAG_CHARACTERS = 8000
DIGEST_CHARACTERS = 36
HELD_OUT = "held-out pairs"  # the name of the data set
_NOT_IN_NAMES = re.compile(r"[^\w.\- ]")
_NOT_METRICS = {"event", "time", "step"}


@dataclass(frozen=True)
class DatasetRef:
    """The pairs of a policy: `fingerprint` identifies them, `rows` counts them by split."""

    fingerprint: str
    source: str
    rows: Mapping[str, int]


def flatten(params: Mapping[str, Any]) -> dict[str, str]:
    """Return nested settings as text by dotted name: `{"loss": {"beta": 0.1}}` -> `{"loss.beta": "0.1"}`.

    A list of plain values stays one parameter; a list of sections is numbered (`data.sources.0.path`). None means that a
    setting is not used, so it is left out.
    """
    return dict(_leaves("", params)) if params else {}


def tags_of(tags: Mapping[str, Any]) -> dict[str, str]:
    return {_name(name): fit(_text(value), TAG_CHARACTERS) for name, value in tags.items()}


def metrics_of(event: Event) -> "list[Metric]":
    """Return the metrics of a `step` or `eval` event, non-finite ones included; nothing for other events.

    Their timestamp is the event's, so an event logged twice is the same point.
    """
    if event["event"] not in ("step", "eval"):
        return []
    moment = round(event["time"] * 1000)
    fields: Mapping[str, Any] = event
    return [
        mlflow_api.Metric(name, float(value), moment, event["step"])
        for name, value in fields.items()
        if name not in _NOT_METRICS and _is_number(value)
    ]


def is_finite(metric: "Metric") -> bool:
    return math.isfinite(metric.value)


def dataset_inputs(used: DatasetRef) -> "list[DatasetInput]":
    """Return the training pairs and the held-out pairs as inputs of a run."""
    return [
        mlflow_api.DatasetInput(_dataset(used, split), tags=[mlflow_api.InputTag("mlflow.data.context", context)])
        for split, context in (("train", "training"), ("validation", "evaluation"))
        if used.rows.get(split)
    ]


def _dataset(used: DatasetRef, split: str) -> "Dataset":
    return mlflow_api.Dataset(
        name=HELD_OUT if split == "validation" else "training pairs",
        digest=used.fingerprint[:DIGEST_CHARACTERS],
        source_type="local",
        source=json.dumps({"uri": used.source, "split": split}, ensure_ascii=False),
        profile=json.dumps({"num_rows": used.rows[split]}),
    )


def fit(text: str, limit: int) -> str:
    """Return `text`, cut to `limit` characters if it is longer, with its full length and sha256 at the end."""
    if len(text) <= limit:
        return text
    ending = f"... ({len(text):,} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()})"
    return text[: limit - len(ending)] + ending


def _leaves(name: str, value: Any) -> list[tuple[str, str]]:
    if value is None:
        return []
    if isinstance(value, Mapping) and value:
        children = [(str(key), child) for key, child in value.items()]
    elif isinstance(value, list | tuple) and any(isinstance(child, Mapping | list | tuple) for child in value):
        children = [(str(index), child) for index, child in enumerate(value)]
    else:
        return [(_name(name), fit(_text(value), PARAM_CHARACTERS))]
    return [leaf for key, child in children for leaf in _leaves(f"{name}.{key}" if name else key, child)]


def _name(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name)[:NAME_CHARACTERS]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

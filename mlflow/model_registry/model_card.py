"""The model card of a version: README.md among its files, in the format of the Hugging Face Hub (YAML, then Markdown).

It lists the training settings, the results on held-out pairs, and the lineage. It contains no local path.
"""

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import yaml

from training.contract.config.json_object import JsonObject
from training.contract.identity.fingerprint import short
from training.contract.protocol.details import EvaluationDetails
from training.contract.protocol.votes import VOTES
from training.contract.store.artifact import Artifact

_METRICS = {
    "eval/rewards/accuracies": "pairs with the higher reward for the chosen response",
    "eval/rewards/margins": "margin between the rewards, in nats",
    "eval/rewards/chosen": "reward of the chosen response, in nats",
    "eval/rewards/rejected": "reward of the rejected response, in nats",
    "eval/loss": "loss",
}


def model_card(
    model_name: str, training: JsonObject, evaluation: Artifact[EvaluationDetails], lineage: Mapping[str, str]
) -> str:
    """Return the card. `training`: the frozen section of the recipe; `lineage`: fingerprints by kind."""
    header = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["dpo", "preference-tuning"]}
    return "\n".join(
        [
            f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n",
            f"# {model_name}\n",
            "A language model tuned on preference pairs with Direct Preference Optimization (Rafailov et al. 2023, "
            "arXiv 2305.18290).\n",
            "## Held-out pairs\n",
            _table(("measure", "value"), _results(evaluation.details)),
            "## Training\n",
            _table(("setting", "value"), _settings(training)),
            "## Lineage\n",
            _table(("artifact", "fingerprint"), [(kind, f"`{short(value)}`") for kind, value in lineage.items()]),
        ]
    )


def read_training(policy: Path) -> JsonObject:
    """Return the frozen training section in a policy's folder; empty if it is missing."""
    file = policy / "training.json"
    found: JsonObject = yaml.safe_load(file.read_bytes()) if file.is_file() else {}
    return found


def _results(details: EvaluationDetails) -> list[tuple[str, str]]:
    if details.accuracy_votes is not None:
        return [(f"{_METRICS['eval/rewards/accuracies']}, share by {VOTES} votes", f"{details.accuracy_votes:.2f}")]
    metrics, (low, high) = details.metrics, details.interval
    rows = [(text, f"{metrics[name]:.4g}") for name, text in _METRICS.items() if name in metrics]
    if "eval/pairs" in metrics:
        rows.insert(0, ("held-out pairs", f"{int(metrics['eval/pairs']):,}"))
    return [*rows, ("95% interval of the share of pairs", f"{low:.3f} to {high:.3f}")]


def _settings(training: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return the settings by dotted name, without unused ones. A path is shown by its last part."""
    rows: list[tuple[str, str]] = []
    for name, value in training.items():
        if isinstance(value, Mapping):
            rows += _settings(value, f"{prefix}{name}.")
        elif value is not None:
            rows.append((f"`{prefix}{name}`", PurePath(value).name if str(value).startswith("/") else str(value)))
    return rows


def _table(columns: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [" | ".join(columns), "--- | ---", *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines) + "\n"

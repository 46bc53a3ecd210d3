"""Everything that a user sees of a home, as text, and the numbers and texts of held-out pairs that must not be in it."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from io import StringIO
from typing import Any

import dagster as dg
import pyarrow.parquet as pq
from mlflow import MlflowClient
from rich.console import Console

from assets.pipeline.graph import GRAPH
from assets.views.metadata import plain_values
from tests.workflows.in_process import Baseline
from workflows.cli import tables
from workflows.commands.run_report import RunReport
from workflows.recipes.discovery import load_recipe
from workflows.state.status import status

_FORMATS = ("{:.4f}", "{:.4g}", "{:.6f}", "{:.1%}", "{!r}")
_TRIVIAL = (0.0, 0.5, 1.0)  # these occur elsewhere
_TIMES = re.compile("seconds|per_second|_mb")  # may equal a hidden number by chance


def shown_texts(baseline: Baseline, name: str, report: RunReport) -> Iterator[tuple[str, str]]:
    """Yield what is shown of the recipe `name`, by place: Dagster, MLflow, pages and commands."""
    yield from _of_dagster(baseline.instance, report.dagster_run_id)
    yield from _of_mlflow(baseline)
    for page in (baseline.home / "pages").iterdir():
        yield f"page {page.name}", page.read_text(encoding="utf-8")
    yield "run --json", json.dumps(asdict(report))
    console = Console(file=StringIO(), width=200)
    tables.run_report(console, report, with_samples=True)
    pipeline = load_recipe(baseline.folders[name]).pipeline
    found = status(pipeline, baseline.services, baseline.instance)
    tables.status(console, pipeline, found)
    assert isinstance(console.file, StringIO)
    yield "text of run and status", console.file.getvalue()
    yield "status --json", json.dumps([asdict(asset) for asset in found])


def _of_dagster(instance: dg.DagsterInstance, run_id: str) -> Iterator[tuple[str, str]]:
    for entry in instance.all_logs(run_id):
        yield "log of Dagster", entry.user_message
        event = entry.dagster_event
        if event is not None and event.is_step_materialization:
            recorded = event.step_materialization_data.materialization
            shown = {name: value for name, value in plain_values(recorded.metadata).items() if not _TIMES.search(name)}
            yield f"metadata of {recorded.asset_key.path[-1]}", str(shown)
        elif event is not None and event.event_type == dg.DagsterEventType.ASSET_CHECK_EVALUATION:
            check = event.asset_check_evaluation_data
            yield f"check {check.check_name}", f"{check.description} {plain_values(check.metadata)}"
        elif event is not None and event.is_asset_observation:
            yield "observation", str(plain_values(event.asset_observation_data.asset_observation.metadata))


def _of_mlflow(baseline: Baseline) -> Iterator[tuple[str, str]]:
    client = MlflowClient(baseline.services.tracker.tracking_uri)
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id]):
            histories = {metric: client.get_metric_history(run.info.run_id, metric) for metric in run.data.metrics}
            values = {metric: [point.value for point in points] for metric, points in histories.items()}
            yield "run in MLflow", f"{values} {run.data.params} {run.data.tags}"
        for model in client.search_logged_models([experiment.experiment_id]):
            yield "logged model", f"{model.metrics} {model.params} {model.tags}"
    for version in client.search_model_versions():
        yield "version in MLflow", f"{version.description} {version.tags}"
    for file in (baseline.home / "mlflow" / "artifacts").rglob("*"):
        if file.suffix in (".html", ".json", ".md", ".txt", ".yaml") or file.name == "MLmodel":
            yield f"file {file.name} in MLflow", file.read_text(encoding="utf-8")


def held_out_numbers(baseline: Baseline, name: str) -> set[str]:
    """Return the exact figures of the recipe's latest evaluation and training, as they would be written."""
    found = baseline.fingerprints[name]
    metrics: dict[str, Any] = json.loads(_file(baseline, found, "evaluation", "metrics.json"))
    metrics |= json.loads(_file(baseline, found, "policy", "metrics.json"))["eval"]
    table = pq.read_table(baseline.services.store.folder("evaluation", found["evaluation"] or "") / "pairs.parquet")
    losses: list[float] = table["loss"].to_pylist()
    values = [value for value in (*metrics.values(), *losses) if isinstance(value, float) and value not in _TRIVIAL]
    assert len(values) > len(losses) > 0
    return {form.format(value) for value in values for form in _FORMATS}


def held_out_texts(baseline: Baseline, name: str) -> set[str]:
    """Return the prompts of the held-out pairs, and the sampled answers."""
    found = baseline.fingerprints[name]
    file = baseline.services.store.folder("raw_preferences", found["raw_preferences"] or "") / "preferences.parquet"
    rows = [row for row in pq.read_table(file).to_pylist() if row["split"] == "validation"]
    samples: list[dict[str, str]] = json.loads(_file(baseline, found, "evaluation", "samples.json"))
    answers = {sample[side].strip() for sample in samples for side in ("before", "after")}
    prompts = {turn["content"] for row in rows for turn in row["prompt"]}
    assert prompts and samples
    return prompts | {answer for answer in answers if len(answer) > 8}


def leaks(shown: Iterable[tuple[str, str]], hidden: set[str]) -> set[tuple[str, str]]:
    """Return the places that show something hidden, with it."""
    texts = re.compile("|".join(rf"(?<![\w.]){re.escape(secret)}(?!\w|\.\d)" for secret in hidden))
    return {(place, found) for place, text in shown for found in texts.findall(text)}


def _file(baseline: Baseline, fingerprints: dict[str, str | None], asset: str, file: str) -> str:
    assert asset in GRAPH
    return (baseline.services.store.folder(asset, fingerprints[asset] or "") / file).read_text(encoding="utf-8")

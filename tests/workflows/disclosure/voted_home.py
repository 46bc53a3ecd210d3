"""A recipe with `evaluation.disclosure: votes`, its runs, and the lines of its meter."""

import json
from typing import Any

import dagster as dg

from tests.workflows.homes import write_recipe
from tests.workflows.in_process import Baseline
from tests.workflows.state.test_versions import RECIPE
from workflows.commands.run import materialize
from workflows.commands.run_report import RunReport
from workflows.recipes.discovery import load_recipe

EVALUATION_KEY = dg.AssetKey(["plain", "evaluation"])
VOTES = {
    **RECIPE,
    "evaluation": {**RECIPE["evaluation"], "disclosure": "votes"},
    "release": {**RECIPE["release"], "gate": {"type": "ladder"}},
}


def run(baseline: Baseline, select: str | None = None, **edited: dict[str, Any]) -> RunReport:
    sections = {name: {**VOTES.get(name, {}), **fields} for name, fields in edited.items()}
    write_recipe(baseline.folders["plain"], {**VOTES, **sections})
    report = materialize(load_recipe(baseline.folders["plain"]), baseline.services, baseline.instance, select)
    assert report.succeeded, report.assets
    baseline.fingerprints["plain"] |= {asset.asset: asset.fingerprint for asset in report.assets}
    return report


def meter_lines(baseline: Baseline) -> list[dict[str, Any]]:
    file = baseline.home / "disclosure" / "plain.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]

"""The real pairs of rasbt arrive in six slices, for tiny-chat: promotion, flipped labels, the same policy again, rollback."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from model_registry.gate.ledger import Ledger, State
from tests.workflows.homes import write_recipe
from tests.workflows.in_process import Baseline, run_in
from workflows.commands.run import materialize
from workflows.commands.run_report import RunReport
from workflows.commands.verify import verify
from workflows.recipes.discovery import load_recipe

pytestmark = pytest.mark.long

SLICES = 6
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def rows(shared_data: Path) -> Rows:
    file = shared_data / "preferences" / "rasbt.instruction-data-with-preference.json"
    found: Rows = json.loads(file.read_text())
    return found


@pytest.fixture(scope="module")
def recipe(shared_data: Path) -> dict[str, Any]:
    return {
        "data": {"sources": [{"path": "rows.json"}], "validation_fraction": 0.15, "max_quarantined": 0.1},
        "reference": {"model": str(shared_data / "models" / "tiny-chat")},
        "training": {"max_steps": 10, "batch_size": 16, "optimizer": {"learning_rate": 3e-4}},
        "evaluation": {"samples": 1, "max_new_tokens": 4},
        "release": {"model_name": "rasbt"},
        "compute": {"device": "cpu"},
    }


@pytest.fixture(scope="module")
def home(rows: Rows, recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baseline]:
    """A home whose champion was trained for 10 steps on the first slice."""

    def write(folder: Path) -> None:
        write_slices(folder, rows, 1)

    with run_in(tmp_path_factory.mktemp("slices"), {"rasbt": recipe}, write) as made:
        yield made


def write_slices(folder: Path, rows: Rows, count: int, is_flipped: bool = False) -> None:
    part = rows[: count * len(rows) // SLICES]
    if is_flipped:
        part = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in part]
    (folder / "rows.json").write_text(json.dumps(part))


def test_promotion_flipped_labels_same_policy_and_rollback(home: Baseline, rows: Rows, recipe: dict[str, Any]):
    folder, registry = home.folders["rasbt"], home.services.registry
    longer = {**recipe, "training": {**recipe["training"], "max_steps": 100}}

    def run(slices: int, is_flipped: bool = False, **sections: Any) -> RunReport:
        write_slices(folder, rows, slices, is_flipped)
        write_recipe(folder, {**longer, **sections})
        report = materialize(load_recipe(folder), home.services, home.instance)
        assert report.succeeded, report
        return report

    def champion() -> int:
        found = registry.champion("rasbt")
        assert found is not None
        return found.number

    def ledger() -> Ledger:
        return Ledger.read(registry.connection, "rasbt")

    run(2)
    run(3)
    assert champion() == 2, "better after 100 steps than after 10"
    flipped = run(3, is_flipped=True)
    entries = ledger().entries
    same = run(3, evaluation={**recipe["evaluation"], "max_new_tokens": 5})
    assert not same.is_champion and "its policy is that of version " in (same.reasons or "")
    assert len(ledger().entries) == len(entries), "the same policy again uses up no level"
    run(4)
    registry.rollback("rasbt")
    run(4)
    run(5)
    run(6)
    assert champion() not in (1, 2), (
        "a candidate that waited replaces the restored champion; the rolled-back one does not"
    )
    of_flipped = [entry for entry in ledger().entries if entry.candidate == int(flipped.model_version or 0)]
    assert sum(entry.prompts for entry in of_flipped) > 100, "it was tested"
    assert State.PROMOTED not in {entry.state for entry in of_flipped}
    verified = verify(load_recipe(folder).pipeline, home.services, home.instance, rows=2)
    assert verified.ok and sum("hypothesis" in asset.asset for asset in verified.artifacts) == ledger().promotions > 1

"""With few pairs the defaults give a policy that is the base model: `plan`, `run` and `init` warn and propose settings."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.numpy import load_file

from assets.bodies.checks import DIFFERENCE
from tests.factories import PAIRS, write_inputs
from tests.workflows.homes import Home, check_error, check_values, write_recipe
from tests.workflows.in_process import Baseline
from tests.workflows.prepared_homes import PreparedHomes
from tests.workflows.state.test_truth_table import PLAIN
from training.contract.errors import DataError, ModelError, UsageError
from training.contract.protocol.artifacts import TOKENIZED_PAIRS
from workflows.cli import tables
from workflows.commands.plan import PlannedAsset, plan
from workflows.commands.run import materialize
from workflows.commands.run_report import RunReport
from workflows.recipes.discovery import load_recipe
from workflows.recipes.scaffold import init_recipe

DEFAULTS = {name: section for name, section in PLAIN.items() if name != "training"}
STILL = {**DEFAULTS, "release": {"model_name": "still"}}
MOVED = {**PLAIN, "training": {"epochs": 20, "batch_size": 4, "optimizer": {"learning_rate": 1e-3}}}


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory, prepared_homes: PreparedHomes) -> Iterator[Baseline]:
    with prepared_homes.copied_to(tmp_path_factory.mktemp("small_data"), {"still": STILL, "moved": MOVED}) as made:
        yield made


def again(baseline: Baseline, name: str) -> tuple[RunReport, str]:
    """Return the report of a run that reuses everything, and its text output."""
    report = materialize(load_recipe(baseline.folders[name]), baseline.services, baseline.instance)
    with open("/dev/null", "w") as nowhere:
        console = Console(width=200, record=True, file=nowhere)
        tables.run_report(console, report, with_samples=False)
    return report, console.export_text()


def train_pairs(baseline: Baseline, name: str) -> int:
    pairs = baseline.services.store.open(TOKENIZED_PAIRS, baseline.fingerprints[name]["tokenized_pairs"] or "")
    return pairs.details.counts.train


@pytest.mark.slow
def test_run_whose_policy_is_the_base_model_warns_and_names_what_to_set(baseline: Baseline) -> None:
    """At the defaults it takes one step at 5e-7."""
    report, seen = again(baseline, "still")
    [warning] = [check for check in report.warnings if check.check == DIFFERENCE]
    assert "reference model" in warning.description
    assert report.succeeded and report.is_champion
    [note] = report.notes
    count = train_pairs(baseline, "still")
    check_values(
        note, "1 step ", " 5e-7 ", f" {count} ", "training.batch_size: 4", "training.optimizer.learning_rate: 1e-4"
    )
    assert seen.index(warning.description) < seen.index(f"policy: {note}") < seen.index("is champion")


@pytest.mark.slow
def test_run_whose_policy_moved_warns_of_nothing(baseline: Baseline) -> None:
    report, _ = again(baseline, "moved")
    assert report.notes == []
    assert [check.passed for check in report.checks if check.check == DIFFERENCE] == [True]


def planned_policy(baseline: Baseline, folder: Path, attributes: dict[str, Any]) -> PlannedAsset:
    pipeline = load_recipe(write_recipe(folder, attributes)).pipeline
    return next(each for each in plan(pipeline, baseline.services, baseline.instance) if each.asset == "policy")


@pytest.mark.slow
def test_plan_notes_that_a_training_will_change_nothing(baseline: Baseline, tmp_path: Path) -> None:
    """The same pairs, another seed: a policy that was never trained."""
    (tmp_path / "still").mkdir()
    write_inputs(tmp_path / "still")
    found = planned_policy(baseline, tmp_path / "still", {**STILL, "training": {"seed": 1}})
    assert found.action == "compute"
    [note] = found.notes
    check_values(note, "1 step ", " 5e-7 ")
    written = re.findall(r"training\.([\w.]+): ([\w.-]+)", note)
    advised = {"seed": 1, "optimizer": {}} | {name: int(value) for name, value in written if "." not in name}
    advised["optimizer"] = {"learning_rate": dict(written)["optimizer.learning_rate"]}
    assert planned_policy(baseline, tmp_path / "still", {**STILL, "training": advised}).notes == ()


@pytest.mark.slow
def test_recipe_that_init_proposes_plans_without_a_note(baseline: Baseline, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    write_inputs(tmp_path / "own")
    file = init_recipe(tmp_path / "own", str(tmp_path / "own" / "preferences.jsonl"), str(tmp_path / "own" / "base"))
    pipeline = load_recipe(file.parent).pipeline
    found = {each.asset: each for each in plan(pipeline, baseline.services, baseline.instance)}
    assert (found["policy"].action, found["policy"].notes) == ("compute", ())


def test_init_writes_data_model_and_what_is_proposed_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 rows, of which a tenth is held out: 22 pairs, 6 steps an epoch of batches of 4, 10 epochs at the most.

    The model has some thousands of parameters, so its learning rate is at the limit. Data outside the folder have an absolute
    path.
    """
    (tmp_path / "my-model").mkdir()
    write_inputs(tmp_path / "my-model")
    odd = tmp_path / 'a: {"b"} #.jsonl'
    (tmp_path / "my-model" / "preferences.jsonl").rename(odd)
    monkeypatch.chdir(tmp_path)
    file = init_recipe(Path("my-model"), odd.name, "my-model/base")
    recipe = load_recipe(file.parent).pipeline.recipe
    assert PAIRS == 24 and (recipe.training.batch_size, recipe.training.epochs) == (4, 10)
    assert recipe.training.optimizer.learning_rate == 1e-4
    assert (recipe.data.sources[0].path, recipe.reference.model) == (str(odd), str(tmp_path / "my-model" / "base"))
    assert '"./base"' in file.read_text() and "arXiv 2310.16944" in file.read_text()
    weights = load_file(tmp_path / "my-model" / "base" / "model.safetensors")
    parameters = sum(tensor.size for tensor in weights.values())
    assert f" {parameters / 1e6:.3g} million parameters" in file.read_text()


def test_init_without_data_proposes_known_settings(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n" * 2)
    proposed = load_recipe(init_recipe(tmp_path / "data", str(tmp_path / "pairs.jsonl")).parent).pipeline.recipe
    assert (proposed.training.batch_size, proposed.training.optimizer.learning_rate) == (4, 5e-7)
    assert proposed.reference.model == str(tmp_path / "data" / "base"), "to be filled in"
    of_hub = load_recipe(init_recipe(tmp_path / "hub", model="org/name").parent).pipeline.recipe
    assert (of_hub.reference.model, of_hub.training.optimizer.learning_rate) == ("org/name", 5e-7)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"data": "none.jsonl"}, DataError, r"none\.jsonl .*\[no-files\]"),
        ({"model": "./none"}, UsageError, r"`--model \./none`: .*/none .*\[missing-folder\]"),
        ({"model": "."}, ModelError, r"\[no-weights\]"),
    ],
)
def test_init_with_missing_files_writes_nothing(
    arguments: dict[str, str], error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        init_recipe(tmp_path / "new", **arguments)
    assert not (tmp_path / "new").exists()


def test_init_names_fields_to_fill_in(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text("{}\n")
    home, data = Home(tmp_path / "home"), ("--data", str(tmp_path / "pairs.jsonl"))
    assert home.query("init", str(tmp_path / "a"), *data) == {"file": str(tmp_path / "a" / "defs.yaml")}
    seen = home.invoke("init", str(tmp_path / "b"), *data).stdout
    check_values(seen, str(tmp_path / "b"), "`reference.model`", "`pedigree plan ")
    seen = home.invoke("init", str(tmp_path / "c"), *data, "--model", "org/name").stdout
    assert "`reference.model`" not in seen and "`pedigree plan " in seen
    failed = home.invoke("init", str(tmp_path / "d"), "--model", "./none")
    assert failed.exit_code == 2
    check_error(failed.stderr, "missing-folder", "`--model ./none`")

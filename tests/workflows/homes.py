"""Small recipes, homes to run them in, and the command `pedigree` as a user runs it."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from click.testing import CliRunner, Result

from assets.lineage.history import Materialization, latest_of
from assets.pipeline.pipeline import Pipeline, Services
from workflows.cli.main import main
from workflows.orchestration.resources import build_services
from workflows.recipes.discovery import load_recipe

ROOT = Path(__file__).resolve().parents[2]
PEDIGREE = str(Path(sys.executable).with_name("pedigree"))
PAIRS = 160

# Enough steps to learn something, few enough to be quick.
ATTRIBUTES: dict[str, Any] = {
    "data": {"sources": [{"path": "preferences.jsonl"}], "validation_fraction": 0.25},
    "tokenization": {"max_length": 128},
    "reference": {"model": "./base"},
    "training": {"max_steps": 12, "batch_size": 16, "optimizer": {"learning_rate": 1e-3, "eps": 1e-6}},
    "evaluation": {"samples": 2, "max_new_tokens": 4},
    "release": {"model_name": "small"},
    "compute": {"processes_per_node": 2, "evaluate_every": 6, "checkpoint_every": 4, "device": "cpu"},
    "automation": {"cron": "0 6 * * 1"},
}


@dataclass(frozen=True)
class Home:
    """A PEDIGREE_HOME and the command within it."""

    path: Path

    @property
    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DAGSTER_", "MLFLOW_", "PEDIGREE_"))}
        return {**kept, "PEDIGREE_HOME": str(self.path), "OMP_NUM_THREADS": "1"}

    def pedigree(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [PEDIGREE, *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False, timeout=500)

    def run(self, *arguments: str) -> Any:
        """Run `pedigree run --json` and return its report. Nothing else may be on stdout."""
        done = self.pedigree("run", *arguments, "--json")
        assert done.returncode == 0, done.stderr + done.stdout
        return json.loads(done.stdout)

    def invoke(self, *arguments: str) -> Result:
        """Run the command in this process: a process of its own spends seconds on imports."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PEDIGREE_HOME", str(self.path))
            patch.setenv("DAGSTER_HOME", str(self.path / "dagster"))
            patch.delenv("MLFLOW_TRACKING_URI", raising=False)
            return CliRunner().invoke(main, arguments)

    def query(self, *arguments: str) -> Any:
        """Run the command with --json in this process and return its answer."""
        done = self.invoke(*arguments, "--json")
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)


def copy_without_policy(home: Home, place: Path) -> Home:
    """Return a copy, in the folder `place`, of a home in which everything was made. The copy lacks the policy."""
    copy = Home(place)
    shutil.copytree(home.path, copy.path)
    for folder in ("store/policy", "store/keys/policy", "jobs"):
        shutil.rmtree(copy.path / folder)
    return copy


def write_recipe(folder: Path, attributes: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    recipe = {"type": "workflows.PreferenceTuning", "attributes": attributes}
    (folder / "defs.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    return folder


@dataclass
class Checkout:
    """A home with its store and its Dagster instance. Edited recipes in `folder` keep the name of the recipe that was run."""

    home: Path
    folder: Path
    instance: dg.DagsterInstance

    @property
    def services(self) -> Services:
        return build_services(self.home)

    @property
    def pipeline(self) -> Pipeline:
        return load_recipe(self.folder).pipeline


def check_out(home: Home, recipe: Path, workplace: Path, copy_home: bool = False) -> Checkout:
    """Return `home`, or a copy of it, with a copy of the recipe that may be edited."""
    folder = workplace / recipe.name
    shutil.copytree(recipe, folder)
    place = Path(shutil.copytree(home.path, workplace / "home")) if copy_home else home.path
    return Checkout(place, folder, dg.DagsterInstance.from_config(str(place / "dagster")))


def edit(checkout: Checkout, attributes: dict[str, object]) -> None:
    write_recipe(checkout.folder, attributes)


def latest(instance: dg.DagsterInstance, key: dg.AssetKey) -> Materialization:
    """Return the latest materialization of the asset `key`."""
    return latest_of(instance, [key])[key]


def check_error(message: object, code: str, *values: object) -> None:
    """Check that an error's message ends with its code and holds `values`; its wording may change."""
    assert str(message).strip().endswith(f"[{code}]"), message
    check_values(message, *values)


def check_values(message: object, *values: object) -> None:
    """Check that a message holds `values`; its wording may change."""
    assert [value for value in map(str, values) if value not in str(message)] == [], message


def flip(path: Path, position: int | None = None) -> None:
    """Flip a bit of the byte at `position`, by default in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 1
    path.write_bytes(content)

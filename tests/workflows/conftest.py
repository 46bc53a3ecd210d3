"""A whole recipe in small, outside the project, and the command `pedigree` as a person runs it."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from workflows import cli

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
        """What `pedigree run` prints with --json, after making sure that it is all it printed."""
        done = self.pedigree("run", *arguments, "--json")
        assert done.returncode == 0, done.stderr + done.stdout
        return json.loads(done.stdout)

    def invoke(self, *arguments: str) -> Result:
        """The command in this process: one of its own spends seconds on imports."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PEDIGREE_HOME", str(self.path))
            patch.setenv("DAGSTER_HOME", str(self.path / "dagster"))
            patch.delenv("MLFLOW_TRACKING_URI", raising=False)
            return CliRunner().invoke(cli.main, arguments)

    def look(self, *arguments: str) -> Any:
        """What the command prints with --json in this process."""
        done = self.invoke(*arguments, "--json")
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)


def write_recipe(folder: Path, attributes: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    recipe = {"type": "workflows.PreferenceTuning", "attributes": attributes}
    (folder / "defs.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    return folder


@pytest.fixture(scope="session")
def demo_maker() -> ModuleType:
    """The script of the demo recipe, whose pairs, tokenizer and model are the tests' as well."""
    spec = importlib.util.spec_from_file_location("demo_make", ROOT / "workflows" / "defs" / "demo" / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo_make"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def small_recipe(tmp_path_factory: pytest.TempPathFactory, demo_maker: ModuleType) -> Path:
    """A folder as a person would drop it: recipe, pairs, a base model with random weights."""
    folder = tmp_path_factory.mktemp("recipes") / "small"
    write_recipe(folder, ATTRIBUTES)
    rows = list(itertools.islice(demo_maker.pairs(), PAIRS))
    (folder / "preferences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = demo_maker.make_tokenizer([m["content"] for row in rows for side in row.values() for m in side])
    tokenizer.save_pretrained(folder / "base")
    demo_maker.make_model(tokenizer).save_pretrained(folder / "base")
    return folder


@pytest.fixture(scope="session")
def new_home(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Home]:
    return lambda: Home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def materialized(small_recipe: Path, new_home: Callable[[], Home]) -> tuple[Home, dict[str, Any]]:
    """A home in which the small recipe was run once, on two processes, and what the command said."""
    home = new_home()
    return home, home.run(str(small_recipe))

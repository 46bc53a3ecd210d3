"""A hub on this machine with a model, a tokenizer and data sets, and a process that uses only this hub."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.factories import write_inputs
from tests.hub.server import Hub, serving
from tests.workflows.homes import ROOT, write_recipe
from tests.workflows.question_pairs import pairs

TOKEN = "hf_a-secret-nobody-shall-find-anywhere"


@dataclass
class Resident:
    """The process of `tests.hub.resident` with its home and its HF_HOME."""

    process: "subprocess.Popen[str]"
    home: Path
    cache: Path

    def ask(self, do: str, recipe: Path, **more: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, "recipe": str(recipe), **more}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def found(self, do: str, recipe: Path, **more: Any) -> Any:
        answer = self.ask(do, recipe, **more)
        assert "found" in answer, answer
        return answer["found"]

    def outcomes(self, recipe: Path, **more: Any) -> dict[str, str]:
        """Run a recipe, require success, and return the outcome of each asset."""
        report = self.found("run", recipe, **more)
        assert report["succeeded"], [asset["error"] for asset in report["assets"]]
        return {asset["asset"]: asset["outcome"] for asset in report["assets"]}

    def refusal(self, recipe: Path, asset: str) -> str:
        """Return the error of a failing run of `asset`."""
        [failed] = [a for a in self.found("run", recipe, select=asset)["assets"] if a["outcome"] == "failed"]
        return str(failed["error"])


def environment(hub: Hub, cache: Path, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "DAGSTER_", "MLFLOW_", "PEDIGREE_"))}
    path = os.pathsep.join([str(ROOT), str(ROOT / "mlflow")])
    places = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(cache), "PYTHONPATH": path}
    return {**kept, **places, "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1,localhost", **more}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serving() as hub:
        yield hub


@pytest.fixture(scope="module")
def resident(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resident]:
    home, cache = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("hf")
    with open(home / "stderr.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.hub.resident", str(home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(hub, cache),
            cwd=ROOT,
            text=True,
        )
    with process:
        yield Resident(process, home, cache)


@pytest.fixture(scope="package")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model and its tokenizer in `base`, and rows in `preferences.jsonl`."""
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="package")
def rows() -> list[dict[str, Any]]:
    return list(itertools.islice(pairs(), 0, 400, 17))


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a recipe with all inputs from the hub."""

    def write(model: str, source: dict[str, Any] | list[dict[str, Any]], **more: Any) -> Path:
        attributes = {
            "data": {"sources": source if isinstance(source, list) else [source], "validation_fraction": 0.25},
            "tokenization": {"max_length": 128, **more.get("tokenization", {})},
            "reference": {"model": model, **more.get("reference", {})},
            "training": {"max_steps": 2, "batch_size": 8},
            "evaluation": {"samples": 1, "max_new_tokens": 2},
            "release": {"model_name": more.get("name", "hub")},
            "compute": {"device": "cpu"},
        }
        return write_recipe(tmp_path / more.get("name", "hub"), attributes)

    return write

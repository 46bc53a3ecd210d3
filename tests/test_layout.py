"""The folder `mlflow/` is a source root, not a package; Dagster's process stays free of torch.

With an `__init__.py` there, or a folder `tests/mlflow`, `import mlflow` could import our folder instead of the installed
library.
"""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SLOW_FIXTURES

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ["torch", "transformers", "datasets", "matplotlib"]
# One process imports them in this order: starting a process costs seconds.
LIGHT_MODULES = [
    "mlflow",
    "model_registry.gate.ladder",
    "model_registry.registry",
    "model_registry.tracking",
    "workflows.definitions",
]
IMPORT_ALL = """
import importlib, json, sys
print(json.dumps({name: [h for h in HEAVY if importlib.import_module(name) and h in sys.modules] for name in NAMES}))
"""


def last_line_of(code: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_the_source_root_is_not_a_package():
    assert not (ROOT / "mlflow" / "__init__.py").exists()
    assert not (ROOT / "tests" / "mlflow").exists()
    assert {path.name for path in (ROOT / "mlflow").iterdir()} - {"__pycache__"} == {"model_registry"}


@pytest.mark.parametrize("folder", ["the repository", "its source root", "elsewhere"])
def test_import_mlflow_finds_the_installed_library(folder: str, tmp_path: Path):
    cwd = {"the repository": ROOT, "its source root": ROOT / "mlflow", "elsewhere": tmp_path}[folder]
    found = Path(last_line_of("from mlflow import MlflowClient; import mlflow; print(mlflow.__file__)", cwd))
    assert "site-packages" in found.parts
    assert found.name == "__init__.py"


def test_light_modules_do_not_import_torch():
    loaded = last_line_of(f"HEAVY, NAMES = {HEAVY}, {LIGHT_MODULES}\n{IMPORT_ALL}", ROOT)
    assert json.loads(loaded) == {name: [] for name in LIGHT_MODULES}


def test_import_contracts_find_torch_behind_another_module(tmp_path: Path):
    """Run the contracts of `make check` over a copy in which an asset imports a module that imports torch."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in ("workflows", "assets", "training", "mlflow"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(tmp_path / "mlflow")])}
    outcomes = []
    for added in ("", "\nimport training.checkpoint.checkpoint\n"):
        with open(tmp_path / "assets" / "views" / "pair_page.py", "a") as file:
            file.write(added)
        outcomes.append(subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True))
    clean, dirty = (done.stdout for done in outcomes)
    contract = "No torch in Dagster's process"
    assert f"{contract} KEPT" in clean
    assert f"{contract} BROKEN" in dirty and "assets.views.pair_page -> training.checkpoint.checkpoint" in dirty


def test_the_benchmarks_can_be_imported():
    """No test runs them, so this one finds a change that breaks them. The peers import TRL, an extra."""
    files = [path.relative_to(ROOT) for path in (ROOT / "benchmarks").rglob("*.py") if not path.stem.endswith("peer")]
    modules = {".".join(path.with_suffix("").parts) for path in files}
    assert {"benchmarks.training", "benchmarks.gpu.once", "benchmarks.hashing"} <= modules
    for name in modules:
        importlib.import_module(name)


def test_slow_fixtures_are_fixtures():
    """A renamed fixture would no longer mark its tests slow."""
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    fixtures = set(re.findall(r"@pytest\.fixture\b.*\ndef (\w+)\(", sources))
    assert fixtures >= SLOW_FIXTURES

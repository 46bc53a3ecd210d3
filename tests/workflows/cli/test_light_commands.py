"""Everyday commands import no large library that they do not use: it would take most of their time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workflows.homes import Home

pytestmark = pytest.mark.slow  # shares one run of the small recipe with other tests

HEAVY = ["datasets", "fastapi", "huggingface_hub", "matplotlib", "mlflow", "peft", "scipy", "torch", "transformers"]
PROGRAM = """
import json, sys
import pedigree
try:
    pedigree.main()
finally:
    print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})), file=sys.stderr)
"""


@pytest.fixture
def home(first_run, tmp_path: Path) -> Home:
    copy = Home(tmp_path / "home")
    subprocess.run(["cp", "--archive", first_run[0].path, copy.path], check=True)
    return copy


@pytest.mark.parametrize(("command", "heavy"), [("status", [*HEAVY, "pandas"]), ("run", HEAVY)])
def test_command_on_an_unchanged_recipe_imports_no_heavy_library(
    command: str, heavy: list[str], home: Home, small_recipe: Path
):
    arguments = [sys.executable, "-c", PROGRAM, command, str(small_recipe), "--json"]
    done = subprocess.run(arguments, env=home.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer, imported = json.loads(done.stdout), json.loads(done.stderr.splitlines()[-1])
    states = {asset.get("state") or asset["outcome"] for asset in answer["assets"]}
    assert states == {"fresh" if command == "status" else "reused"}
    assert "dagster" in imported and sorted(set(imported) & set(heavy)) == []

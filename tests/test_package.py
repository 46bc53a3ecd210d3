"""The wheel of the project: it holds every template and marker of types beside the modules."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
PACKAGES = {"assets": ROOT, "training": ROOT, "workflows": ROOT, "model_registry": ROOT / "mlflow"}


def test_wheel_holds_modules_templates_and_markers(tmp_path: Path):
    """The build runs in a copy, because setuptools writes into the folder of the project."""
    project = tmp_path / "project"
    for package, folder in PACKAGES.items():
        source = folder / package
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, project / source.relative_to(ROOT), ignore=ignore)
    for name in ("pyproject.toml", "pedigree.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    subprocess.run([sys.executable, "-c", BUILD, tmp_path], cwd=project, capture_output=True, check=True)
    [wheel] = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        path.relative_to(folder).as_posix()
        for package, folder in PACKAGES.items()
        for pattern in ("*.py", "*.j2", "py.typed")
        for path in (folder / package).rglob(pattern)
    }
    own = {name for name in expected if not name.startswith("workflows/defs/")}  # those of the user stay at home
    assert {name for name in packed if not name.startswith("workflows/defs/")} == {*own, "pedigree.py"}
    assert "training/evaluation/templates/report.html.j2" in packed

"""Tests work in copies of prepared homes, so none of them changes the home of another."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from assets.pipeline.graph import GRAPH
from tests.workflows.in_process import Baseline
from tests.workflows.prepared_homes import PreparedHomes
from tests.workflows.state.test_truth_table import PLAIN
from workflows.commands.run import materialize
from workflows.recipes.discovery import load_recipe
from workflows.state.status import status

RECIPES = {"plain": PLAIN}


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return the content and the inode of each file."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_ino) for path in found}


def states(baseline: Baseline) -> set[str]:
    found = status(load_recipe(baseline.folders["plain"]).pipeline, baseline.services, baseline.instance)
    return {asset.state for asset in found}


def test_copied_home_is_fresh_and_a_run_reuses_all(prepared_homes: PreparedHomes, tmp_path: Path) -> None:
    with prepared_homes.copied_to(tmp_path, RECIPES) as copy:
        assert states(copy) == {"fresh"}
        report = materialize(load_recipe(copy.folders["plain"]), copy.services, copy.instance)
        assert {asset.asset: asset.fingerprint for asset in report.assets} == copy.fingerprints["plain"]
        assert "computed" not in {asset.outcome for asset in report.assets}


def test_copied_home_shares_no_file_or_record_with_the_prepared_one(
    prepared_homes: PreparedHomes, tmp_path: Path
) -> None:
    """A test deletes the store, rewrites every other file in place, and adds records."""
    prepared = prepared_homes.prepare(RECIPES)
    before = files(prepared)
    with prepared_homes.copied_to(tmp_path / "first", RECIPES) as copy:
        assert {inode for _, inode in files(tmp_path / "first").values()}.isdisjoint(
            inode for _, inode in before.values()
        )
        copy.restore("plain")
        shutil.rmtree(copy.home / "store")
        for path in (tmp_path / "first").rglob("*"):
            if path.is_file():
                path.chmod(0o600)
                path.write_bytes(b"")
    assert files(prepared) == before
    with prepared_homes.copied_to(tmp_path / "second", RECIPES) as copy:
        assert states(copy) == {"fresh"}
        runs = copy.instance.get_runs()
        assert len(runs) == 1 and len(copy.records["plain"]) == len(GRAPH)


def test_copied_home_names_no_path_of_the_prepared_one(prepared_homes: PreparedHomes, tmp_path: Path) -> None:
    """MLflow would write the files of a run to its old address, and Dagster's pages would link there."""
    prepared = str(prepared_homes.prepare(RECIPES))
    with prepared_homes.copied_to(tmp_path, RECIPES) as copy:
        with closing(sqlite3.connect(copy.home / "mlflow" / "mlflow.db")) as database:
            [(address,)] = database.execute("SELECT DISTINCT storage_location FROM model_versions").fetchall()
        assert str(copy.home) in address
        assert all(prepared not in str(record) for record in copy.records["plain"])

"""`pedigree verify`: it finds nothing wrong in an intact home, and names each kind of damage."""

import errno
import json
import math
import os
import shutil

import dagster as dg
import numpy as np
import pytest
from safetensors.numpy import load_file

from assets.lineage.diff import CORRUPT_RECORD, NO_RECORD
from tests.workflows.homes import ATTRIBUTES, Home, check_values, edit, flip
from training.contract.errors import UsageError
from training.contract.identity.file_hashing import hash_file
from training.contract.identity.hash_cache import file_hashes
from training.contract.protocol.details import RescoredPair
from training.contract.store.logprob_table import LogProbTable
from training.contract.store.manifest import MANIFEST, read_manifest
from workflows.commands.verify import agrees, verify
from workflows.state.status import LOST

pytestmark = pytest.mark.slow


def folder_of(checkout, materialized, asset):
    [fingerprint] = [a["fingerprint"] for a in materialized[1]["assets"] if a["asset"] == asset]
    return checkout.home / "store" / asset / fingerprint


def faults(checkout):
    found = verify(checkout.pipeline, checkout.services, checkout.instance, rows=0)
    assert found.ok == all(asset.ok for asset in found.artifacts)
    return {asset.asset: asset.fault for asset in found.artifacts if not asset.ok}


def test_verify_of_an_intact_recipe_finds_nothing(checkout, materialized):
    """The live values are computed anew: the table holds sums of another batch."""
    found = verify(checkout.pipeline, checkout.services, checkout.instance, rows=5)
    assert found.ok and found.tolerance == 0.001 and found.advice is None
    assert [a.asset for a in found.artifacts] == [a["asset"] for a in materialized[1]["assets"]]
    stored = load_file(folder_of(checkout, materialized, "reference_logprobs") / "logprobs.safetensors")
    assert [row.row for row in found.rescored] == [0, 40, 80, 119, 159]
    for row in found.rescored:
        assert row.chosen.stored == stored["chosen_logprobs"][row.row]
        assert math.isclose(row.chosen.live, row.chosen.stored, abs_tol=1e-3)


def test_verify_of_changed_files_outside_the_store(checkout):
    (checkout.folder / "preferences.jsonl").write_text("{}\n")
    flip(checkout.folder / "base" / "model.safetensors")
    found = faults(checkout)
    assert found.keys() == {"preference_source", "base_model"}
    check_values(found["preference_source"], "preferences.jsonl ", "160 -> 1 rows")
    check_values(found["base_model"], "model.safetensors")


def test_verify_of_missing_files_outside_the_store(checkout):
    (checkout.folder / "preferences.jsonl").unlink()
    [(asset, fault)] = faults(checkout).items()
    assert asset == "preference_source" and "preferences.jsonl" in fault


def test_verify_of_a_release_under_another_name_finds_nothing(checkout):
    edit(checkout, {**ATTRIBUTES, "release": {"model_name": "renamed"}})
    assert faults(checkout) == {}


def test_verify_reports_flipped_bits_and_missing_files(checkout, materialized):
    flip(folder_of(checkout, materialized, "policy") / "model.safetensors")
    (folder_of(checkout, materialized, "evaluation") / "report.html").unlink()
    flip(folder_of(checkout, materialized, "evaluation_spec") / "manifest.json")
    shutil.rmtree(folder_of(checkout, materialized, "training_spec"))
    flip(next((checkout.home / "store" / "memo").glob("*/*/*.safetensors")))
    record = checkout.home / "store" / "keys" / "raw_preferences"
    flip(next(record.iterdir()))
    next((record.parent / "tokenized_pairs").iterdir()).unlink()
    found = faults(checkout)
    assert found["raw_preferences"] == CORRUPT_RECORD
    assert (found["tokenized_pairs"], found["training_spec"]) == (NO_RECORD, LOST)
    check_values(found["policy"], "file model.safetensors ", "corrupt")
    check_values(found["evaluation"], "file report.html ", "corrupt")
    check_values(found["evaluation_spec"], "manifest", "corrupt")
    check_values(found["reference_logprobs"], "1 shards ", ".safetensors ", "corrupt")


def test_verify_reports_an_unreadable_file_beside_the_rest(checkout, materialized, monkeypatch):
    folder = folder_of(checkout, materialized, "policy")

    def refused(paths, cache):
        if any(path.is_relative_to(folder) for path in paths):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return file_hashes(paths, cache)

    monkeypatch.setattr("training.contract.store.manifest.file_hashes", refused)
    flip(folder_of(checkout, materialized, "evaluation") / "report.html")
    found = faults(checkout)
    assert set(found) == {"policy", "evaluation"}
    check_values(found["policy"], f"{folder} ", os.strerror(errno.EIO))


def test_verify_finds_a_wrong_value_by_scoring_again(checkout, materialized):
    """A table with one wrong value and a fitting manifest, as a wrong mask or precision would give."""
    folder = folder_of(checkout, materialized, "reference_logprobs")
    table = LogProbTable.read(folder, 160)
    table.logprobs_P2[0, 0] += np.float64(0.5)
    table.write(folder)
    manifest, name = read_manifest(folder), "logprobs.safetensors"
    entry = manifest.files[name].model_copy(update={"sha256": hash_file(folder / name)})
    fitting = manifest.model_copy(update={"files": {**manifest.files, name: entry}})
    (folder / MANIFEST).write_bytes(fitting.dumps())
    done = Home(checkout.home).pedigree("verify", str(checkout.folder), "--rows", "3", "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert not found["ok"] and all(asset["ok"] and asset["fault"] is None for asset in found["artifacts"])
    [row] = [r for r in found["rescored"] if r["row"] == 0]
    assert row["chosen"]["stored"] - row["chosen"]["live"] == pytest.approx(0.5, abs=1e-3)
    assert row["rejected"]["stored"] == pytest.approx(row["rejected"]["live"], abs=1e-3)
    assert f"`pedigree rescore {checkout.pipeline.argument}`" in found["advice"]


@pytest.mark.parametrize(
    ("chosen", "rejected", "agree"),
    [(0.125, -0.125, True), (0.25, 0, False), (0, -0.25, False), (math.nan, 0, False), (0, math.nan, False)],
)
def test_a_row_agrees_where_both_sides_do(chosen, rejected, agree):
    sides = {"chosen": chosen, "rejected": rejected}
    row = {side: {"stored": -5.0, "live": -5.0 + off, "allowed": 0.125} for side, off in sides.items()}
    assert agrees(RescoredPair.model_validate({"row": 0, **row})) == agree


def test_nothing_to_verify_is_wrong_use(checkout):
    with (
        dg.DagsterInstance.ephemeral() as instance,
        pytest.raises(UsageError, match=r" small .*pedigree run \S+/small`.*\[nothing-materialized\]"),
    ):
        verify(checkout.pipeline, checkout.services, instance, rows=1)

"""Settings keep the keys that version 0.1.0 gave them: artifacts of homes made before are found.

`settings_keys.json` was written by that version. A change of it makes users train again.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from assets.pipeline.graph import GRAPH
from training.contract.config.key_settings import key_settings
from training.contract.config.recipe import Recipe
from training.contract.config.variants import merged
from training.contract.identity.fingerprint import fingerprint, short
from training.contract.protocol.job import Job
from training.contract.protocol.settings import TrainingSpec

GOLDEN = json.loads((Path(__file__).parent / "settings_keys.json").read_text(encoding="utf-8"))
MINIMAL = {
    "data": {"sources": [{"path": "x"}]},
    "reference": {"model": "y"},
    "release": {"model_name": "z"},
    "automation": {"on_change": False},
}
OF_THIS_MACHINE = ("software", "scoring")


def recipe_of(case: str) -> Recipe:
    return Recipe.model_validate(merged(MINIMAL, json.loads(case)))


def key_of(settings: dict[str, Any]) -> str:
    """Return a digest of the settings, without the versions of libraries."""
    return short(fingerprint("settings", {k: v for k, v in settings.items() if k not in OF_THIS_MACHINE}))


ADDED = {"prequential_scores"}  # assets of later versions


@pytest.mark.parametrize("case", GOLDEN)
def test_key_settings_of_a_recipe_equal_those_of_the_first_version(case: str):
    recipe = recipe_of(case)
    keys = {asset: key_of(key_settings(node.reads(recipe))) for asset, node in GRAPH.items()}
    assert {asset: keys[asset] for asset in GOLDEN[case]} == GOLDEN[case]
    assert keys.keys() - GOLDEN[case].keys() == ADDED


@pytest.mark.parametrize("case", GOLDEN)
def test_job_written_and_read_has_the_same_key(case: str, tmp_path: Path):
    recipe = recipe_of(case)
    job = Job(
        kind="policy",
        artifact="policy",
        code_version="1",
        inputs={},
        settings=TrainingSpec.of(recipe),
        locations={},
        compute=recipe.compute,
        recipe=recipe,
        store=tmp_path,
        folder=tmp_path,
    )
    assert Job.read(job.write()).derivation.key == job.derivation.key

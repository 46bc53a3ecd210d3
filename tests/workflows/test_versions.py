"""Versions that are registered, and what people do with them: rolled back, promoted by hand, and their files removed."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.workflows.homes import write_recipe
from tests.workflows.in_process import Ground, run_in
from tests.workflows.test_truth_table import PLAIN
from workflows.execution import RunReport, materialize
from workflows.recipes import load_recipe

pytestmark = pytest.mark.slow

# Of 24 pairs enough are held out for the gate, and more steps give a loss that is clearly lower.
FAST = {"max_steps": 2, "batch_size": 4, "optimizer": {"learning_rate": 1e-2}}
RECIPE = {**PLAIN, "data": {**PLAIN["data"], "validation_fraction": 0.5}, "training": FAST}


@pytest.fixture
def ground(tmp_path: Path, demo_maker: ModuleType) -> Iterator[Ground]:
    with run_in(tmp_path, demo_maker, {"plain": RECIPE}) as made:
        yield made


def run(ground: Ground, **edited: dict[str, Any]) -> RunReport:
    """A run of the recipe with some fields of some sections edited."""
    sections = {name: {**RECIPE[name], **fields} for name, fields in edited.items()}
    write_recipe(ground.folders["plain"], {**RECIPE, **sections})
    report = materialize(load_recipe(ground.folders["plain"]), ground.services, ground.instance)
    assert report.succeeded, report.assets
    return report


def test_a_policy_that_was_rolled_back_does_not_return_as_another_version(ground: Ground):
    """The gate found it better, and would again, after an edit that leaves the policy as it is."""
    registry, longer = ground.services.registry, {"max_steps": 8}
    promoted = run(ground, training=longer)
    assert (promoted.model_version, promoted.is_champion) == ("2", True)
    registry.rollback("plain")
    again = run(ground, training=longer, evaluation={"max_new_tokens": 3})
    assert (again.model_version, again.is_champion, registry.champion("plain").number) == ("3", False, 1)
    assert again.reasons == f"its policy is that of version 2, which was rolled back; {promoted.reasons}"
    MlflowClient(registry.tracking_uri).set_registered_model_alias("plain", "champion", "2")
    by_hand = run(ground, training=longer)
    told = f"it was champion and was rolled back; a person has made it champion again; {promoted.reasons}"
    assert (by_hand.model_version, by_hand.is_champion, by_hand.reasons) == ("2", True, told)

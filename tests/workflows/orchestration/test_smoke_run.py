"""A smoke run trains a few steps on the longest pairs and leaves no materialization, run, version, policy or subset."""

import logging
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pytest

from assets.pipeline.graph import GRAPH
from tests.factories import write_inputs
from tests.workflows.homes import ATTRIBUTES, write_recipe
from tests.workflows.in_process import services_in
from training.contract.protocol.artifacts import TOKENIZED_PAIRS
from workflows.orchestration.resources import io_manager
from workflows.orchestration.smoke_run import _select_longest, smoke_run
from workflows.recipes.discovery import LoadedRecipe, load_recipe

pytestmark = pytest.mark.slow

STEPS = 3
SFT = {"model": "./base", "sft": {"epochs": 50}}


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedRecipe:
    folder = tmp_path / "recipe"
    folder.mkdir()
    write_inputs(folder)
    training = {**ATTRIBUTES["training"], "max_steps": None, "epochs": 2, "batch_size": 2}
    return load_recipe(write_recipe(folder, {**ATTRIBUTES, "training": training, "reference": SFT}))


def test_smoke_run_trains_and_leaves_nothing(loaded: LoadedRecipe, tmp_path: Path) -> None:
    """It runs again if repeated. The 50 epochs of supervised tuning are skipped."""
    services, pipeline = services_in(tmp_path / "home"), loaded.pipeline
    for _ in range(2):
        found = smoke_run(pipeline, services, STEPS, logging.getLogger(__name__))
        assert found.steps == STEPS and found.first_loss == pytest.approx(0.6931, abs=1e-3)
        assert f"the {found.recipe_steps} steps of the recipe" in str(found)
        for kind in ("policy", "reference_logprobs", "released_model"):
            assert services.store.fingerprints(kind) == [], kind
    [pairs] = services.store.fingerprints("tokenized_pairs")
    train = services.store.open(TOKENIZED_PAIRS, pairs).details.counts.train
    assert found.recipe_steps == 2 * -(-train // 2)
    assert services.tracker.experiment_id(pipeline.family) is None
    assert services.registry.versions() == []


def test_smoke_job_has_the_steps_as_its_only_field_and_materializes_nothing(
    loaded: LoadedRecipe, tmp_path: Path
) -> None:
    resources = {"services": services_in(tmp_path / "home"), "io_manager": io_manager}
    job = dg.Definitions.merge(loaded.definitions, dg.Definitions(resources=resources)).resolve_job_def("recipe_smoke")
    fields = job.run_config_schema.config_type.fields  # type: ignore[attr-defined]
    assert list(fields["ops"].config_type.fields) == ["recipe_smoke_run"]
    run_config = {"ops": {"recipe_smoke_run": {"config": {"steps": 1}}}}
    with dg.DagsterInstance.ephemeral() as instance:
        result = job.execute_in_process(instance=instance, run_config=run_config)
        assert result.success
        assert not any(instance.get_latest_materialization_event(loaded.pipeline.key(asset)) for asset in GRAPH)
        texts = [entry.user_message for entry in instance.all_logs(result.run_id)]
    assert any(text.startswith("1 step on the longest pairs took") for text in texts)


def test_longest_pairs_are_those_of_a_sort_in_python() -> None:
    lengths = [(3, 4, "train"), (9, 1, "train"), (5, 5, "validation"), (2, 2, "train"), (8, 8, "train")]
    table = pa.table(
        {
            "row": range(5),
            "split": [split for *_, split in lengths],
            "chosen_ids": [[0] * chosen for chosen, *_ in lengths],
            "rejected_ids": [[0] * rejected for _, rejected, _ in lengths],
        }
    )
    assert _select_longest(table, 2)["row"].to_pylist() == [1, 2, 4]
    assert _select_longest(table, 9)["row"].to_pylist() == [0, 1, 2, 3, 4]

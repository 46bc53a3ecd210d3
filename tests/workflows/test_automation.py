"""The schedule and the sensor of a recipe: what they ask for, and when."""

import json

import dagster as dg
import pytest

from assets.graph import GRAPH
from tests.workflows.conftest import ATTRIBUTES, write_recipe
from workflows.recipes import load_recipe
from workflows.resources import services

ROW = {
    "prompt": [{"role": "user", "content": "Why?"}],
    "chosen": [{"role": "assistant", "content": "Because."}],
    "rejected": [{"role": "assistant", "content": "No."}],
}


class Sensed:
    """A recipe's sensor with its cursor, and the means to make the run that it asks for see the data."""

    def __init__(self, folder, instance):
        self.folder, self.instance, self.cursor = folder, instance, None
        loaded = load_recipe(folder)
        self.key = loaded.pipeline.key("preference_source")
        self.definitions = dg.Definitions.merge(
            loaded.definitions, dg.Definitions(resources={"services": services}, executor=dg.in_process_executor)
        )

    def write(self, *texts):
        rows = [{**ROW, "prompt": [{"role": "user", "content": text}]} for text in texts]
        (self.folder / "preferences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def look(self):
        """Materialize `preference_source`, as every run does first."""
        job = self.definitions.resolve_implicit_global_asset_job_def()
        assert job.execute_in_process(instance=self.instance, asset_selection=[self.key]).success

    def requests(self):
        """How many runs one tick asks for."""
        sensor = self.definitions.resolve_sensor_def("small_data_sensor")
        with dg.build_sensor_context(self.instance, self.cursor, definitions=self.definitions) as context:
            result = sensor.evaluate_tick(context)
        self.cursor = result.cursor or self.cursor
        return len(result.run_requests or [])


@pytest.fixture
def sensed(tmp_path, monkeypatch):
    monkeypatch.setenv("PEDIGREE_HOME", str(tmp_path / "home"))
    with dg.DagsterInstance.ephemeral() as instance:
        sensed = Sensed(write_recipe(tmp_path / "small", ATTRIBUTES), instance)
        sensed.write("Why?")
        yield sensed


def test_the_sensor_leaves_the_first_run_to_a_person(sensed):
    assert sensed.requests() == 0


def test_the_sensor_asks_once_for_each_change_of_the_bytes(sensed):
    sensed.look()
    assert sensed.requests() == 0
    (sensed.folder / "preferences.jsonl").touch()
    assert sensed.requests() == 0
    sensed.write("Why?", "How?")
    assert [sensed.requests(), sensed.requests()] == [1, 0]
    sensed.look()
    assert sensed.requests() == 0
    sensed.write("Why?")
    assert [sensed.requests(), sensed.requests()] == [1, 0]


def test_the_schedule_asks_for_the_whole_graph(sensed):
    definitions = sensed.definitions
    schedule = definitions.resolve_schedule_def("small_schedule")
    assert schedule.cron_schedule == "0 6 * * 1"
    assert schedule.default_status == dg.DefaultScheduleStatus.RUNNING
    job = definitions.resolve_job_def("small_retrain")
    assert {key.path[1] for key in job.asset_layer.executable_asset_keys} == set(GRAPH)

"""Causes on the pages of assets: one event for each change, and no run."""

import json
from pathlib import Path

import dagster as dg
import pytest

from assets.pipeline.graph import GRAPH
from assets.views.metadata import verbatim
from tests.workflows.automation_ticks import BELOW_ROWS, OTHER_BETA, Conditions
from tests.workflows.homes import ATTRIBUTES, latest, write_recipe
from tests.workflows.orchestration.test_automation import Sensed
from workflows.orchestration.observations import CAUSES, STATE, Cursor, observe
from workflows.state.status import AssetStatus

pytestmark = pytest.mark.slow

TWO_ROWS = "preferences.jsonl differs (1 -> 2 rows read)"
THREE_ROWS = "preferences.jsonl differs (1 -> 3 rows read)"
WITHOUT_CHANGES = {**ATTRIBUTES, "automation": {"on_change": False}}


class Watched(Sensed):
    """A recipe, the sensor that reports its causes, and the events on the pages of its assets."""

    def __init__(self, folder: Path, instance: dg.DagsterInstance, sensor: str):
        super().__init__(folder, instance)
        self.sensor = sensor

    def tick(self):
        sensor = self.definitions.resolve_sensor_def(self.sensor)
        with dg.build_sensor_context(self.instance, self.cursor, definitions=self.definitions) as context:
            result = sensor.evaluate_tick(context)
        self.cursor = result.cursor or self.cursor
        return result

    def events(self, asset: str = "preference_source"):
        """Return state and causes of each observation, the first one first."""
        records = self.instance.fetch_observations(self.pipeline.key(asset), limit=100, ascending=True).records
        metadatas = [record.asset_observation.metadata for record in records]
        return [(metadata[STATE].value, metadata[CAUSES].value) for metadata in metadatas]

    def all_events(self):
        return {asset: found for asset in GRAPH if (found := self.events(asset))}


@pytest.fixture(params=["small_data_sensor", "small_status_sensor"])
def watched(request, tmp_path, monkeypatch, small_recipe):
    monkeypatch.setenv("PEDIGREE_HOME", str(tmp_path / "home"))
    with dg.DagsterInstance.ephemeral() as instance:
        folder = write_recipe(tmp_path / "small", WITHOUT_CHANGES if "status" in request.param else ATTRIBUTES)
        (folder / "base").symlink_to(small_recipe / "base")
        watched = Watched(folder, instance, request.param)
        watched.write("Why?")
        yield watched


def stale(*causes):
    return ("stale", verbatim(causes).value)


FRESH = ("fresh", "none")


def test_what_was_never_materialized_is_not_observed(watched):
    watched.tick()
    assert watched.all_events() == {}


def test_each_change_of_the_causes_is_one_event(watched):
    watched.materialize_sources()
    watched.tick()
    assert watched.all_events() == {}, "fresh from the start needs no event"
    watched.write("Why?", "How?")
    for _ in range(3):
        watched.tick()
    assert watched.all_events() == {"preference_source": [stale(TWO_ROWS)]}
    watched.write("Why?", "How?", "When?")
    watched.tick()
    watched.tick()
    assert watched.events() == [stale(TWO_ROWS), stale(THREE_ROWS)]
    watched.materialize_sources()
    watched.tick()
    watched.tick()
    assert watched.all_events() == {"preference_source": [stale(TWO_ROWS), stale(THREE_ROWS), FRESH]}


def test_data_that_are_put_back_are_fresh_again(watched):
    watched.materialize_sources()
    for texts in (["Why?", "How?"], ["Why?"], ["Why?", "How?"]):
        watched.write(*texts)
        watched.tick()
    assert watched.events() == [stale(TWO_ROWS), FRESH, stale(TWO_ROWS)]


def test_sensor_with_a_lost_cursor_repeats_no_event(watched):
    watched.materialize_sources()
    watched.write("Why?", "How?")
    watched.tick()
    watched.cursor = None
    watched.tick()
    assert watched.events() == [stale(TWO_ROWS)]


def test_observation_of_another_program_is_ignored(watched):
    watched.materialize_sources()
    watched.instance.report_runless_asset_event(dg.AssetObservation(watched.pipeline.key("base_model")))
    watched.write("Why?", "How?")
    watched.tick()
    assert watched.events() == [stale(TWO_ROWS)]


@pytest.mark.parametrize("kept", [None, "nothing", f"{'a' * 64} 1700000000"])
def test_a_cursor_of_an_earlier_version_is_understood(kept):
    cursor = Cursor.parse(kept)
    expected = ("a" * 64, 1700000000.0) if kept and kept != "nothing" else ("nothing", 0.0)
    assert (cursor.asked, cursor.when, cursor.observed) == (*expected, "nothing")
    for reason in ("nothing is stale", "a | b", "x" * 1000):
        assert Cursor.parse(cursor.text(reason)) == cursor
    assert cursor.text("nothing is stale").startswith("nothing is stale | ")


def observe_all(conditions: Conditions, state, *causes):
    found = [AssetStatus(asset, state, causes, f"{asset}-1") for asset in GRAPH]
    observe(conditions.pipeline, conditions.instance, found)


def test_an_observation_changes_no_data_version_and_starts_nothing(tmp_path):
    """Observe every asset between two ticks, before and after real changes: the conditions request the same."""
    with dg.DagsterInstance.ephemeral() as instance:
        conditions = Conditions(write_recipe(tmp_path / "small", ATTRIBUTES), instance)
        conditions.tick()
        conditions.materialize(1, *GRAPH)
        conditions.tick()
        observe_all(conditions, "stale", "loss.beta 0.1 -> 0.2")
        assert [conditions.tick(), conditions.tick()] == [set(), set()]
        conditions.materialize(2, "preference_source")
        observe_all(conditions, "stale", "preferences.jsonl differs")
        assert [conditions.tick(), conditions.tick()] == [BELOW_ROWS, set()]
        conditions.materialize(2, *(asset for asset in GRAPH if asset in BELOW_ROWS))
        observe_all(conditions, "fresh")
        assert [conditions.tick(), conditions.tick()] == [set(), set()]
        write_recipe(conditions.folder, OTHER_BETA)
        assert conditions.tick() == {"training_spec", "evaluation_spec", "policy", "evaluation", "released_model"}
        for asset in GRAPH:
            key = conditions.pipeline.key(asset)
            assert (
                latest(instance, key).fingerprint
                == f"{asset}-{2 if asset in {*BELOW_ROWS, 'preference_source'} else 1}"
            )
            [observation, *_] = instance.fetch_observations(key, limit=1).records
            tags = observation.asset_observation.tags or {}
            assert "dagster/data_version" not in json.dumps(dict(tags))

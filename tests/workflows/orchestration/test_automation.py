"""Automatic materialization: requests of the schedule, the sensor and the conditions, and their time."""

import json
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest

from assets.execution.run_liveness import PROCESS_TAG
from assets.inputs.current import find_tokenizer
from assets.lineage.diff import CORRUPT_RECORD, NO_RECORD
from assets.lineage.history import latest_of
from assets.pipeline.graph import GRAPH
from tests.workflows.automation_ticks import ABOVE_POLICY, BELOW_ROWS, OTHER_BETA, Conditions, definitions_of
from tests.workflows.homes import ATTRIBUTES, flip, latest, write_recipe
from training.contract.store.artifact import JobResult, write_json
from workflows.orchestration.observations import Cursor
from workflows.orchestration.resources import build_services, pedigree_home
from workflows.recipes.discovery import load_recipe
from workflows.state.status import status

ROW = {
    "prompt": [{"role": "user", "content": "Why?"}],
    "chosen": [{"role": "assistant", "content": "Because."}],
    "rejected": [{"role": "assistant", "content": "No."}],
}


class Sensed:
    """A recipe's sensor with its cursor, and a stand-in for the runs that it requests."""

    def __init__(self, folder, instance):
        self.folder, self.instance, self.cursor = folder, instance, None
        self.pipeline = load_recipe(folder).pipeline
        self.definitions = definitions_of(folder)

    def write(self, *texts):
        rows = [{**ROW, "prompt": [{"role": "user", "content": text}]} for text in texts]
        (self.folder / "preferences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def materialize_sources(self):
        """Materialize the two sources, as every run does first."""
        job = self.definitions.resolve_implicit_global_asset_job_def()
        keys = [self.pipeline.key(name) for name in ("preference_source", "base_model")]
        assert job.execute_in_process(instance=self.instance, asset_selection=keys).success

    def tick(self):
        sensor = self.definitions.resolve_sensor_def("small_data_sensor")
        with dg.build_sensor_context(self.instance, self.cursor, definitions=self.definitions) as context:
            result = sensor.evaluate_tick(context)
        self.cursor = result.cursor or self.cursor
        return result

    def requests(self):
        """Return the number of runs that one tick requests."""
        return len(self.tick().run_requests or [])


@pytest.fixture
def sensed(tmp_path, monkeypatch, small_recipe):
    monkeypatch.setenv("PEDIGREE_HOME", str(tmp_path / "home"))
    with dg.DagsterInstance.ephemeral() as instance:
        folder = write_recipe(tmp_path / "small", ATTRIBUTES)
        (folder / "base").symlink_to(small_recipe / "base")
        sensed = Sensed(folder, instance)
        sensed.write("Why?")
        yield sensed


def test_sensor_does_not_request_the_first_run(sensed):
    assert sensed.requests() == 0


def test_sensor_requests_one_run_for_each_change_of_the_bytes(sensed):
    sensed.materialize_sources()
    assert sensed.requests() == 0
    (sensed.folder / "preferences.jsonl").touch()
    assert sensed.requests() == 0
    sensed.write("Why?", "How?")
    assert [sensed.requests(), sensed.requests()] == [1, 0]
    sensed.materialize_sources()
    assert sensed.requests() == 0
    sensed.write("Why?")
    assert [sensed.requests(), sensed.requests()] == [1, 0]


def test_a_file_of_another_name_is_the_same_data(sensed):
    (sensed.folder / "data").mkdir()
    write_recipe(sensed.folder, {**ATTRIBUTES, "data": {"sources": [{"path": "data"}]}})
    (sensed.folder / "preferences.jsonl").rename(sensed.folder / "data" / "monday.jsonl")
    sensed = Sensed(sensed.folder, sensed.instance)
    sensed.materialize_sources()
    (sensed.folder / "data" / "monday.jsonl").rename(sensed.folder / "data" / "tuesday.jsonl")
    assert sensed.requests() == 0


@pytest.mark.parametrize(
    "paths", [["a.jsonl", "b.jsonl"], ["b.jsonl", "a.jsonl"]], ids=["two sources", "another order"]
)
def test_the_same_files_as_other_sources_are_other_data(sensed, paths):
    """A source has settings of its own, and the order of the rows decides the batches."""
    for name in "ab":
        sensed.write(f"{name}?")
        (sensed.folder / "preferences.jsonl").rename(sensed.folder / f"{name}.jsonl")
    write_recipe(sensed.folder, {**ATTRIBUTES, "data": {"sources": [{"path": "[ab].jsonl"}]}})
    sensed = Sensed(sensed.folder, sensed.instance)
    sensed.materialize_sources()
    write_recipe(sensed.folder, {**ATTRIBUTES, "data": {"sources": [{"path": path} for path in paths]}})
    sensed = Sensed(sensed.folder, sensed.instance)
    [request] = sensed.tick().run_requests
    cause = "preference_source: the order of the files, or how the sources divide them, changed"
    assert request.tags["pedigree/cause"] == cause
    found = status(sensed.pipeline, build_services(pedigree_home()), sensed.instance)[0]
    assert f"{found.asset}: {'; '.join(found.causes)}" == cause
    sensed.materialize_sources()
    assert sensed.requests() == 0


def an_hour_before(text: str) -> str:
    """Return the cursor with the time of its request moved back by an hour."""
    cursor = Cursor.parse(text)
    return replace(cursor, when=cursor.when - 3601).text("a run was requested")


def test_request_without_a_run_is_repeated_after_an_hour(sensed):
    sensed.materialize_sources()
    sensed.write("Why?", "How?")
    assert [sensed.requests(), sensed.requests()] == [1, 0]
    sensed.cursor = an_hour_before(sensed.cursor)
    assert [sensed.requests(), sensed.requests()] == [1, 0]
    sensed.write("Why?")
    assert sensed.requests() == 0
    sensed.write("Why?", "How?")
    assert sensed.requests() == 1


def cancel_source_run(sensed):
    """Begin a run that records the sources, and stop it as a user does."""
    job = sensed.definitions.resolve_job_def("small_look")
    run = sensed.instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
    sensed.instance.report_run_canceled(run)


def test_sensor_does_not_repeat_a_request_whose_run_was_stopped(sensed):
    sensed.materialize_sources()
    sensed.write("Why?", "How?")
    assert sensed.requests() == 1
    cancel_source_run(sensed)
    sensed.cursor = an_hour_before(sensed.cursor)
    assert [sensed.requests(), sensed.requests()] == [0, 0]
    sensed.write("Why?", "Who?")
    assert [sensed.requests(), sensed.requests()] == [1, 0]


def test_sensor_does_not_request_a_change_whose_manual_run_was_stopped(sensed):
    """The run had not recorded the data yet. A change after the sensor's tick is requested."""
    sensed.materialize_sources()
    assert sensed.requests() == 0
    sensed.write("Why?", "How?")
    cancel_source_run(sensed)
    assert [sensed.requests(), sensed.requests()] == [0, 0]
    sensed.write("Why?", "Who?")
    assert [sensed.requests(), sensed.requests()] == [1, 0]
    sensed.materialize_sources()
    assert sensed.requests() == 0


def test_sensor_requests_the_source_assets_and_logs_the_causes(sensed):
    sensed.materialize_sources()
    sensed.write("Why?", "How?")
    [request] = sensed.tick().run_requests
    assert request.tags["pedigree/cause"] == "preference_source: preferences.jsonl differs (1 -> 2 rows read)"
    sensor = sensed.definitions.resolve_sensor_def("small_data_sensor")
    job = sensed.definitions.resolve_job_def(sensor.job_name)
    recorded = {key.path[1] for key in job.asset_layer.executable_asset_keys}
    assert recorded == {"preference_source", "base_model", "tokenization_spec", "evaluation_spec", "release_spec"}


def test_the_sensor_sees_an_edited_template_and_leaves_the_rules_to_the_code_version(sensed, small_recipe):
    """Record a tokenizer's job: its published artifact, and the report of it to Dagster."""
    base, services = sensed.folder / "base", build_services(pedigree_home())
    base.unlink()
    shutil.copytree(small_recipe / "base", base)
    template, sensed = base / "chat_template.jinja", Sensed(sensed.folder, sensed.instance)
    sensed.write("Why?")
    sensed.materialize_sources()
    how = find_tokenizer(sensed.pipeline, services).derivation
    with services.store.staging() as staging:
        shutil.copytree(base, staging / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
        write_json(staging / "spec.json", {"template": template.read_text()})
        services.store.publish(staging, how, JobResult("f" * 64))
    key, tags = sensed.pipeline.key("tokenization_spec"), {"dagster/data_version": "f" * 64}
    sensed.instance.report_runless_asset_event(dg.AssetMaterialization(key, tags=tags, metadata={"key": how.key}))
    write_recipe(sensed.folder, {**ATTRIBUTES, "tokenization": {"max_length": 64}})
    assert Sensed(sensed.folder, sensed.instance).requests() == 0
    record = services.store.record_file("tokenization_spec", how.key)
    sound = record.read_bytes()
    for damage, cause in ((flip, CORRUPT_RECORD), (Path.unlink, NO_RECORD)):
        damage(record)
        [request] = Sensed(sensed.folder, sensed.instance).tick().run_requests
        assert request.tags["pedigree/cause"] == f"tokenization_spec: {cause}"
    record.write_bytes(sound)
    before = template.read_text()
    template.write_text("{# shorter #}" + before)
    [request] = sensed.tick().run_requests
    assert re.match("tokenization_spec: chat template .*line 1", request.tags["pedigree/cause"])
    assert sensed.requests() == 0
    template.write_text(before)
    own = {**ATTRIBUTES, "tokenization": {"max_length": 128, "chat_template": "own.jinja"}}
    (sensed.folder / "own.jinja").write_text("{# longer #}" + before)
    assert Sensed(write_recipe(sensed.folder, own), sensed.instance).requests() == 1


def test_a_materialization_shows_what_changed(sensed):
    def shown(asset):
        return latest(sensed.instance, sensed.pipeline.key(asset)).metadata["changes"]

    sensed.materialize_sources()
    assert shown("preference_source") == "first materialization"
    sensed.write("Why?", "How?")
    sensed.materialize_sources()
    assert "preferences.jsonl differs (1 -> 2 rows read)" in shown("preference_source")
    assert shown("base_model") == "nothing"


def test_sensor_fails_a_run_whose_process_is_dead(sensed):
    """The assets of such a run would stay in progress for ever, and the conditions would never request them."""
    home = pedigree_home()
    gone = home / "processes" / "gone.lock"
    run = sensed.instance.create_run_for_job(dg.GraphDefinition("other").to_job(), status=dg.DagsterRunStatus.STARTED)
    sensed.instance.add_run_tags(run.run_id, {PROCESS_TAG: f"{run.run_id} elsewhere 1 {gone}"})
    sensed.materialize_sources()
    sensed.tick()
    assert sensed.instance.get_run_by_id(run.run_id).status == dg.DagsterRunStatus.FAILURE


def test_schedule_requests_the_whole_graph(sensed):
    definitions = sensed.definitions
    schedule = definitions.resolve_schedule_def("small_schedule")
    assert schedule.cron_schedule == "0 6 * * 1"
    assert schedule.default_status == dg.DefaultScheduleStatus.RUNNING
    job = definitions.resolve_job_def("small_retrain")
    assert {key.path[1] for key in job.asset_layer.executable_asset_keys} == set(GRAPH)


@pytest.mark.parametrize(("given", "kept"), [({}, "UTC"), ({"timezone": "Europe/Berlin"}, "Europe/Berlin")])
def test_the_schedule_keeps_the_time_of_its_timezone(tmp_path, given, kept):
    folder = write_recipe(tmp_path / "small", {**ATTRIBUTES, "automation": {"cron": "0 6 * * 1", **given}})
    assert definitions_of(folder).resolve_schedule_def("small_schedule").execution_timezone == kept


def test_identical_materialization_requests_nothing(conditions):
    conditions.materialize(1, "preference_source", "tokenization_spec", "tokenized_pairs")
    assert [conditions.tick(), conditions.tick()] == [set(), set()]


def test_tick_reads_materializations_once(conditions, monkeypatch):
    """A hundred variants have a hundred sensors, twice a minute each, and a query costs a dozen connections."""
    asked = []

    def noted(instance, keys):
        asked.append(len(keys))
        return latest_of(instance, keys)

    monkeypatch.setattr("assets.bodies.automation.latest_of", noted)
    assert (conditions.tick(), asked) == (set(), [len(GRAPH)])
    conditions.materialize(2, "preference_source")
    assert (conditions.tick(), asked) == (BELOW_ROWS, [len(GRAPH)] * 2), "each tick reads the current state"


def test_new_data_request_all_assets_below_once(conditions):
    conditions.materialize(2, "preference_source")
    assert conditions.tick() == BELOW_ROWS
    run = conditions.begin(*BELOW_ROWS)
    asked = []
    for asset in GRAPH:  # one tick between each two steps of the run
        if asset in BELOW_ROWS:
            asked.append(conditions.tick())
            conditions.materialize(2, asset)
    conditions.succeed(run)
    assert [*asked, conditions.tick(), conditions.tick()] == [set()] * (len(BELOW_ROWS) + 2)


def test_manual_run_leaves_nothing_to_request(conditions):
    """The data changed and were materialized, down to the release, before a tick: nothing is stale."""
    conditions.materialize(2, "preference_source", *(asset for asset in GRAPH if asset in BELOW_ROWS))
    assert [conditions.tick(), conditions.tick()] == [set()] * 2


def test_changed_field_requests_its_spec_and_the_assets_below(conditions):
    write_recipe(conditions.folder, OTHER_BETA)
    assert conditions.tick() == {"training_spec", "evaluation_spec", "policy", "evaluation", "released_model"}
    assert conditions.tick() == set()


def test_another_number_of_processes_requests_nothing(conditions):
    write_recipe(conditions.folder, {**ATTRIBUTES, "compute": {"processes_per_node": 7}})
    assert conditions.tick() == set()


def test_a_failed_blocking_check_stops_what_follows_until_it_passes(conditions):
    conditions.materialize(2, "preference_source")
    assert conditions.tick() == BELOW_ROWS
    conditions.materialize(2, "raw_preferences")
    conditions.report_check("raw_preferences", "quarantine_within_limit", passed=False)
    assert [conditions.tick(), conditions.tick()] == [set(), set()]
    conditions.report_check("raw_preferences", "quarantine_within_limit", passed=True)
    assert conditions.tick() == BELOW_ROWS - {"raw_preferences"}
    assert conditions.tick() == set()


def test_asset_in_progress_is_requested_after_its_run(conditions):
    """With the assets below: a run of the previous recipe does not count for the current one."""
    run = conditions.begin("policy")
    write_recipe(conditions.folder, OTHER_BETA)
    assert conditions.tick() == {"training_spec", "evaluation_spec"}
    conditions.materialize(2, "training_spec", "evaluation_spec")
    assert conditions.tick() == set()
    conditions.succeed(run)
    assert conditions.tick() == {"policy", "evaluation", "released_model"}
    assert conditions.tick() == set()


@pytest.mark.parametrize(
    ("made", "below"),
    [
        ("reference_logprobs", {"prequential_scores"}),
        ("reference_model", {"reference_logprobs", "prequential_scores"}),
    ],
)
def test_asset_below_one_in_progress_waits_for_it(conditions, made, below):
    """A policy trained on the previous artifact would be trained twice. Only one of the two inputs, the table, has checks."""
    run = conditions.begin(made)
    write_recipe(conditions.folder, OTHER_BETA)
    assert conditions.tick() == {"training_spec", "evaluation_spec"}
    conditions.materialize(2, made)
    conditions.succeed(run)
    assert conditions.tick() == {"policy", "evaluation", "released_model"} | below
    assert conditions.tick() == set()


def test_a_run_that_fails_is_not_started_for_ever(conditions):
    """The policy's training always fails. A new materialization above requests it once more, then only a change does."""
    conditions.materialize(2, "preference_source")
    assert conditions.tick() == BELOW_ROWS
    asked = []
    for above in (ABOVE_POLICY, ()):
        run = conditions.begin("policy", "evaluation", "released_model")
        conditions.materialize(2, *above)
        asked += [conditions.tick()]
        conditions.instance.report_run_failed(run)
        asked += [conditions.tick(), conditions.tick()]
    assert asked == [set(), {"policy", "evaluation", "released_model"}, set(), set(), set(), set()]
    conditions.materialize(3, "preference_source")
    assert conditions.tick() == BELOW_ROWS


def test_change_during_a_run_is_requested_once_afterwards(conditions):
    """New data, rows, tokens and log-probs during a training. Its policy belongs to the previous data."""
    conditions.materialize(2, "preference_source")
    assert conditions.tick() == BELOW_ROWS
    conditions.materialize(2, *ABOVE_POLICY)
    run, inputs = conditions.begin("policy", "evaluation", "released_model"), conditions.made_of("policy")
    conditions.materialize(3, "preference_source")
    assert conditions.tick() == set(ABOVE_POLICY)
    conditions.materialize(3, *ABOVE_POLICY)
    assert conditions.tick() == set()
    conditions.materialize(2, "policy", made_of=inputs)
    conditions.materialize(2, "evaluation", "released_model")
    conditions.succeed(run)
    assert conditions.tick() == {"policy", "evaluation", "released_model"}
    assert conditions.tick() == set()


def test_change_between_a_materialization_and_the_next_tick_is_requested(conditions):
    """Rows of the previous data are recorded, then other data: both since the last tick."""
    conditions.materialize(2, "preference_source")
    assert conditions.tick() == BELOW_ROWS
    conditions.materialize(2, "raw_preferences")
    conditions.materialize(3, "preference_source")
    assert conditions.tick() == BELOW_ROWS


def test_asset_that_was_never_materialized_is_not_requested(tmp_path):
    """Only the data were materialized: rows can be read from new data, but nothing can be tokenized."""
    with dg.DagsterInstance.ephemeral() as instance:
        begun = Conditions(write_recipe(tmp_path / "small", ATTRIBUTES), instance)
        begun.materialize(1, "preference_source")
        assert begun.tick() == set()
        begun.materialize(2, "preference_source")
        assert [begun.tick(), begun.tick()] == [{"raw_preferences"}, set()]


def test_beta_warnings_of_dagster_are_hidden(tmp_path):
    """Dagster warns at every command that the sensor uses a beta feature."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_recipe(write_recipe(tmp_path / "small", ATTRIBUTES))
    assert [str(warning.message) for warning in caught if "dagster" in str(warning.category).lower()] == []


def test_sensor_without_on_change_requests_nothing(tmp_path):
    """A sensor without a job only observes. The other one only follows jobs in a queue."""
    folder = write_recipe(tmp_path / "small", {**ATTRIBUTES, "automation": {"on_change": False}})
    definitions = definitions_of(folder)
    follower, sensor = definitions.sensors
    assert follower.name == "small_detached_jobs_sensor"
    assert (sensor.name, sensor.targets) == ("small_status_sensor", [])
    graph = definitions.resolve_asset_graph()
    assert all(graph.get(key).automation_condition is None for key in graph.get_all_asset_keys())


def test_home_made_before_the_scores_of_arriving_pairs_goes_on(tmp_path):
    """No asset is made of `prequential_scores`, which it lacks. So all assets below an edited field are requested."""
    with dg.DagsterInstance.ephemeral() as instance:
        conditions = Conditions(write_recipe(tmp_path / "small", ATTRIBUTES), instance)
        for asset in GRAPH:
            made_of = conditions.made_of(asset)
            missing = [name for name, fingerprint in made_of.items() if fingerprint is None]
            if asset != "prequential_scores":
                known = {name: value for name, value in made_of.items() if name not in missing}
                conditions.materialize(1, asset, made_of=known)
        assert [conditions.tick(), conditions.tick()] == [set(), set()]
        write_recipe(conditions.folder, OTHER_BETA)
        requested = conditions.tick()
        assert {"training_spec", "policy", "evaluation", "released_model"} <= requested
        assert conditions.tick() == set()

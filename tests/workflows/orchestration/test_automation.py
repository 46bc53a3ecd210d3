"""What materializes without anybody asking: what the schedule, the sensor and the conditions ask for, and when."""

import json
import shutil
import warnings
from pathlib import Path

import dagster as dg
import pytest

from assets.execution.run_liveness import PROCESS_TAG
from assets.inputs.current import find_tokenizer
from assets.lineage.diff import CORRUPT_RECORD, NO_RECORD
from assets.lineage.history import latest_of
from assets.pipeline.graph import GRAPH
from tests.workflows.homes import ATTRIBUTES, flip, latest, write_recipe
from tests.workflows.ticks import ABOVE_POLICY, BELOW_ROWS, OTHER_BETA, Conditions, definitions_of
from training.contract.store.store import JobResult, write_json
from workflows.orchestration.resources import build_services, pedigree_home
from workflows.recipes.discovery import load_recipe
from workflows.state.status import status

ROW = {
    "prompt": [{"role": "user", "content": "Why?"}],
    "chosen": [{"role": "assistant", "content": "Because."}],
    "rejected": [{"role": "assistant", "content": "No."}],
}


class Sensed:
    """A recipe's sensor with its cursor, and the means to make the run that it asks for see the data."""

    def __init__(self, folder, instance):
        self.folder, self.instance, self.cursor = folder, instance, None
        self.pipeline = load_recipe(folder).pipeline
        self.definitions = definitions_of(folder)

    def write(self, *texts):
        rows = [{**ROW, "prompt": [{"role": "user", "content": text}]} for text in texts]
        (self.folder / "preferences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def look(self):
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
        """How many runs one tick asks for."""
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


def test_a_file_of_another_name_is_the_same_data(sensed):
    (sensed.folder / "data").mkdir()
    write_recipe(sensed.folder, {**ATTRIBUTES, "data": {"sources": [{"path": "data"}]}})
    (sensed.folder / "preferences.jsonl").rename(sensed.folder / "data" / "monday.jsonl")
    sensed = Sensed(sensed.folder, sensed.instance)
    sensed.look()
    (sensed.folder / "data" / "monday.jsonl").rename(sensed.folder / "data" / "tuesday.jsonl")
    assert sensed.requests() == 0


@pytest.mark.parametrize(
    "paths", [["a.jsonl", "b.jsonl"], ["b.jsonl", "a.jsonl"]], ids=["two sources", "another order"]
)
def test_the_same_files_as_other_sources_are_other_data(sensed, paths):
    """A source has settings of its own, and the order of the rows decides what a batch is made of."""
    for name in "ab":
        sensed.write(f"{name}?")
        (sensed.folder / "preferences.jsonl").rename(sensed.folder / f"{name}.jsonl")
    write_recipe(sensed.folder, {**ATTRIBUTES, "data": {"sources": [{"path": "[ab].jsonl"}]}})
    sensed = Sensed(sensed.folder, sensed.instance)
    sensed.look()
    write_recipe(sensed.folder, {**ATTRIBUTES, "data": {"sources": [{"path": path} for path in paths]}})
    sensed = Sensed(sensed.folder, sensed.instance)
    [request] = sensed.tick().run_requests
    cause = "preference_source: the order of the files, or how the sources divide them, changed"
    assert request.tags["pedigree/cause"] == cause
    found = status(sensed.pipeline, build_services(pedigree_home()), sensed.instance)[0]
    assert f"{found.asset}: {'; '.join(found.causes)}" == cause
    sensed.look()
    assert sensed.requests() == 0


def test_a_request_that_led_nowhere_is_repeated_an_hour_later(sensed):
    sensed.look()
    sensed.write("Why?", "How?")
    assert [sensed.requests(), sensed.requests()] == [1, 0]
    seen, when, observed = sensed.cursor.split(" ")
    sensed.cursor = f"{seen} {float(when) - 3601} {observed}"
    assert [sensed.requests(), sensed.requests()] == [1, 0]
    sensed.write("Why?")
    assert sensed.requests() == 0
    sensed.write("Why?", "How?")
    assert sensed.requests() == 1


def cancel_look(sensed):
    """A run of what records the world has begun, and a person stops it."""
    job = sensed.definitions.resolve_job_def("small_look")
    run = sensed.instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
    sensed.instance.report_run_canceled(run)


def test_the_sensor_does_not_repeat_a_request_whose_run_a_person_has_stopped(sensed):
    sensed.look()
    sensed.write("Why?", "How?")
    assert sensed.requests() == 1
    cancel_look(sensed)
    seen, when, observed = sensed.cursor.split(" ")
    sensed.cursor = f"{seen} {float(when) - 3601} {observed}"
    assert [sensed.requests(), sensed.requests()] == [0, 0]
    sensed.write("Why?", "Who?")
    assert [sensed.requests(), sensed.requests()] == [1, 0]


def test_the_sensor_asks_for_no_change_whose_run_a_person_started_and_stopped(sensed):
    """Before it had recorded the data. What changes after the sensor has looked is asked for."""
    sensed.look()
    assert sensed.requests() == 0
    sensed.write("Why?", "How?")
    cancel_look(sensed)
    assert [sensed.requests(), sensed.requests()] == [0, 0]
    sensed.write("Why?", "Who?")
    assert [sensed.requests(), sensed.requests()] == [1, 0]
    sensed.look()
    assert sensed.requests() == 0


def test_the_sensor_asks_for_what_records_the_world_and_says_why(sensed):
    sensed.look()
    sensed.write("Why?", "How?")
    [request] = sensed.tick().run_requests
    assert request.tags["pedigree/cause"] == "preference_source: preferences.jsonl differs (1 -> 2 rows read)"
    sensor = sensed.definitions.resolve_sensor_def("small_data_sensor")
    job = sensed.definitions.resolve_job_def(sensor.job_name)
    recorded = {key.path[1] for key in job.asset_layer.executable_asset_keys}
    assert recorded == {"preference_source", "base_model", "tokenization_spec", "evaluation_spec", "release_spec"}


def test_the_sensor_sees_an_edited_template_and_leaves_the_rules_to_the_code_version(sensed, small_recipe):
    """As if the tokenizer's job had been run: what it would have published, and the word of it to Dagster."""
    base, services = sensed.folder / "base", build_services(pedigree_home())
    base.unlink()
    shutil.copytree(small_recipe / "base", base)
    template, sensed = base / "chat_template.jinja", Sensed(sensed.folder, sensed.instance)
    sensed.write("Why?")
    sensed.look()
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
    for damage, words in ((flip, CORRUPT_RECORD), (Path.unlink, NO_RECORD)):
        damage(record)
        [request] = Sensed(sensed.folder, sensed.instance).tick().run_requests
        assert request.tags["pedigree/cause"] == f"tokenization_spec: {words}"
    record.write_bytes(sound)
    before = template.read_text()
    template.write_text("{# shorter #}" + before)
    [request] = sensed.tick().run_requests
    assert request.tags["pedigree/cause"].startswith("tokenization_spec: chat template changed: line 1")
    assert sensed.requests() == 0
    template.write_text(before)
    own = {**ATTRIBUTES, "tokenization": {"max_length": 128, "chat_template": "own.jinja"}}
    (sensed.folder / "own.jinja").write_text("{# longer #}" + before)
    assert Sensed(write_recipe(sensed.folder, own), sensed.instance).requests() == 1


def test_a_materialization_shows_what_changed(sensed):
    def shown(asset):
        return latest(sensed.instance, sensed.pipeline.key(asset)).metadata["changes"]

    sensed.look()
    assert shown("preference_source") == "first materialization"
    sensed.write("Why?", "How?")
    sensed.look()
    assert "preferences.jsonl differs (1 -> 2 rows read)" in shown("preference_source")
    assert shown("base_model") == "nothing"


def test_the_sensor_closes_a_run_whose_process_is_gone(sensed):
    """What such a run was to make would count as in progress for ever, and the conditions would never ask for it."""
    home = pedigree_home()
    gone = home / "processes" / "gone.lock"
    run = sensed.instance.create_run_for_job(dg.GraphDefinition("other").to_job(), status=dg.DagsterRunStatus.STARTED)
    sensed.instance.add_run_tags(run.run_id, {PROCESS_TAG: f"{run.run_id} elsewhere 1 {gone}"})
    sensed.look()
    sensed.tick()
    assert sensed.instance.get_run_by_id(run.run_id).status == dg.DagsterRunStatus.FAILURE


def test_the_schedule_asks_for_the_whole_graph(sensed):
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


def test_an_identical_materialization_asks_for_nothing(conditions):
    conditions.materialize(1, "preference_source", "tokenization_spec", "tokenized_pairs")
    assert [conditions.tick(), conditions.tick()] == [set(), set()]


def test_a_tick_asks_once_what_was_made_of_what(conditions, monkeypatch):
    """A hundred variants have a hundred sensors, twice a minute each, and a question costs a dozen connections."""
    asked = []

    def noted(instance, keys):
        asked.append(len(keys))
        return latest_of(instance, keys)

    monkeypatch.setattr("assets.bodies.automation.latest_of", noted)
    assert (conditions.tick(), asked) == (set(), [len(GRAPH)])
    conditions.materialize(2, "preference_source")
    assert (conditions.tick(), asked) == (BELOW_ROWS, [len(GRAPH)] * 2), "and each tick what is there then"


def test_new_data_ask_once_for_all_that_lies_below(conditions):
    conditions.materialize(2, "preference_source")
    assert conditions.tick() == BELOW_ROWS
    run = conditions.begin(*BELOW_ROWS)
    asked = []
    for asset in GRAPH:  # as the run goes on, a tick between each two of its steps
        if asset in BELOW_ROWS:
            asked.append(conditions.tick())
            conditions.materialize(2, asset)
    conditions.succeed(run)
    assert [*asked, conditions.tick(), conditions.tick()] == [set()] * 8


def test_a_person_s_run_leaves_nothing_to_ask_for(conditions):
    """Data that changed and were materialized, down to the release, before anybody looked: nothing is stale."""
    conditions.materialize(2, "preference_source", *(asset for asset in GRAPH if asset in BELOW_ROWS))
    assert [conditions.tick(), conditions.tick()] == [set()] * 2


def test_a_changed_field_asks_for_its_spec_and_what_reads_it(conditions):
    write_recipe(conditions.folder, OTHER_BETA)
    assert conditions.tick() == {"training_spec", "evaluation_spec", "policy", "evaluation", "released_model"}
    assert conditions.tick() == set()


def test_another_number_of_processes_asks_for_nothing(conditions):
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


def test_what_is_being_made_is_asked_for_once_its_run_has_ended(conditions):
    """With what reads it: a run of the recipe as it was before has nothing to say about the one of now."""
    run = conditions.begin("policy")
    write_recipe(conditions.folder, OTHER_BETA)
    assert conditions.tick() == {"training_spec", "evaluation_spec"}
    conditions.materialize(2, "training_spec", "evaluation_spec")
    assert conditions.tick() == set()
    conditions.succeed(run)
    assert conditions.tick() == {"policy", "evaluation", "released_model"}
    assert conditions.tick() == set()


@pytest.mark.parametrize(
    ("made", "below"), [("reference_logprobs", set()), ("reference_model", {"reference_logprobs"})]
)
def test_what_reads_an_artifact_that_is_being_made_waits_for_it(conditions, made, below):
    """A policy that was trained on the one of before would be trained twice; of the two only the table has checks."""
    run = conditions.begin(made)
    write_recipe(conditions.folder, OTHER_BETA)
    assert conditions.tick() == {"training_spec", "evaluation_spec"}
    conditions.materialize(2, made)
    conditions.succeed(run)
    assert conditions.tick() == {"policy", "evaluation", "released_model"} | below
    assert conditions.tick() == set()


def test_a_run_that_fails_is_not_started_for_ever(conditions):
    """The policy's training fails, and always will: what was made above it asks for it once more, then only a change does."""
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


def test_what_changes_while_a_run_goes_on_is_asked_for_once_afterwards(conditions):
    """New data, rows, tokens and log-probs while a policy is trained, which ends as one of the data before."""
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


def test_what_changes_between_a_materialization_and_the_next_tick_is_seen(conditions):
    """Rows of the data before are recorded, then other data: both since the last tick."""
    conditions.materialize(2, "preference_source")
    assert conditions.tick() == BELOW_ROWS
    conditions.materialize(2, "raw_preferences")
    conditions.materialize(3, "preference_source")
    assert conditions.tick() == BELOW_ROWS


def test_what_was_never_materialized_is_not_asked_for(tmp_path):
    """Somebody looked at the data and no more: rows can be read of new data, and nothing can be tokenized."""
    with dg.DagsterInstance.ephemeral() as instance:
        begun = Conditions(write_recipe(tmp_path / "small", ATTRIBUTES), instance)
        begun.materialize(1, "preference_source")
        assert begun.tick() == set()
        begun.materialize(2, "preference_source")
        assert [begun.tick(), begun.tick()] == [{"raw_preferences"}, set()]


def test_nobody_reads_a_warning_of_dagster_s(tmp_path):
    """The sensor needs what Dagster calls beta, and would say so at every command."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        load_recipe(write_recipe(tmp_path / "small", ATTRIBUTES))
    assert [str(word.message) for word in said if "dagster" in str(word.category).lower()] == []


def test_without_on_change_nothing_asks(tmp_path):
    """A sensor that looks has no job to ask for."""
    folder = write_recipe(tmp_path / "small", {**ATTRIBUTES, "automation": {"on_change": False}})
    definitions = definitions_of(folder)
    [sensor] = definitions.sensors
    assert (sensor.name, sensor.targets) == ("small_status_sensor", [])
    graph = definitions.resolve_asset_graph()
    assert all(graph.get(key).automation_condition is None for key in graph.get_all_asset_keys())

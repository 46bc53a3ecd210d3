"""A run that a person stops stays stopped until something changes: what the conditions ask for after its end."""

import datetime
import json

import dagster as dg
import pytest

from assets.execution.run_liveness import PROCESS_TAG, fail_orphaned_runs
from assets.execution.stopped_runs import CODE_VERSIONS_TAG
from assets.pipeline.graph import GRAPH
from tests.workflows.homes import ATTRIBUTES, write_recipe
from tests.workflows.ticks import ABOVE_POLICY, BELOW_POLICY, BELOW_ROWS, OTHER_BETA, Conditions, definitions_of


def cancelled_while_training(conditions):
    """New data ask for all below; the run has made what is above the policy, a tick has seen it, and a person stops it."""
    conditions.materialize(2, "preference_source")
    assert conditions.tick() == BELOW_ROWS
    run = conditions.begin(*BELOW_ROWS)
    conditions.materialize(2, *ABOVE_POLICY)
    assert conditions.tick() == set()
    conditions.instance.report_run_canceling(run)
    assert conditions.tick() == set()
    conditions.instance.report_run_canceled(run)
    return run


def test_a_run_that_a_person_stops_is_not_started_again(conditions):
    cancelled_while_training(conditions)
    assert [conditions.tick(), conditions.tick(), conditions.tick()] == [set()] * 3


def test_the_first_run_of_all_is_not_started_again_either(tmp_path):
    """Its policy was never materialized."""
    with dg.DagsterInstance.ephemeral() as instance:
        begun = Conditions(write_recipe(tmp_path / "small", ATTRIBUTES), instance)
        begun.tick()
        run = begun.begin(*GRAPH)
        begun.materialize(1, *(asset for asset in GRAPH if asset not in BELOW_POLICY))
        asked = [begun.tick()]
        instance.report_run_canceled(run)
        assert [*asked, begun.tick(), begun.tick()] == [set()] * 3
        begun.materialize(2, "preference_source")
        assert begun.tick() == BELOW_ROWS


def test_new_data_after_a_person_has_stopped_a_run_are_asked_for_once(conditions):
    cancelled_while_training(conditions)
    assert conditions.tick() == set()
    conditions.materialize(3, "preference_source")
    assert [conditions.tick(), conditions.tick()] == [BELOW_ROWS, set()]


def test_new_data_in_the_same_tick_as_the_end_of_a_stopped_run_are_asked_for(conditions):
    cancelled_while_training(conditions)
    conditions.materialize(3, "preference_source")
    assert [conditions.tick(), conditions.tick()] == [BELOW_ROWS, set()]


def test_identical_data_after_a_person_has_stopped_a_run_ask_for_nothing(conditions):
    cancelled_while_training(conditions)
    assert conditions.tick() == set()
    conditions.materialize(2, "preference_source", *ABOVE_POLICY)
    assert [conditions.tick(), conditions.tick()] == [set(), set()]


def test_a_field_edited_after_a_person_has_stopped_a_run_is_asked_for_once(conditions):
    cancelled_while_training(conditions)
    assert conditions.tick() == set()
    write_recipe(conditions.folder, OTHER_BETA)
    specs = {"training_spec", "evaluation_spec"}
    assert [conditions.tick(), conditions.tick()] == [BELOW_POLICY | specs, set()]


def test_data_and_fields_that_changed_while_a_stopped_run_went_on_are_not_asked_for(conditions):
    """They are older than its end. What of it the run had made before stays as it is too."""
    conditions.materialize(2, "preference_source")
    assert conditions.tick() == BELOW_ROWS
    run = conditions.begin(*BELOW_ROWS, "training_spec", "evaluation_spec")
    write_recipe(conditions.folder, OTHER_BETA)
    conditions.materialize(3, "preference_source")
    asked = [conditions.tick()]
    conditions.instance.report_run_canceled(run)
    assert [*asked, conditions.tick(), conditions.tick()] == [set()] * 3


@pytest.mark.parametrize("noted", [False, True], ids=["another recipe", "this recipe"])
def test_a_recipe_that_is_loaded_after_its_run_was_stopped_is_not_new(conditions, noted):
    """As after `pedigree run` of an edited recipe, Ctrl-C, and "Reload definitions": the run notes its code versions."""
    before = definitions_of(conditions.folder).resolve_asset_graph()
    write_recipe(conditions.folder, OTHER_BETA)
    graph = definitions_of(conditions.folder).resolve_asset_graph() if noted else before
    run = conditions.begin("training_spec", "evaluation_spec", *BELOW_POLICY)
    versions = {key.to_user_string(): graph.get(key).code_version for key in graph.get_all_asset_keys()}
    conditions.instance.add_run_tags(run.run_id, {CODE_VERSIONS_TAG: json.dumps(versions)})
    conditions.instance.report_run_canceled(run)
    asked = set() if noted else BELOW_POLICY | {"training_spec", "evaluation_spec"}
    assert [conditions.tick(), conditions.tick()] == [asked, set()]


def test_a_change_after_a_stopped_run_asks_for_all_that_it_had_left(conditions):
    """The run was stopped before it had made tokens; the field alone would train on the tokens of before."""
    conditions.materialize(2, "preference_source")
    assert conditions.tick() == BELOW_ROWS
    run = conditions.begin(*BELOW_ROWS)
    conditions.materialize(2, "raw_preferences")
    asked = [conditions.tick()]
    conditions.instance.report_run_canceled(run)
    assert [*asked, conditions.tick(), conditions.tick()] == [set()] * 3
    write_recipe(conditions.folder, OTHER_BETA)
    left = {*BELOW_ROWS, "training_spec", "evaluation_spec"} - {"raw_preferences"}
    assert [conditions.tick(), conditions.tick()] == [left, set()]


def test_a_run_that_was_killed_is_started_again(conditions, tmp_path):
    """The first one after that is a person's or the condition's; this one is the condition's."""
    conditions.materialize(2, "preference_source")
    assert conditions.tick() == BELOW_ROWS
    run = conditions.begin(*BELOW_ROWS)
    gone = tmp_path / "processes" / "gone.lock"
    conditions.instance.add_run_tags(run.run_id, {PROCESS_TAG: f"{run.run_id} elsewhere 1 {gone}"})
    conditions.materialize(2, *ABOVE_POLICY)
    assert conditions.tick() == set()
    fail_orphaned_runs(conditions.instance, tmp_path)
    assert conditions.instance.get_run_by_id(run.run_id).status == dg.DagsterRunStatus.FAILURE
    assert [conditions.tick(), conditions.tick()] == [BELOW_POLICY, set()]


def test_the_schedule_asks_for_all_after_a_stopped_run(conditions):
    cancelled_while_training(conditions)
    schedule = definitions_of(conditions.folder).resolve_schedule_def("small_schedule")
    monday = datetime.datetime(2024, 1, 1, 6, tzinfo=datetime.UTC)
    with dg.build_schedule_context(conditions.instance, scheduled_execution_time=monday) as context:
        assert len(schedule.evaluate_tick(context).run_requests) == 1

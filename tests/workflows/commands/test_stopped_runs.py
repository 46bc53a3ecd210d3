"""A run that a user stops stays stopped until something changes: requests of the conditions after its end."""

import datetime
import json

import dagster as dg
import pytest

from assets.execution.run_liveness import PROCESS_TAG, fail_orphaned_runs
from assets.execution.stopped_runs import CODE_VERSIONS_TAG
from assets.pipeline.graph import GRAPH
from tests.workflows.automation_ticks import (
    ABOVE_POLICY,
    BELOW_POLICY,
    BELOW_ROWS,
    OTHER_BETA,
    Conditions,
    definitions_of,
)
from tests.workflows.homes import ATTRIBUTES, write_recipe


def cancelled_while_training(conditions):
    """New data request all below. The run materializes the assets above the policy, a tick passes, and a user stops it."""
    conditions.materialize(2, "preference_source")
    assert conditions.tick() == BELOW_ROWS
    run = conditions.begin(*BELOW_ROWS)
    conditions.materialize(2, *ABOVE_POLICY)
    assert conditions.tick() == set()
    conditions.instance.report_run_canceling(run)
    assert conditions.tick() == set()
    conditions.instance.report_run_canceled(run)
    return run


def test_stopped_run_is_not_started_again(conditions):
    cancelled_while_training(conditions)
    assert [conditions.tick(), conditions.tick(), conditions.tick()] == [set()] * 3


def test_stopped_first_run_is_not_started_again(tmp_path):
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


def test_new_data_after_a_stopped_run_are_requested_once(conditions):
    cancelled_while_training(conditions)
    assert conditions.tick() == set()
    conditions.materialize(3, "preference_source")
    assert [conditions.tick(), conditions.tick()] == [BELOW_ROWS, set()]


def test_new_data_in_the_tick_of_a_stopped_run_are_requested(conditions):
    cancelled_while_training(conditions)
    conditions.materialize(3, "preference_source")
    assert [conditions.tick(), conditions.tick()] == [BELOW_ROWS, set()]


def test_identical_data_after_a_stopped_run_request_nothing(conditions):
    cancelled_while_training(conditions)
    assert conditions.tick() == set()
    conditions.materialize(2, "preference_source", *ABOVE_POLICY)
    assert [conditions.tick(), conditions.tick()] == [set(), set()]


def test_field_edited_after_a_stopped_run_is_requested_once(conditions):
    cancelled_while_training(conditions)
    assert conditions.tick() == set()
    write_recipe(conditions.folder, OTHER_BETA)
    specs = {"training_spec", "evaluation_spec"}
    assert [conditions.tick(), conditions.tick()] == [BELOW_POLICY | specs, set()]


def test_changes_during_a_stopped_run_are_not_requested(conditions):
    """They are older than its end. Assets that the run materialized before stay too."""
    conditions.materialize(2, "preference_source")
    assert conditions.tick() == BELOW_ROWS
    run = conditions.begin(*BELOW_ROWS, "training_spec", "evaluation_spec")
    write_recipe(conditions.folder, OTHER_BETA)
    conditions.materialize(3, "preference_source")
    asked = [conditions.tick()]
    conditions.instance.report_run_canceled(run)
    assert [*asked, conditions.tick(), conditions.tick()] == [set()] * 3


@pytest.mark.parametrize("noted", [False, True], ids=["another recipe", "this recipe"])
def test_recipe_loaded_after_its_stopped_run_requests_nothing(conditions, noted):
    """As after `pedigree run` of an edited recipe, Ctrl-C, and "Reload definitions": the run recorded its code versions."""
    before = definitions_of(conditions.folder).resolve_asset_graph()
    write_recipe(conditions.folder, OTHER_BETA)
    graph = definitions_of(conditions.folder).resolve_asset_graph() if noted else before
    run = conditions.begin("training_spec", "evaluation_spec", *BELOW_POLICY)
    versions = {key.to_user_string(): graph.get(key).code_version for key in graph.get_all_asset_keys()}
    conditions.instance.add_run_tags(run.run_id, {CODE_VERSIONS_TAG: json.dumps(versions)})
    conditions.instance.report_run_canceled(run)
    asked = set() if noted else BELOW_POLICY | {"training_spec", "evaluation_spec"}
    assert [conditions.tick(), conditions.tick()] == [asked, set()]


def test_change_after_a_stopped_run_requests_all_missing_assets(conditions):
    """The run was stopped before the tokens; the field alone would train on the previous tokens."""
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
    """A user or the condition may start the first run after that; here the condition does."""
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


def test_schedule_requests_all_after_a_stopped_run(conditions):
    cancelled_while_training(conditions)
    schedule = definitions_of(conditions.folder).resolve_schedule_def("small_schedule")
    monday = datetime.datetime(2024, 1, 1, 6, tzinfo=datetime.UTC)
    with dg.build_schedule_context(conditions.instance, scheduled_execution_time=monday) as context:
        assert len(schedule.evaluate_tick(context).run_requests) == 1

"""GPU work outside of a recipe's run takes a slot of the pool, waits for it, and frees it."""

import logging
import os
import signal
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.execution.plan.active import ActiveExecution
from dagster._core.execution.plan.step import ExecutionStep

from assets.execution.interruption import INTERRUPTED
from assets.execution.run_liveness import (
    PROCESS_TAG,
    fail_orphaned_runs,
    is_alive,
    process_of,
    tag_run_with_process,
    this_process,
)
from assets.pipeline.pipeline import Services
from tests.workflows.homes import ATTRIBUTES, check_values, write_recipe
from tests.workflows.state.test_truth_table import PLAIN
from training.contract.errors import StoreError
from training.contract.store.staging import claim_folder
from workflows.commands.run import in_gpu_pool, materialize, warn_of_unlimited_gpu
from workflows.orchestration.pool_wait import wait_patiently
from workflows.orchestration.resources import build_services, prepare_home
from workflows.orchestration.resources import services as services_of_dagster
from workflows.recipes.discovery import load_recipe

pytestmark = pytest.mark.slow


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dg.DagsterInstance]:
    """Return the instance that `prepare_home` sets up, with a limit of one step for a pool."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))
    monkeypatch.setenv("PEDIGREE_HOME", str(tmp_path))
    prepare_home(tmp_path)
    with dg.DagsterInstance.get() as found:
        yield found


@pytest.fixture
def services(tmp_path: Path) -> Services:
    return build_services(tmp_path)


def slots_taken(instance: dg.DagsterInstance) -> int:
    return instance.event_log_storage.get_concurrency_info("gpu").active_slot_count


def test_work_holds_a_slot_while_it_runs(services, instance):
    assert in_gpu_pool("verify", services, instance, lambda: slots_taken(instance)) == 1
    assert slots_taken(instance) == 0
    [run] = instance.get_runs()
    assert (run.status, process_of(run)) == (dg.DagsterRunStatus.SUCCESS, this_process(services.home))


def test_error_of_the_work_is_raised(services, instance):
    def fail() -> None:
        raise StoreError("there is no policy")

    with pytest.raises(StoreError, match="there is no policy"):
        in_gpu_pool("verify", services, instance, fail)
    assert slots_taken(instance) == 0


def test_work_waits_for_a_slot_and_reports_it(services, instance, caplog):
    """The other keeps its slot until it has seen the waiting run, so the order is sure without a clock."""
    order = []
    other = instance.create_run_for_job(dg.GraphDefinition("other").to_job())
    instance.event_log_storage.initialize_concurrency_limit_to_default("gpu")
    instance.event_log_storage.claim_concurrency_slot("gpu", other.run_id, "train")

    def give_back() -> None:
        while not caplog.records:
            threading.Event().wait(0.05)
        order.append("given back")
        instance.event_log_storage.free_concurrency_slots_for_run(other.run_id)

    thread = threading.Thread(target=give_back)
    thread.start()
    in_gpu_pool("inspect", services, instance, lambda: order.append("worked"))
    thread.join()
    assert order == ["given back", "worked"]
    check_values(caplog.text, "pool gpu", other.run_id)
    [waited] = [run.run_id for run in instance.get_runs() if run.run_id != other.run_id]
    shown = [
        e for e in instance.all_logs(waited) if f"waiting for the pool gpu, taken by run {other.run_id}" in e.message
    ]
    assert [entry.level for entry in shown] == [logging.INFO], "Dagster's pages hide the level DEBUG"


def test_waiting_work_takes_the_slot_of_a_dead_run(services, instance, caplog):
    """In any state of its run. A run that no process of ours has tagged may still be at work."""
    job, claim = dg.GraphDefinition("other").to_job(), claim_folder(services.home / "processes")
    untagged = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
    dying = instance.create_run_for_job(job, status=dg.DagsterRunStatus.CANCELING)
    instance.add_run_tags(dying.run_id, {PROCESS_TAG: f"{dying.run_id} elsewhere 1 {claim.lock.name}"})
    instance.event_log_storage.initialize_concurrency_limit_to_default("gpu")
    instance.event_log_storage.claim_concurrency_slot("gpu", dying.run_id, "train")

    def die() -> None:
        while not caplog.records:
            threading.Event().wait(0.05)
        claim.give_up()

    thread = threading.Thread(target=die)
    thread.start()
    assert in_gpu_pool("inspect", services, instance, lambda: slots_taken(instance)) == 1
    thread.join()
    found = [instance.get_run_by_id(run.run_id).status for run in (untagged, dying)]
    assert found == [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELED]


@contextmanager
def taken(instance: dg.DagsterInstance) -> Iterator[str]:
    """Within the block another run holds the only slot of the pool. Yield its id."""
    other = instance.create_run_for_job(dg.GraphDefinition("other").to_job(), status=dg.DagsterRunStatus.STARTED)
    instance.event_log_storage.set_concurrency_slots("gpu", 1)
    instance.event_log_storage.claim_concurrency_slot("gpu", other.run_id, "train")
    yield other.run_id
    instance.event_log_storage.free_concurrency_slots_for_run(other.run_id)


@contextmanager
def interrupted_when_it_waits(
    caplog: pytest.LogCaptureFixture, marked: dg.DagsterInstance | None = None
) -> Iterator[None]:
    """Interrupt this process when it waits for the pool. In `marked`, the waiting run is first reported as canceled."""

    def interrupt() -> None:
        while "pool gpu" not in caplog.text:
            threading.Event().wait(0.05)
        if marked:
            marked.report_run_canceled(marked.get_runs(limit=1)[0])
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    yield


def test_waiting_work_sleeps_and_can_be_interrupted(services, instance, caplog, monkeypatch):
    """Dagster itself would query thousands of times a second, and wait on. Another run may take the slot afterwards."""
    queries, get_next_step = [], ActiveExecution.get_next_step

    def query(active: ActiveExecution) -> ExecutionStep | None:
        queries.append(active)
        return get_next_step(active)

    monkeypatch.setattr(ActiveExecution, "get_next_step", query)
    with taken(instance), interrupted_when_it_waits(caplog), pytest.raises(dg.DagsterExecutionInterruptedError):
        in_gpu_pool("inspect", services, instance, lambda: pytest.fail("it must not begin"))
    assert 1 <= len(queries) <= 10
    assert in_gpu_pool("inspect", services, instance, lambda: "worked") == "worked"


def test_slot_freed_meanwhile_is_taken(services, instance, monkeypatch):
    """The slot was freed while this run queued, so nothing would notify it. Dagster itself would wait for ever."""
    storage = instance.event_log_storage
    with taken(instance):
        remember, free = storage.add_pending_step, storage.free_concurrency_slots_for_run

        def late(**place: Any) -> None:
            for slot in storage.get_concurrency_info("gpu").claimed_slots:
                free(slot.run_id)
            remember(**place)

        monkeypatch.setattr(storage, "add_pending_step", late)
        assert in_gpu_pool("inspect", services, instance, lambda: slots_taken(instance)) == 1


def test_a_step_that_has_its_pool_in_a_tag_waits_as_well(services, instance, caplog):
    @dg.asset(op_tags={"dagster/concurrency_key": "gpu"})
    def tagged() -> None:
        pytest.fail("it must not begin")

    wait_patiently(lambda: services.home)
    with taken(instance), interrupted_when_it_waits(caplog), pytest.raises(dg.DagsterExecutionInterruptedError):
        dg.materialize([tagged], instance=instance)


@pytest.mark.slow
@pytest.mark.parametrize("canceled", [False, True], ids=["", "after it was marked as canceled"])
def test_a_recipe_that_is_stopped_while_it_waits_is_interrupted(instance, prepared_homes, tmp_path, caplog, canceled):
    """The work before the pool is done by then, and kept."""
    with prepared_homes.copied_to(tmp_path, {"plain": PLAIN}) as baseline:
        write_recipe(baseline.folders["plain"], {**PLAIN, "tokenization": {**PLAIN["tokenization"], "max_length": 100}})
        loaded = load_recipe(baseline.folders["plain"])
        with taken(instance), interrupted_when_it_waits(caplog, marked=canceled and instance):
            report = materialize(loaded, baseline.services, instance)
        assert (report.succeeded, report.interrupted, report.error) == (False, True, INTERRUPTED)
        assert [asset.outcome for asset in report.assets if asset.asset == "tokenized_pairs"] == ["computed"]
        assert "reference_logprobs" not in {asset.asset for asset in report.assets}
        again = {asset.asset: asset.outcome for asset in materialize(loaded, baseline.services, instance).assets}
        assert (again["tokenized_pairs"], again["released_model"]) == ("reused", "computed")


def test_run_started_by_dagster_is_tagged_before_its_first_step(services, instance):
    """That step may wait in the pool, and the run may be killed meanwhile."""
    seen = []

    @dg.asset
    def made(context: dg.AssetExecutionContext, services: dg.ResourceParam[Services]) -> None:
        seen.append(process_of(context.instance.get_run_by_id(context.run.run_id)))

    assert dg.materialize([made], instance=instance, resources={"services": services_of_dagster}).success
    assert seen == [this_process(services.home)]


@pytest.mark.parametrize("name", ["NOT_STARTED", "STARTING", "STARTED", "CANCELING", "CANCELED"])
def test_run_started_by_dagster_does_not_wait_for_a_dead_run(services, instance, name):
    """After a reboot a scheduled run takes the slot of the run that was killed before.

    A user may have stopped or canceled that run before.
    """
    dead = instance.create_run_for_job(dg.GraphDefinition("other").to_job(), status=dg.DagsterRunStatus(name))
    instance.add_run_tags(dead.run_id, {PROCESS_TAG: f"{dead.run_id} elsewhere 1 {services.home / 'gone.lock'}"})
    instance.event_log_storage.initialize_concurrency_limit_to_default("gpu")
    instance.event_log_storage.claim_concurrency_slot("gpu", dead.run_id, "train")

    @dg.asset
    def source(context: dg.AssetExecutionContext) -> None:
        tag_run_with_process(context.instance, context.run, services.home)

    @dg.asset(deps=[source], pool="gpu")
    def trained(context: dg.AssetExecutionContext) -> None:
        tag_run_with_process(context.instance, context.run, services.home)

    assert dg.materialize([source, trained], instance=instance).success
    ended = "CANCELED" if name.startswith("CANCEL") else "FAILURE"
    assert instance.get_run_by_id(dead.run_id).status == dg.DagsterRunStatus(ended)
    assert slots_taken(instance) == 0


def test_run_database_is_group_writable_from_its_creation(services, instance):
    """If the run is killed, another user has to record its end. SQLite creates files of 0644 at most."""
    modes: list[dict[Path, int]] = []

    def record_modes() -> None:
        records = Path(instance.root_directory).rglob("*.db*")
        modes.append({record: record.stat().st_mode & 0o666 for record in records})

    @dg.asset
    def made(context: dg.AssetExecutionContext) -> None:
        tag_run_with_process(context.instance, context.run, services.home)
        record_modes()

    before = os.umask(0o002)
    try:
        assert dg.materialize([made], instance=instance).success
        in_gpu_pool("verify", services, instance, record_modes)
    finally:
        os.umask(before)
    for run, seen in zip(reversed(instance.get_runs()), modes, strict=True):
        assert any(path.name == f"{run.run_id}.db" for path in seen)
        assert set(seen.values()) == {0o664}


def test_reexecuted_run_is_not_that_of_the_first_process(services, instance):
    """Dagster copies the tags of the first run, with its dead process. The new run is at work before it has its own tag."""
    seen, dead = [], {PROCESS_TAG: f"{uuid.uuid4()} elsewhere 1 {services.home / 'processes' / 'gone.lock'}"}

    @dg.asset
    def again(context: dg.AssetExecutionContext) -> None:
        fail_orphaned_runs(instance, services.home)
        tag_run_with_process(context.instance, context.run, services.home)
        fail_orphaned_runs(instance, services.home)
        seen.append(is_alive(process_of(instance.get_run_by_id(context.run.run_id)), services.home))

    job = dg.GraphDefinition("other").to_job()
    starting = instance.create_run_for_job(job, tags=dead, status=dg.DagsterRunStatus.STARTING)
    assert dg.materialize([again], instance=instance, tags=dead).success and seen == [True]
    assert instance.get_run_by_id(starting.run_id).status == dg.DagsterRunStatus.STARTING


def test_run_that_ends_during_the_check_keeps_its_status(services, instance, monkeypatch):
    """It succeeds, and its process ends, between the listing of runs and the check of the process."""
    claim = claim_folder(services.home / "processes")
    run = instance.create_run_for_job(dg.GraphDefinition("other").to_job(), status=dg.DagsterRunStatus.STARTED)
    instance.add_run_tags(run.run_id, {PROCESS_TAG: f"{run.run_id} elsewhere 1 {claim.lock.name}"})
    get_runs = instance.get_runs

    def list_and_end(filters):
        if found := get_runs(filters):
            instance.report_dagster_event(dg.DagsterEvent(dg.DagsterEventType.RUN_SUCCESS.value, "other"), run.run_id)
            claim.give_up()
        return found

    monkeypatch.setattr(instance, "get_runs", list_and_end)
    fail_orphaned_runs(instance, services.home)
    types = [entry.dagster_event.event_type_value for entry in instance.all_logs(run.run_id) if entry.dagster_event]
    assert "PIPELINE_SUCCESS" in types and "PIPELINE_FAILURE" not in types
    assert instance.get_run_by_id(run.run_id).status == dg.DagsterRunStatus.SUCCESS


@pytest.mark.parametrize(
    ("settings", "limit", "warnings"),
    [
        ("telemetry: {enabled: false}", None, 1),
        ("telemetry: {enabled: false}", 2, 0),
        ("concurrency: {pools: {default_limit: 3}}", None, 0),
    ],
    ids=["none", "of the pool's own", "of all pools"],
)
def test_pool_without_a_limit_is_reported_once_with_the_remedy(tmp_path, caplog, settings, limit, warnings):
    """A dagster.yaml that is not ours. Oracle: with the suggested lines, Dagster gives the second run no slot."""
    (tmp_path / "dagster.yaml").write_text(settings)
    with dg.DagsterInstance.from_config(str(tmp_path)) as found:
        if limit is not None:
            found.event_log_storage.set_concurrency_slots("gpu", limit)
        warn_of_unlimited_gpu(found)
        warn_of_unlimited_gpu(found)
        limits = [(each.name, each.limit) for each in found.event_log_storage.get_pool_limits()]
    assert limits == ([] if limit is None else [("gpu", limit)]), "the user's settings stay"
    assert [record.message.split(" ")[0] for record in caplog.records] == [f"{tmp_path}/dagster.yaml"] * warnings
    if warnings:
        (tmp_path / "dagster.yaml").write_text(caplog.text.partition("add\n")[2])
        with dg.DagsterInstance.from_config(str(tmp_path)) as found:
            found.event_log_storage.initialize_concurrency_limit_to_default("gpu")
            claims = [found.event_log_storage.claim_concurrency_slot("gpu", run, "train") for run in ("a", "b")]
        assert [claim.is_claimed for claim in claims] == [True, False]


@pytest.mark.parametrize(
    ("device", "asset", "warnings"),
    [("auto", None, 1), ("cpu", None, 0), ("auto", "training_spec", 0)],
    ids=["maybe a GPU", "no GPU", "nothing that would use it"],
)
def test_pool_without_a_limit_is_reported_if_a_gpu_may_be_used(services, tmp_path, caplog, device, asset, warnings):
    recipe = write_recipe(tmp_path / "small", {**ATTRIBUTES, "compute": {"device": device}})
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}")
    with dg.DagsterInstance.from_config(str(tmp_path)) as found:
        materialize(load_recipe(recipe), services, found, asset)
    assert caplog.text.count(f"{tmp_path}/dagster.yaml") == warnings

"""Materializing a recipe in this process, as a run that Dagster's UI shows like any other."""

import functools
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import dagster as dg
from dagster_shared.error import SerializableErrorInfo

from assets.graph import GPU_POOL, GRAPH
from assets.kinship import with_upstream
from assets.materialized import Materialization
from assets.names import claim_name
from assets.pipeline import Pipeline, Services
from assets.process import close_dead_runs, share_records, signature
from training.contract.durable import lacks_room, write_error
from training.contract.errors import PedigreeError
from workflows.own_checks import own_checks
from workflows.recipes import LoadedRecipe

_SECONDS_BETWEEN_LOOKS = 1.0
_log = logging.getLogger(__name__)
T = TypeVar("T")
# Progress bars and reports tell what happens; Dagster's own log of a run is in its event log.
_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
INTERRUPTED = "interrupted; what was finished is kept, and the same command goes on from there"
_OURS = f"{PedigreeError.__module__}."


@dataclass(frozen=True)
class AssetRun:
    """What became of one asset; `error` is what a person should read first where it failed.

    One that failed has a fingerprint where it was made and a check of it failed.
    """

    asset: str
    outcome: Literal["computed", "reused", "failed"]
    fingerprint: str | None
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class CheckRun:
    """What a check found of an asset, one of ours or of a person's own."""

    asset: str
    check: str
    passed: bool
    description: str


@dataclass(frozen=True)
class RunReport:
    """`succeeded` is about the whole run, which can fail outside its assets as well: `error` is what ended it where no asset
    failed. `is_champion` and `reasons` are the gate's decision about `model_version`, or what a person has made of it.
    """

    recipe: str
    dagster_run_id: str
    succeeded: bool
    assets: list[AssetRun]
    checks: list[CheckRun]
    metrics: dict[str, float]
    mlflow_run_id: str | None
    model_version: str | None
    is_champion: bool | None
    reasons: str | None
    samples: list[dict[str, str]]
    error: str | None = None

    @property
    def interrupted(self) -> bool:
        """Whether somebody stopped it; then no further run shall begin."""
        return any(asset.error == INTERRUPTED for asset in self.assets)


def materialize(
    loaded: LoadedRecipe, services: Services, instance: dg.DagsterInstance, asset: str | None = None
) -> RunReport:
    """Run the recipe's assets, or `asset` and its upstream. A failing asset is in the report, not an exception."""
    pipeline = loaded.pipeline
    claim_name(services.home, pipeline)
    selected = list(GRAPH) if asset is None else with_upstream(pipeline.recipe, asset)
    own = own_checks(pipeline)
    definitions = dg.Definitions.merge(
        loaded.definitions,
        own,
        dg.Definitions(resources={"services": services}, executor=dg.in_process_executor),
    )
    close_dead_runs(instance, services.home)
    pools = {pool for name in selected if (pool := GRAPH[name].pool)}
    if GPU_POOL in pools and pipeline.recipe.compute.device != "cpu":
        warn_of_unlimited_gpu(instance)
    wait_for_pools(pools, instance, services.home)
    run = _signed_run(services, instance)
    result = definitions.resolve_implicit_global_asset_job_def().execute_in_process(
        asset_selection=[pipeline.key(name) for name in selected],
        raise_on_error=False,
        **run,
    )
    done = _materialized(result)
    evaluated = done.get("evaluation", Materialization()).fingerprint
    details = services.store.open("evaluation", evaluated).details if evaluated else {}
    released = done.get("released_model", Materialization()).metadata
    assets = list(_asset_runs(result, done, pipeline, own, Path(instance.root_directory)))
    return RunReport(
        recipe=pipeline.name,
        dagster_run_id=run["run_id"],
        # Not `result.success`: that asks for the run, which a person may have deleted meanwhile.
        succeeded=bool(result.filter_events(lambda event: event.event_type == dg.DagsterEventType.RUN_SUCCESS)),
        assets=assets,
        checks=[
            CheckRun(each.asset_key.path[-1], each.check_name, each.passed, each.description or "")
            for each in result.get_asset_check_evaluations()
        ],
        metrics=details.get("metrics", {}),
        mlflow_run_id=done.get("policy", Materialization()).metadata.get("mlflow_run_id"),
        model_version=released.get("model_version"),
        is_champion=released["champion"] == "yes" if released else None,
        reasons=released.get("reasons"),
        samples=details.get("samples", []),
        error=None if any(asset.error for asset in assets) else _ended_by(result, Path(instance.root_directory)),
    )


def in_gpu_pool(name: str, services: Services, instance: dg.DagsterInstance, work: Callable[[], T]) -> T:
    """The result of `work`, done as a run called `name` with one step in the pool `gpu`. Raises what `work` raises.

    So it waits for the run that has the GPU, which a warning names, and other runs wait for it.
    """
    given: list[T] = []

    @dg.op(name=name, pool=GPU_POOL)
    def step(context: dg.OpExecutionContext) -> None:
        share_records(Path(instance.root_directory), context.run_id, services.home)
        given.append(work())

    job = dg.GraphDefinition(f"{name}_job", node_defs=[step]).to_job(executor_def=dg.in_process_executor)
    close_dead_runs(instance, services.home)
    wait_for_pools({GPU_POOL}, instance, services.home)
    job.execute_in_process(**_signed_run(services, instance))
    return given[0]


def _signed_run(services: Services, instance: dg.DagsterInstance) -> dict[str, Any]:
    """What `execute_in_process` needs for a run that everybody sees this process work on from its beginning."""
    run_id = str(uuid.uuid4())
    tags = signature(run_id, services.home)
    return {"instance": instance, "run_id": run_id, "tags": tags, "run_config": _QUIET}


def warn_of_unlimited_gpu(instance: dg.DagsterInstance) -> None:
    """Say once what is missing in a dagster.yaml of the user's own where nothing limits the pool `gpu`."""
    limited = {limit.name for limit in instance.event_log_storage.get_pool_limits()}
    if instance.global_op_concurrency_default_limit is None and GPU_POOL not in limited:
        _warn_once(
            f"{Path(instance.root_directory) / 'dagster.yaml'} sets no limit for pools, so two runs may use the same GPU at "
            "once; add\nconcurrency:\n  pools: {granularity: op, default_limit: 1}"
        )


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning(text)


def wait_for_pools(pools: set[str], instance: dg.DagsterInstance, home: Path) -> None:
    """Return when every pool has a free slot. Dagster would wait as well, but ignores Ctrl-C while it does."""
    for pool in sorted(pools):
        info = instance.event_log_storage.get_concurrency_info(pool)
        if info.slot_count and info.active_slot_count >= info.slot_count:
            _log.warning("waiting for the pool %s, taken by run %s", pool, ", ".join(sorted(info.active_run_ids)))
        while info.slot_count and info.active_slot_count >= info.slot_count:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            close_dead_runs(instance, home)
            info = instance.event_log_storage.get_concurrency_info(pool)


def _materialized(result: dg.ExecuteInProcessResult) -> dict[str, Materialization]:
    """What this run recorded, by asset: another run of the recipe may have recorded something since."""
    events = result.get_asset_materialization_events()
    recorded = [event.step_materialization_data.materialization for event in events]
    return {each.asset_key.path[-1]: Materialization.of(each) for each in recorded}


def _asset_runs(
    result: dg.ExecuteInProcessResult,
    done: Mapping[str, Materialization],
    pipeline: Pipeline,
    own: dg.Definitions,
    records: Path,
) -> Iterator[AssetRun]:
    """What became of each asset: it failed where its step did, or that of a person's `own` check of it."""
    failures = {step: event for event in result.filter_events(lambda e: e.is_step_failure) if (step := event.step_key)}
    for asset in GRAPH:
        key, made = pipeline.key(asset), done.get(asset)
        steps = [key.to_python_identifier(), *_check_steps(own, key)]
        failed = [failures[step].step_failure_data.error for step in steps if step in failures]
        if failed:
            error = "; ".join(_failed_checks(result, key)) or _reason(failed[0], records)
            fingerprint, seconds = (made.fingerprint, made.metadata["seconds"]) if made else (None, 0.0)
            yield AssetRun(asset, "failed", fingerprint, seconds, error)
        elif made is not None:
            yield AssetRun(asset, made.metadata["outcome"], made.fingerprint, made.metadata["seconds"])


def _check_steps(own: dg.Definitions, key: dg.AssetKey) -> list[str]:
    """The steps of the checks of an asset that are not made by its own."""
    return [
        check.op.name for check in own.asset_checks or () if any(each.asset_key == key for each in check.check_keys)
    ]


def _failed_checks(result: dg.ExecuteInProcessResult, key: dg.AssetKey) -> Iterator[str]:
    """What the blocking checks of an asset found that ended its step: Dagster's own error has only their names."""
    for check in result.get_asset_check_evaluations():
        if check.asset_key == key and not check.passed and check.severity == dg.AssetCheckSeverity.ERROR:
            yield f"the check {check.check_name} failed: {check.description}"


def _ended_by(result: dg.ExecuteInProcessResult, records: Path) -> str | None:
    """What ended the run outside its steps, such as a database of Dagster's that went away."""
    failures = result.filter_events(lambda event: event.event_type == dg.DagsterEventType.RUN_FAILURE)
    return next((_reason(failure.job_failure_data.error, records) for failure in failures), None)


def _reason(error: SerializableErrorInfo | None, records: Path) -> str:
    """The message of an error that a person can act on; else the root cause with the name of its class.

    Dagster's own database, in the folder `records`, names no place where its disk is full.
    """
    if error is None:
        return "it failed without an error"
    while not error.message.startswith(_OURS) and error.cause is not None:
        error = error.cause
    if error.cls_name == dg.DagsterExecutionInterruptedError.__name__:
        return INTERRUPTED
    message: str = error.message.strip()
    if not message.startswith(_OURS) and lacks_room(message):
        return str(write_error("record the run", records, message))
    return message.removeprefix(f"{_OURS}{error.cls_name}: ")

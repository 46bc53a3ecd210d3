"""Materialize a recipe in this process, as a run in Dagster's UI."""

import functools
import logging
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import dagster as dg

from assets.execution.interruption import cancel, with_stack_traces
from assets.execution.run_liveness import fail_orphaned_runs, share_records, signature
from assets.inputs.name_claims import claim_name
from assets.pipeline.graph import GPU_POOL, GRAPH, with_upstream
from assets.pipeline.pipeline import Services
from workflows.commands.run_report import RunReport, report_of
from workflows.commands.user_checks import find_user_checks
from workflows.orchestration.pool_wait import wait_patiently
from workflows.recipes.discovery import LoadedRecipe

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
# Progress bars and reports show the progress; Dagster's log of a run is in its event log.
_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


def materialize(
    loaded: LoadedRecipe, services: Services, instance: dg.DagsterInstance, asset: str | None = None
) -> RunReport:
    """Run the recipe's assets, or `asset` and its upstream. The report has failed assets; they raise no exception.

    An interrupted run is recorded as canceled by the user.
    """
    pipeline, services = loaded.pipeline, replace(services, is_command=True)
    claim_name(services.home, pipeline)
    selected = list(GRAPH) if asset is None else with_upstream(pipeline.recipe, asset)
    keys, user_checks = [pipeline.key(name) for name in selected], find_user_checks(pipeline)
    with user_checks.explaining(pipeline):
        definitions = dg.Definitions.merge(
            loaded.definitions,
            user_checks.definitions,
            dg.Definitions(resources={"services": services}, executor=dg.in_process_executor),
        )
        job = definitions.resolve_implicit_global_asset_job_def()
    fail_orphaned_runs(instance, services.home)
    pools = {pool for name in selected if (pool := GRAPH[name].pool)} | user_checks.pools(keys)
    if GPU_POOL in pools and pipeline.recipe.compute.device != "cpu":
        warn_of_unlimited_gpu(instance)
    run = _signed_run(services, instance)
    with user_checks.explaining(pipeline), with_stack_traces():
        result = job.execute_in_process(asset_selection=keys, raise_on_error=False, **run)
    records = Path(instance.root_directory)
    report = report_of(result, run["run_id"], pipeline, selected, user_checks, services, records)
    if report.interrupted:
        cancel(instance, report.dagster_run_id)
    return report


def in_gpu_pool(name: str, services: Services, instance: dg.DagsterInstance, work: Callable[[], T]) -> T:
    """Return the result of `work`, done in a run called `name` with one step in the pool `gpu`. Raises the errors of `work`.

    So it waits for the run with the GPU, named in a warning, and other runs wait for it.
    """
    results: list[T] = []

    @dg.op(name=name, pool=GPU_POOL)
    def step(context: dg.OpExecutionContext) -> None:
        share_records(Path(instance.root_directory), context.run_id, services.home)
        results.append(work())

    job = dg.GraphDefinition(f"{name}_job", node_defs=[step]).to_job(executor_def=dg.in_process_executor)
    fail_orphaned_runs(instance, services.home)
    job.execute_in_process(**_signed_run(services, instance))
    return results[0]


def _signed_run(services: Services, instance: dg.DagsterInstance) -> dict[str, Any]:
    """Return the arguments of `execute_in_process` for a run signed as this process's work from its beginning."""
    wait_patiently(lambda: services.home)
    run_id = str(uuid.uuid4())
    tags = signature(run_id, services.home)
    return {"instance": instance, "run_id": run_id, "tags": tags, "run_config": _QUIET}


def warn_of_unlimited_gpu(instance: dg.DagsterInstance) -> None:
    """Warn once if nothing limits the pool `gpu` in the user's dagster.yaml."""
    limited = {limit.name for limit in instance.event_log_storage.get_pool_limits()}
    if instance.global_op_concurrency_default_limit is None and GPU_POOL not in limited:
        _warn_once(
            f"{Path(instance.root_directory) / 'dagster.yaml'} sets no limit for pools, so two runs may use the same GPU at "
            "once; add\nconcurrency:\n  pools: {granularity: op, default_limit: 1}"
        )


@functools.cache
def _warn_once(text: str) -> None:
    _LOG.warning(text)

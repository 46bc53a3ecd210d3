"""Runs for jobs that nobody follows: they wait or run in the queue of an engine, and the process of their run has ended.

The requested run finds the job, follows it, and does everything after it. If the job has ended meanwhile, the run takes its
artifact from the store. A job of an older state of the recipe gets no run.
"""

import dagster as dg

from assets.execution.run_liveness import BEGUN, fail_orphaned_runs
from assets.lineage.history import History
from assets.pipeline.pipeline import Pipeline, Services
from training.contract.protocol.job import Job
from training.contract.system.locks import is_held
from training.launch.live_jobs import live_state, submitted_jobs
from workflows.orchestration.observations import Cursor, seconds_between_looks
from workflows.orchestration.resources import build_services, pedigree_home
from workflows.state.expected_state import expect_state

_UNFINISHED = [dg.DagsterRunStatus.QUEUED, *BEGUN]


def detached_jobs_sensor(pipeline: Pipeline, run: str) -> dg.SensorDefinition:
    """Return a sensor that requests the job `run` if an engine has a job of this recipe that nobody follows."""

    @dg.sensor(
        name=f"{pipeline.identifier}_detached_jobs_sensor",
        job_name=run,
        minimum_interval_seconds=seconds_between_looks(pipeline),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Follows jobs of {pipeline.name} in Slurm or Ray whose run has ended before them.",
    )
    def look(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        home, cursor = pedigree_home(), Cursor()
        if not (jobs := list(submitted_jobs(home))):
            return cursor.skip("no run has left a job in the queue of Slurm or Ray")
        services = build_services(home)
        fail_orphaned_runs(context.instance, home)
        if left := _find_left(jobs, pipeline, services, context.instance, run):
            cause = f"nobody follows the job of {left}"
            request = dg.RunRequest(tags={"pedigree/cause": cause})
            return dg.SensorResult(run_requests=[request], cursor=cursor.text(f"run requested: {cause}"))
        return cursor.skip(f"every job of {pipeline.name} in the queue is followed by a run")

    return look


def _find_left(
    jobs: list[Job], pipeline: Pipeline, services: Services, instance: dg.DagsterInstance, run: str
) -> str | None:
    """Return an asset of the recipe whose job nobody follows; None if there is none, or a run may follow it soon."""
    expected, history = expect_state(pipeline, services), History(instance, pipeline, services.store)
    for job in jobs:
        asset, key = job.artifact, job.derivation.key
        current = expected[asset].derivation if asset in history.assets else None
        if current is None or current.key != key or is_held(services.store.lock_file(asset, key)):
            continue
        is_made = services.store.record(asset, key) is not None and history.latest(asset).key != key
        if (is_made or live_state(services.engine, job)) and not _may_follow(pipeline.key(asset), instance, run):
            return asset
    return None


def _may_follow(key: dg.AssetKey, instance: dg.DagsterInstance, run: str) -> bool:
    """Return whether an unfinished run materializes this asset."""
    runs = instance.get_runs(dg.RunsFilter(statuses=_UNFINISHED))
    return any(found.job_name == run or key in (found.asset_selection or ()) for found in runs)

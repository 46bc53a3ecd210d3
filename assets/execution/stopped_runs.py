"""Runs stopped by the user, and the code versions of their planned assets.

A stopped run has Dagster's status CANCELED. After a kill of its process or a stop of the server, a run has the status FAILURE.
Dagster does not record the planned assets' code versions, so a tag of the run does.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import dagster as dg

from assets.lineage.history import Materialization

CODE_VERSIONS_TAG = ".dagster/pedigree_code_versions"  # Dagster's pages hide tags with this beginning


@dataclass(frozen=True)
class StoppedRun:
    """A run stopped by the user: its id, its end, and the code versions of its planned assets."""

    run: str
    time: float
    code_versions: Mapping[str, str]

    def was_to_use(self, code_versions: Mapping[dg.AssetKey, str]) -> bool:
        """Return whether the run planned some of these assets, all of them with these code versions."""
        planned = {key: self.code_versions.get(key.to_user_string()) for key in code_versions}
        return any(planned.values()) and all(
            code_versions[key] == version for key, version in planned.items() if version
        )


def note_code_versions(context: dg.AssetExecutionContext) -> None:
    """Record the code versions of the planned assets in a tag of the run."""
    layer = context.job_def.asset_layer
    versions = {key.to_user_string(): layer.get(key).code_version for key in layer.executable_asset_keys}
    text = json.dumps(versions, sort_keys=True)
    if context.run.tags.get(CODE_VERSIONS_TAG) != text:  # a re-execution has the tags of the run before
        with suppress(dg.DagsterRunNotFoundError):  # the user deleted the run while it was working
            context.instance.add_run_tags(context.run.run_id, {CODE_VERSIONS_TAG: text})


def find_stops(instance: dg.DagsterInstance, latest: Collection[Materialization]) -> dict[str, StoppedRun]:
    """Return those last runs of these assets that the user stopped, by id."""
    run_ids = sorted({run for materialization in latest if (run := materialization.last_run)})
    if not run_ids:
        return {}
    canceled = dg.RunsFilter(run_ids=run_ids, statuses=[dg.DagsterRunStatus.CANCELED])
    records = instance.get_run_records(canceled)
    return {record.dagster_run.run_id: _read_stop(record.dagster_run, record.end_time or 0.0) for record in records}


def was_stopped(instance: dg.DagsterInstance, latest: Sequence[Materialization]) -> bool:
    """Return whether the user stopped the last run of each of these assets before it made them."""
    stops = find_stops(instance, latest)
    return all(asset.last_run in stops and asset.run != asset.last_run for asset in latest)


def _read_stop(run: dg.DagsterRun, time: float) -> StoppedRun:
    return StoppedRun(run.run_id, time, json.loads(run.tags.get(CODE_VERSIONS_TAG, "{}")))

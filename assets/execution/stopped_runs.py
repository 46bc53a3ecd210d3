"""Runs that a person has stopped, and what they were to make.

Such a run has Dagster's status CANCELED. A run whose process was killed, or whose server was stopped, has the status FAILURE.
Dagster does not record the code versions that a run was to make its assets with, so a tag of the run does.
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
    """A run that a person has stopped: its id, its end, and the code versions of what it was to make, by asset."""

    run: str
    time: float
    code_versions: Mapping[str, str]

    def was_to_use(self, code_versions: Mapping[dg.AssetKey, str]) -> bool:
        """Whether the run was to make its assets among these with these code versions."""
        noted = {key: self.code_versions.get(key.to_user_string()) for key in code_versions}
        return any(noted.values()) and all(code_versions[key] == version for key, version in noted.items() if version)


def note_code_versions(context: dg.AssetExecutionContext) -> None:
    """Note the code versions of what the run of `context` is to make."""
    layer = context.job_def.asset_layer
    versions = {key.to_user_string(): layer.get(key).code_version for key in layer.executable_asset_keys}
    text = json.dumps(versions, sort_keys=True)
    if context.run.tags.get(CODE_VERSIONS_TAG) != text:  # a re-execution has the tags of the run before
        with suppress(dg.DagsterRunNotFoundError):  # a person has deleted it while it works
            context.instance.add_run_tags(context.run.run_id, {CODE_VERSIONS_TAG: text})


def find_stops(instance: dg.DagsterInstance, latest: Collection[Materialization]) -> dict[str, StoppedRun]:
    """The last runs of these assets that a person has stopped, by id."""
    run_ids = sorted({run for made in latest if (run := made.last_run)})
    if not run_ids:
        return {}
    canceled = dg.RunsFilter(run_ids=run_ids, statuses=[dg.DagsterRunStatus.CANCELED])
    found = instance.get_run_records(canceled)
    return {each.dagster_run.run_id: _stop(each.dagster_run, each.end_time or 0.0) for each in found}


def was_stopped(instance: dg.DagsterInstance, latest: Sequence[Materialization]) -> bool:
    """Whether a person has stopped the last run that was to make each of these assets, before it had made them."""
    stops = find_stops(instance, latest)
    return all(made.last_run in stops and made.run != made.last_run for made in latest)


def _stop(run: dg.DagsterRun, time: float) -> StoppedRun:
    return StoppedRun(run.run_id, time, json.loads(run.tags.get(CODE_VERSIONS_TAG, "{}")))

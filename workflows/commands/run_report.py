"""What became of a run: of each asset and each check, and why it failed, in words that a person can act on."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import dagster as dg
from dagster_shared.error import SerializableErrorInfo

from assets.bodies.checks import DIFFERENCE
from assets.execution.interruption import INTERRUPTED, is_interruption
from assets.lineage.history import Materialization
from assets.pipeline.pipeline import Pipeline, Services
from training.contract.errors import ModelError, PedigreeError
from training.contract.identity.model_identity import count_parameters
from training.contract.store.store import Store
from training.contract.system.atomic_io import is_disk_full, write_error
from workflows.commands.user_checks import UserChecks
from workflows.recipes.suggested_settings import advice, general_advice

_OURS = f"{PedigreeError.__module__}."
_ENDS = {dg.DagsterEventType.RUN_SUCCESS, dg.DagsterEventType.RUN_FAILURE}
_CHECK_FAILED = "DagsterAssetCheckFailedError"  # what Dagster ends a step with whose blocking check failed


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
    """What a check found of an asset, one of ours or of a person's own; `stops` if nothing may be made from that asset."""

    asset: str
    check: str
    passed: bool
    stops: bool
    description: str

    @property
    def failure(self) -> str:
        return f"the check {self.check} failed" + (f": {self.description}" if self.description else "")


@dataclass(frozen=True)
class RunReport:
    """`succeeded` is about the whole run, which can fail outside its assets as well: `error` is what ended it where no asset
    failed. `is_champion` and `reasons` are the gate's decision about `model_version`, or what a person has made of it.
    `notes` say what to change of a policy that hardly differs from its reference model.
    `mlflow_url` is the page with the charts of the policy's run; `is_served` unless `pedigree ui` has to show it.
    """

    recipe: str
    dagster_run_id: str
    succeeded: bool
    assets: list[AssetRun]
    checks: list[CheckRun]
    metrics: dict[str, float]
    mlflow_run_id: str | None
    mlflow_url: str | None
    model_version: str | None
    is_champion: bool | None
    reasons: str | None
    samples: list[dict[str, str]]
    is_served: bool = True
    error: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def interrupted(self) -> bool:
        """Whether somebody stopped it; then no further run shall begin."""
        return any(is_interruption(error) for error in (self.error, *(asset.error for asset in self.assets)))

    @property
    def warnings(self) -> list[CheckRun]:
        """The failed checks that stopped nothing."""
        return [check for check in self.checks if not check.passed and not check.stops]


def report_of(
    result: dg.ExecuteInProcessResult,
    run_id: str,
    pipeline: Pipeline,
    selected: Collection[str],
    own: UserChecks,
    services: Services,
    records: Path,
) -> RunReport:
    """The report of a run of the assets `selected`, in this order, which Dagster recorded in the folder `records`.

    Of `result` only the events are read: its `run_id` and `success` ask for the run, which a person may have deleted meanwhile.
    """
    done, checks = _materialized(result), list(_check_runs(result, pipeline))
    assets = []
    for asset in selected:
        key = pipeline.key(asset)
        errors = list(_errors(result, {key.to_python_identifier(), *own.steps(key)}, records))
        errors += [check.failure for check in checks if check.asset == asset and check.stops]
        if errors or asset in done:
            assets.append(_asset_run(asset, done.get(asset), errors))
    evaluated = done.get("evaluation", Materialization()).fingerprint
    details = services.store.open("evaluation", evaluated).details if evaluated else {}
    trained, released = (done.get(name, Materialization()).metadata for name in ("policy", "released_model"))
    return RunReport(
        recipe=pipeline.name,
        dagster_run_id=run_id,
        succeeded=bool(result.filter_events(lambda event: event.event_type == dg.DagsterEventType.RUN_SUCCESS)),
        assets=assets,
        checks=checks,
        metrics=details.get("metrics", {}),
        mlflow_run_id=trained.get("mlflow_run_id"),
        mlflow_url=trained.get("mlflow"),
        model_version=released.get("model_version"),
        is_champion=released["champion"] == "yes" if released else None,
        reasons=released.get("reasons"),
        samples=details.get("samples", []),
        is_served=services.tracker.is_served,
        error=None if any(asset.error for asset in assets) else _ended_by(result, records),
        notes=_notes(pipeline, checks, done, services.store),
    )


def _notes(
    pipeline: Pipeline, checks: Collection[CheckRun], done: Mapping[str, Materialization], store: Store
) -> list[str]:
    """What to change if the policy hardly differs from the reference model."""
    failed = {check.check for check in checks if check.asset == "evaluation" and not check.passed}
    if DIFFERENCE not in failed:
        return []
    pairs = store.open("tokenized_pairs", done["tokenized_pairs"].fingerprint or "").details["counts"]["train"]
    training = pipeline.recipe.training
    try:
        parameters = count_parameters(Path(done["base_model"].metadata["model"]))
    except ModelError:  # the folder was moved or written to since
        parameters = None
    return [advice(training, pairs, parameters) or general_advice(training, pairs)]


def _materialized(result: dg.ExecuteInProcessResult) -> dict[str, Materialization]:
    """What this run recorded, by asset: another run of the recipe may have recorded something since."""
    events = result.get_asset_materialization_events()
    recorded = [event.step_materialization_data.materialization for event in events]
    return {each.asset_key.path[-1]: Materialization.of(each) for each in recorded}


def _check_runs(result: dg.ExecuteInProcessResult, pipeline: Pipeline) -> Iterator[CheckRun]:
    for each in result.get_asset_check_evaluations():
        if each.asset_key.path[0] == pipeline.name:  # one of a person's own may be about other recipes too
            stops = bool(each.blocking) and not each.passed and each.severity == dg.AssetCheckSeverity.ERROR
            yield CheckRun(each.asset_key.path[-1], each.check_name, each.passed, stops, each.description or "")


def _asset_run(asset: str, made: Materialization | None, errors: Collection[str]) -> AssetRun:
    """What became of an asset that was made, or has `errors`: its own, or those of checks of it."""
    fingerprint, seconds = (made.fingerprint, made.metadata["seconds"]) if made else (None, 0.0)
    if errors:
        error = next(filter(is_interruption, errors), "; ".join(errors))
        return AssetRun(asset, "failed", fingerprint, seconds, error)
    assert made is not None
    return AssetRun(asset, made.metadata["outcome"], fingerprint, seconds)


def _errors(result: dg.ExecuteInProcessResult, steps: Collection[str], records: Path) -> Iterator[str]:
    """Why some of `steps` failed, but for failed checks: Dagster's own error has only the names of those."""
    for failure in result.filter_events(lambda event: event.is_step_failure and event.step_key in steps):
        account = failure.step_failure_data.error
        if account is None or account.cls_name != _CHECK_FAILED:
            yield _reason(account, records)


def _ended_by(result: dg.ExecuteInProcessResult, records: Path) -> str | None:
    """What ended the run outside its steps, such as a database of Dagster's that went away."""
    for end in result.filter_events(lambda event: event.event_type in _ENDS):
        return _reason(end.job_failure_data.error, records) if end.is_failure else None
    return INTERRUPTED  # of a run that a person has marked as canceled Dagster tells no such end


def _reason(error: SerializableErrorInfo | None, records: Path) -> str:
    """The message of an error that a person can act on; else the root cause with the name of its class.

    Dagster's own database, in the folder `records`, names no place where its disk is full.
    """
    if error is None:
        return "it failed without an error"
    while not error.message.startswith(_OURS) and error.cause is not None:
        error = error.cause
    message: str = error.message.strip()
    if error.cls_name == dg.DagsterExecutionInterruptedError.__name__:
        return message.partition(f"{error.cls_name}: ")[2] or INTERRUPTED
    if not message.startswith(_OURS) and is_disk_full(message):
        return str(write_error("record the run", records, message))
    return message.removeprefix(f"{_OURS}{error.cls_name}: ")

"""The report of a run: the outcome of each asset and each check, and the causes of failures as actionable messages."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import dagster as dg
from dagster_shared.error import SerializableErrorInfo

from assets.bodies.checks import DIFFERENCE
from assets.execution.interruption import INTERRUPTED, is_interruption
from assets.lineage.history import Materialization
from assets.pipeline.pipeline import Pipeline, Services
from training.contract.errors import ModelError, PedigreeError
from training.contract.identity.model_identity import count_parameters
from training.contract.protocol.artifacts import EVALUATION, TOKENIZED_PAIRS, AssetName
from training.contract.protocol.details import EvaluationDetails
from training.contract.protocol.votes import WIN_VOTES
from training.contract.store.store import Store
from training.contract.system.atomic_io import is_disk_full, write_error
from workflows.commands.user_checks import UserChecks
from workflows.recipes.suggested_settings import advice, general_advice

_OUR_ERRORS = f"{PedigreeError.__module__}."
_ENDS = {dg.DagsterEventType.RUN_SUCCESS, dg.DagsterEventType.RUN_FAILURE}
_CHECK_FAILED = "DagsterAssetCheckFailedError"  # Dagster's error for a step with a failed blocking check


@dataclass(frozen=True)
class AssetRun:
    """The outcome of one asset; `error` is the first message to read if it failed.

    A failed asset has a fingerprint if it was made and one of its checks failed.
    """

    asset: str
    outcome: Literal["computed", "reused", "failed"]
    fingerprint: str | None
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class CheckRun:
    """The result of a check, of Pedigree or the user; `stops` if it blocks everything downstream."""

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
    """The report of a run. The run can fail outside its assets as well: then `error` is the cause, and no asset failed.

    `is_champion` and `reasons` are the gate's decision about `model_version`, or the user's later one. `notes` advise on a
    policy that hardly differs from its reference model. `mlflow_url` has the charts of the policy's run, `version_url` the
    version; `is_served` is false if `pedigree ui` has to serve them. `result`: the evaluation in one sentence. `report`: the
    path of its HTML report. `gate`: the figures behind a decision that was made now.
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
    result: str | None = None
    report: str | None = None
    version_url: str | None = None
    gate: dict[str, float] = field(default_factory=dict)

    @property
    def interrupted(self) -> bool:
        """Whether the run was interrupted; then no further run must begin."""
        return any(is_interruption(error) for error in (self.error, *(asset.error for asset in self.assets)))

    def raise_for_failure(self) -> None:
        """Raise PedigreeError with the causes, unless the run succeeded."""
        if not self.succeeded:
            causes = [self.error, *(asset.error and f"{asset.asset}: {asset.error}" for asset in self.assets)]
            raise PedigreeError("; ".join(filter(None, causes)))

    @property
    def warnings(self) -> list[CheckRun]:
        """The failed checks that stopped nothing."""
        return [check for check in self.checks if not check.passed and not check.stops]


def report_of(
    result: dg.ExecuteInProcessResult,
    run_id: str,
    pipeline: Pipeline,
    selected: Collection[str],
    user_checks: UserChecks,
    services: Services,
    records: Path,
) -> RunReport:
    """Return the report of a run of the assets `selected`, in this order; `records` is the folder of Dagster's records.

    Read only the events of `result`: its `run_id` and `success` load the run, and the user may have deleted it meanwhile.
    """
    done, checks = _materialized(result), list(_check_runs(result, pipeline))
    assets = []
    for asset in selected:
        key = pipeline.key(asset)
        errors = list(_errors(result, {key.to_python_identifier(), *user_checks.steps(key)}, records))
        errors += [check.failure for check in checks if check.asset == asset and check.stops]
        if errors or asset in done:
            assets.append(_asset_run(asset, done.get(asset), errors))
    evaluated = done.get(AssetName.EVALUATION, Materialization()).fingerprint
    details = services.store.open(EVALUATION, evaluated).details if evaluated else None
    trained, judged, released = (
        done.get(name, Materialization()).metadata
        for name in (AssetName.POLICY, AssetName.EVALUATION, AssetName.RELEASED_MODEL)
    )
    return RunReport(
        recipe=pipeline.name,
        dagster_run_id=run_id,
        succeeded=bool(result.filter_events(lambda event: event.event_type == dg.DagsterEventType.RUN_SUCCESS)),
        assets=assets,
        checks=checks,
        metrics=_shown_metrics(details, released),
        mlflow_run_id=trained.get("mlflow_run_id"),
        mlflow_url=trained.get("mlflow"),
        result=judged.get("result"),
        report=released.get("page_file") or judged.get("page_file"),
        version_url=released.get("mlflow"),
        gate=_gate_figures(released),
        model_version=released.get("model_version"),
        is_champion=released["champion"] == "yes" if released else None,
        reasons=released.get("reasons"),
        samples=[sample.model_dump() for sample in details.samples] if details else [],
        is_served=services.tracker.is_served,
        error=None if any(asset.error for asset in assets) else _ended_by(result, records),
        notes=_notes(pipeline, checks, done, services.store),
    )


def _shown_metrics(details: EvaluationDetails | None, released: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of the evaluation; with votes, also the win over the champion from the metadata of the release."""
    if details is None:
        return {}
    win = {name: released[name] for name in (WIN_VOTES,) if name in released and details.accuracy_votes is not None}
    return {**details.shown_metrics, **win}


def _gate_figures(released: Mapping[str, Any]) -> dict[str, float]:
    """Return the compared values of candidate and champion; empty without a champion, or for an earlier decision."""
    names = [name for name in released if name.startswith(("candidate_", "champion_")) and not name.endswith("_pairs")]
    has_champion = any(name.startswith("champion_") for name in names)
    return {name: released[name] for name in (*names, "gain", "standard_error")} if has_champion else {}


def _notes(
    pipeline: Pipeline, checks: Collection[CheckRun], done: Mapping[str, Materialization], store: Store
) -> list[str]:
    """Return advice if the policy hardly differs from the reference model."""
    failed = {check.check for check in checks if check.asset == AssetName.EVALUATION and not check.passed}
    if DIFFERENCE not in failed:
        return []
    pairs = store.open(TOKENIZED_PAIRS, done[AssetName.TOKENIZED_PAIRS].fingerprint or "").details.counts.train
    training = pipeline.recipe.training
    try:
        parameters = count_parameters(Path(done[AssetName.BASE_MODEL].metadata["model"]))
    except ModelError:  # the folder was moved or changed since
        parameters = None
    return [advice(training, pairs, parameters) or general_advice(training, pairs)]


def _materialized(result: dg.ExecuteInProcessResult) -> dict[str, Materialization]:
    """Return the materializations of this run, by asset: another run may have recorded later ones."""
    events = result.get_asset_materialization_events()
    recorded = [event.step_materialization_data.materialization for event in events]
    return {record.asset_key.path[-1]: Materialization.of(record) for record in recorded}


def _check_runs(result: dg.ExecuteInProcessResult, pipeline: Pipeline) -> Iterator[CheckRun]:
    for check in result.get_asset_check_evaluations():
        if check.asset_key.path[0] == pipeline.name:  # a user's check may cover other recipes too
            stops = bool(check.blocking) and not check.passed and check.severity == dg.AssetCheckSeverity.ERROR
            yield CheckRun(check.asset_key.path[-1], check.check_name, check.passed, stops, check.description or "")


def _asset_run(asset: str, materialization: Materialization | None, errors: Collection[str]) -> AssetRun:
    """Return the outcome of an asset. `errors` include those from its checks."""
    fingerprint, seconds = (
        (materialization.fingerprint, materialization.metadata["seconds"]) if materialization else (None, 0.0)
    )
    if errors:
        error = next(filter(is_interruption, errors), "; ".join(errors))
        return AssetRun(asset, "failed", fingerprint, seconds, error)
    assert materialization is not None
    return AssetRun(asset, materialization.metadata["outcome"], fingerprint, seconds)


def _errors(result: dg.ExecuteInProcessResult, steps: Collection[str], records: Path) -> Iterator[str]:
    """Yield the errors of failed `steps`, except failed checks: Dagster's error has only their names."""
    for failure in result.filter_events(lambda event: event.is_step_failure and event.step_key in steps):
        error = failure.step_failure_data.error
        if error is None or error.cls_name != _CHECK_FAILED:
            yield _reason(error, records)


def _ended_by(result: dg.ExecuteInProcessResult, records: Path) -> str | None:
    """Return the error that ended the run outside its steps, such as a lost connection to Dagster's database."""
    for end in result.filter_events(lambda event: event.event_type in _ENDS):
        return _reason(end.job_failure_data.error, records) if end.is_failure else None
    return INTERRUPTED  # Dagster reports no end for a run the user marked as canceled


def _reason(error: SerializableErrorInfo | None, records: Path) -> str:
    """Return the message of a PedigreeError, else the root cause with the name of its class.

    For a full disk, Dagster's database names no path, so name the folder `records`.
    """
    if error is None:
        return "it failed without an error"
    while not error.message.startswith(_OUR_ERRORS) and error.cause is not None:
        error = error.cause
    message: str = error.message.strip()
    if error.cls_name == dg.DagsterExecutionInterruptedError.__name__:
        return message.partition(f"{error.cls_name}: ")[2] or INTERRUPTED
    if not message.startswith(_OUR_ERRORS) and is_disk_full(message):
        return str(write_error("record the run", records, message))
    return message.removeprefix(f"{_OUR_ERRORS}{error.cls_name}: ")

"""Failing runs: they fail early, with a message that a user can act on."""

import json
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import dagster as dg
import huggingface_hub.constants
import pytest
from dagster._core.storage.event_log import InMemoryEventLogStorage
from sqlalchemy.exc import OperationalError

from assets.bodies.release.released_model import promotion_lock
from assets.comparison.paired_metrics import rows_by_pair
from assets.pipeline.pipeline import Services
from model_registry.connection import connect
from model_registry.model_version import Version
from model_registry.registry import Registry
from model_registry.tracked_run import TrackedRun
from model_registry.tracking import Tracker
from tests.factories import write_inputs
from tests.workflows.homes import check_error, check_values, write_recipe
from tests.workflows.in_process import EndedJob, InProcess, services_in
from training.contract.errors import RegistryUnavailable
from training.contract.protocol.job import Job
from training.contract.store.store import Store
from training.contract.system.locks import is_held
from workflows.commands.run import materialize
from workflows.commands.run_report import RunReport
from workflows.recipes.discovery import load_recipe

pytestmark = pytest.mark.slow


@pytest.fixture
def services(tmp_path, packaged_here) -> Services:
    return services_in(tmp_path / "home")


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "split").mkdir()
    write_inputs(tmp_path / "split")
    return tmp_path / "split"


def run(
    folder,
    services,
    asset: str | None,
    fraction=0.1,
    model="./base",
    sft=None,
    training=None,
    limit=0.05,
    gate="anytime",
) -> RunReport:
    data = {"validation_fraction": fraction, "max_quarantined": limit}
    attributes = {
        "data": {"sources": [{"path": "preferences.jsonl"}], **data},
        "reference": {"model": model, "sft": sft},
        "training": training or {},
        "release": {"model_name": "split", "gate": {"type": gate}},
        "compute": {"device": "cpu"},
    }
    with dg.DagsterInstance.ephemeral() as instance:
        return materialize(load_recipe(write_recipe(folder, attributes)), services, instance, asset)


def failures_of(report: RunReport) -> dict[str, str | None]:
    return {found.asset: found.error for found in report.assets if found.outcome == "failed"}


@pytest.mark.parametrize(("fraction", "asset", "split"), [(0.0, None, "validation"), (0.99, "policy", "train")])
def test_a_run_that_needs_the_empty_split_ends_before_any_model(folder, services, fraction, asset, split):
    failures = failures_of(run(folder, services, asset, fraction))
    assert failures.keys() == {"tokenized_pairs"}
    location = f"{folder}/defs.yaml:6: data.validation_fraction: {fraction}: "
    check_error(failures["tokenized_pairs"], "empty-split", location, " 24 ", f" {split} split ")
    assert services.store.fingerprints("reference_logprobs") == []


def test_a_run_that_does_not_need_it_goes_on(folder, services):
    report = run(folder, services, "tokenized_pairs", 0.0)
    assert report.succeeded and report.assets[-1].asset == "tokenized_pairs"


def test_release_reports_why_the_mlflow_run_is_incomplete(folder, services):
    """It fails at once: a missing folder does not mean that a server restarts."""
    (services.home / "mlflow" / "artifacts").write_text("no folder")
    events: list[dict[str, Any]] = []
    [(asset, error)] = failures_of(run(folder, replace(services, listener=events.append), None, 0.3)).items()
    assert asset == "released_model"
    check_error(error, "registry-request", "MLflow run of split's policy ", "Not a directory")
    assert not [event for event in events if event["event"] == "note" and "wait" in event["text"]]
    (services.home / "mlflow" / "artifacts").unlink()
    assert run(folder, services, None, 0.3).succeeded


def test_full_disk_of_the_run_database_is_reported_with_its_path(folder, services, monkeypatch):
    """SQLite's message names neither file nor disk."""

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("assets.factory.claim_name", full)
    [error] = failures_of(run(folder, services, "preference_source")).values()
    assert re.search(r" in /\S+ \([\d,]+ bytes free\): .*\[disk-full\]$", error)


def test_error_outside_of_assets_is_reported(folder, services, monkeypatch):
    """Dagster's database fails when an asset begins, and again when this failure is recorded: no asset counts as failed."""
    store, cause = InMemoryEventLogStorage.store_event, "server closed the connection unexpectedly"
    lost = {dg.DagsterEventType.STEP_START, dg.DagsterEventType.STEP_FAILURE}

    def away(self: InMemoryEventLogStorage, event: dg.EventLogEntry) -> None:
        if event.dagster_event is not None and event.dagster_event.event_type in lost:
            raise OperationalError("INSERT INTO event_logs", {}, Exception(cause))
        store(self, event)

    monkeypatch.setattr(InMemoryEventLogStorage, "store_event", away)
    report = run(folder, services, "preference_source")
    assert not report.succeeded and failures_of(report) == {} and cause in str(report.error)


BROKEN = "{% for m in messages %}\n{{ m.no.no }}{% endfor %}"
REVERSED = "{% for m in messages | reverse %}{{ m['content'] }} {% endfor %}"


@pytest.mark.parametrize(
    ("template", "asset", "code", "values"),
    [
        (BROKEN, "tokenization_spec", "template-fails", ["chat template, line 2, "]),
        (REVERSED, "tokenized_pairs", "all-pairs-dropped", [" 24 pairs ", "prompt is not a prefix"]),
    ],
)
def test_failing_template_is_reported_with_its_field(folder, services, template, asset, code, values):
    """The template comes with the model. Its line is counted by hand in the text that `run` writes."""
    (folder / "base" / "chat_template.jinja").write_text(template)
    [(failed, error)] = failures_of(run(folder, services, "tokenized_pairs")).items()
    assert failed == asset
    check_error(error, code, f"{folder / 'defs.yaml'}:9: reference.model: ./base", *values)


REVERSED_FOR_SOME = REVERSED.replace(
    "messages | reverse", "(messages | reverse if 'capital' in messages[0]['content'] else messages)"
)


def test_the_recipe_limits_what_may_be_left_out(folder, services):
    """One row of 25 is not a pair, and the template fits 12 pairs of the other 24. Failures come with their figures."""
    (folder / "base" / "chat_template.jinja").write_text(REVERSED_FOR_SOME)
    with open(folder / "preferences.jsonl", "a") as file:
        file.write("{}\n")
    assert failures_of(run(folder, services, "tokenized_pairs", limit=0.5)) == {}
    for limit, failed, count in ((0.05, "tokenized_pairs", " 12 pairs"), (0.03, "raw_preferences", " 1 of 25 rows")):
        report = run(folder, services, "tokenized_pairs", limit=limit)
        [(asset, error)] = failures_of(report).items()
        assert services.store.folder(asset, report.assets[-1].fingerprint).is_dir(), "it was made, and then checked"
        assert asset == failed and re.match(r"the check \w+ failed: ", error)
        check_values(error, count, f" {limit:.1%} ", "data.max_quarantined")


def test_the_recipe_limits_what_the_template_may_leave_out(folder, services):
    """Its template ignores tools, which 8 of the 24 rows have."""
    rows = [json.loads(line) for line in open(folder / "preferences.jsonl")]
    with open(folder / "preferences.jsonl", "w") as file:
        for number, row in enumerate(rows):
            file.write(json.dumps(row | {"tools": [{"name": "search"}] if number < 8 else []}) + "\n")
    assert failures_of(run(folder, services, "tokenized_pairs", limit=0.34)) == {}
    [(asset, error)] = failures_of(run(folder, services, "tokenized_pairs", limit=0.33)).items()
    assert asset == "tokenized_pairs"
    check_values(error, "the check template_leaves_nothing_out failed: ", "8 pairs (33.3%)", " 33.0% ")


TYPO = {"adapter": {"target_modules": ["q_prj"]}}
FLOAT8 = {"precision": "bfloat16", "head_precision": "float8"}
BALANCED = {"router_aux_loss_coef": 0.01}
TARGETS = r"^/\S+/split/defs.yaml:\d+: training.adapter.target_modules: `training.adapter.target_modules`"
HEAD = r"^/\S+/split/defs.yaml:13: training.head_precision: float8: `training.head_precision: float8`"


def location(section: str) -> str:
    return rf"^/\S+/split/defs.yaml:\d+: {section}.router_aux_loss_coef: 0.01: `{section}.router_aux_loss_coef`"


@pytest.mark.parametrize(
    ("sft", "training", "asset", "message"),
    [
        (None, TYPO, "reference_logprobs", rf"{TARGETS} .*'q_prj'.* LlamaForCausalLM.*\[adapter-target\]$"),
        ({"epochs": 1}, TYPO, "reference_model", rf"{TARGETS} .*'q_prj'.*\[adapter-target\]$"),
        (None, FLOAT8, "reference_logprobs", rf"{HEAD} .* GPU .*\[no-float8\]$"),
        (None, BALANCED, "reference_logprobs", rf"{location('training')}: LlamaForCausalLM .*\[no-routing\]$"),
        (BALANCED, None, "reference_model", rf"{location('reference.sft')}: LlamaForCausalLM .*\[no-routing\]$"),
    ],
)
def test_invalid_training_is_refused_before_any_model_runs(folder, services, sft, training, asset, message):
    failures = failures_of(run(folder, services, None, sft=sft, training=training))
    assert failures.keys() == {asset} and re.search(message, failures[asset]), failures
    assert not list(services.store.root.glob("memo/*/*")) and not list(services.home.glob("jobs/*/checkpoints"))


def test_resumed_job_does_not_print_events_of_earlier_attempts(folder, services, monkeypatch):
    """The policy keeps that event for MLflow: an event of 1970, in the folder of a job that has checkpoints.

    The clock of the job's machine is a minute behind.
    """
    run(folder, services, "policy", 0.3)
    [job] = services.home.glob("jobs/policy-*")
    for place in ("store/policy", "store/keys/policy"):
        shutil.rmtree(services.home / place)
    (job / "checkpoints").mkdir()
    (job / "events.jsonl").write_text('{"event": "note", "time": 1.0, "text": "of an earlier attempt"}\n')
    events: list[dict[str, Any]] = []

    class Behind(InProcess):
        def submit(self, job: Job, lock: BinaryIO | None = None) -> EndedJob:
            with monkeypatch.context() as there:
                now = time.time
                there.setattr(time, "time", lambda: now() - 60)
                return super().submit(job, lock)

    assert run(folder, replace(services, engine=Behind(), listener=events.append), "policy", 0.3).succeeded
    [policy] = services.home.glob("store/policy/*")
    assert "of an earlier attempt" in (policy / "events.jsonl").read_text()
    assert {event["event"] for event in events} >= {"phase", "step"} and all(event["time"] > 1.0 for event in events)


def test_report_has_our_message_instead_of_the_librarys(folder, services, monkeypatch):
    """Our error, with the field and the remedy, replaces the hub's."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    [(asset, error)] = failures_of(run(folder, services, "base_model", model="nobody/nothing")).items()
    assert asset == "base_model"
    check_error(error, "hub-offline", "reference.model: nobody/nothing: ", "HF_HUB_OFFLINE")


class Watched(Registry):
    """Record at each move of an alias whether the promotion lock is held."""

    def watch(self, lock: Path, store: Store) -> "Watched":
        self.lock, self.store = lock, store
        self.held: list[bool] = []
        return self

    def register(self, name: str, *args: Any, **kwargs: Any) -> Version:
        self.held.append(is_held(self.lock))
        self.key = kwargs["identity"]["pedigree.release"]
        self.is_alone = is_held(self.store.lock_file("released_model", self.key))
        return super().register(name, *args, **kwargs)

    def nominate(self, version: Version) -> None:
        self.held.append(is_held(self.lock))
        super().nominate(version)

    def promote(self, version: Version, over: Version | None) -> bool:
        self.held.append(is_held(self.lock))
        return super().promote(version, over)


def test_aliases_move_under_a_lock_that_recipes_with_one_model_share(folder, services):
    """Otherwise two candidates are compared with one champion, and the second replaces the first unseen.

    The lock is free while files are stored: a rollback would wait for them, and then take back a new champion.
    """
    with promotion_lock(services.store, "split") as lock:
        registry = Watched(services.registry.tracking_uri, services.home / "mlflow" / "downloads").watch(
            Path(lock.name), services.store
        )
    report = run(folder, replace(services, registry=registry), None, 0.25)
    assert report.succeeded
    assert registry.held == [False, True, True], "the version, candidate, then champion"
    assert registry.is_alone, "another release of the same waits, and finds it"
    assert not is_held(registry.lock)


class Overtaken(Registry):
    """A registry in which another home promotes a version with the same evaluation, right after the champion is read."""

    is_overtaken = False

    def champion(self, name: str) -> Version | None:
        found = super().champion(name)
        if not self.is_overtaken:
            self.is_overtaken = True
            client = connect(self.tracking_uri)
            mine = client.get_model_version_by_alias(name, "candidate")
            other = client.create_model_version(name, mine.source, mine.run_id, tags=mine.tags)
            client.set_registered_model_alias(name, "champion", other.version)
        return found


def test_candidate_is_compared_with_the_champion_at_promotion(folder, services):
    """The evaluations of champions of other homes or programs are missing here: the message names the remedy.

    By hand: without one the candidate is promoted, but for another that came meanwhile and has the same policy.
    """
    client, elsewhere = connect(services.registry.tracking_uri), "f" * 64
    client.create_registered_model("split")
    cases: list[tuple[dict[str, str], str, list[str]]] = [
        (
            {"pedigree.evaluation": elsewhere},
            "champion-missing",
            [f"store/evaluation/{elsewhere}", "evaluation of split/1"],
        ),
        ({}, "champion-without-lineage", ["`champion`"]),
    ]
    for tags, code, values in cases:
        other = client.create_model_version("split", "file:///elsewhere", tags=tags)
        client.set_registered_model_alias("split", "champion", other.version)
        [(asset, error)] = failures_of(run(folder, services, None, 0.6)).items()
        assert asset == "released_model"
        check_error(error, code, f"version {other.version} of split", *values)
    client.delete_registered_model_alias("split", "champion")
    registry = Overtaken(services.registry.tracking_uri, services.home / "mlflow" / "downloads")
    report = run(folder, replace(services, registry=registry), None, 0.6)
    assert report.succeeded and report.is_champion is False
    assert report.reasons == "its policy is the champion's"
    assert registry.champion("split").number == int(report.model_version) + 2


class Promoted(Registry):
    """A registry whose server promotes, and fails before it has answered."""

    was_away = False

    def promote(self, version: Version, over: Version | None) -> bool:
        is_promoted = super().promote(version, over)
        if not self.was_away:
            self.was_away = True
            raise RegistryUnavailable("it restarts")
        return is_promoted


def test_the_reasons_of_a_decision_outlive_a_restart(folder, services):
    registry = Promoted(services.registry.tracking_uri, services.home / "mlflow" / "downloads")
    report = run(folder, replace(services, registry=registry), None, 0.6)
    assert registry.was_away and report.is_champion
    assert "no champion before" in report.reasons


class Restarting(Registry):
    """A registry whose server fails at the first request for files."""

    was_away = False

    def fetch(self, version: Version, part: str, into: Path) -> Path:
        if not self.was_away:
            self.was_away = True
            raise RegistryUnavailable("it restarts")
        return super().fetch(version, part, into)


def test_a_candidate_is_compared_with_a_champion_of_another_home(folder, services, tmp_path):
    """As in one home: both evaluations have the same pairs, and the champion's comes with its version.

    The release waits for a server that restarts meanwhile, because its run is a scheduled one.
    """
    assert run(folder, services, None, 0.6).is_champion
    (tmp_path / "other").mkdir()
    registry = Restarting(services.registry.tracking_uri, services.home / "mlflow" / "downloads")
    champion = registry.champion("split")
    other = replace(services_in(tmp_path / "other"), tracker=services.tracker, registry=registry)
    report = run(folder, other, None, 0.6, training={"optimizer": {"learning_rate": 1e-6}}, gate="ladder")
    assert report.succeeded
    fetched = other.store.open("evaluation", champion.fingerprint_of("evaluation"))
    own = services.store.open("evaluation", fetched.fingerprint)
    assert f"{len(rows_by_pair(own))} shared pairs" in report.reasons
    assert fetched.manifest == own.manifest and not fetched.folder.samefile(own.folder)
    assert list((other.store.root / "staging").iterdir()) == []


@dataclass
class Outage:
    """A dead server at port 9 of loopback, replaced by the database from the registry's second query on."""

    services: Services
    questions: int = 0

    @property
    def is_over(self) -> bool:
        return self.questions > 1

    def tracker(self) -> Tracker:
        restored, dead, outage = self.services.tracker, Tracker("http://127.0.0.1:9", None), self

        class Away(Tracker):
            @contextmanager
            def run(self, **about: Any) -> Iterator[TrackedRun]:
                with (restored if outage.is_over else dead).run(**about) as run:
                    yield run

            def log_evaluation(self, *arguments: Any) -> bool:
                return (restored if outage.is_over else dead).log_evaluation(*arguments)

        return Away("http://127.0.0.1:9", None)

    def registry(self) -> Registry:
        outage = self

        class Back(Registry):
            def find_version(self, name: str, tags: Mapping[str, str]) -> Version | None:
                outage.questions += 1
                return super().find_version(name, tags)

        return Back(self.services.registry.tracking_uri, self.services.home / "mlflow" / "downloads")


def test_a_run_that_found_no_server_is_delivered_by_the_release(folder, services):
    """Oracle: MLflow. Policy and evaluation were made in the outage; their run is created in full when the server is back.

    The release waits for it: a version without its run would lack its training record.
    """
    outage = Outage(services)
    report = run(folder, replace(services, tracker=outage.tracker(), registry=outage.registry()), None, 0.25)
    assert report.succeeded, failures_of(report)
    client = connect(services.registry.tracking_uri)
    found = client.get_run(client.get_model_version("split", "1").run_id)
    assert found.info.status == "FINISHED" and client.get_metric_history(found.info.run_id, "loss")
    evaluated = {name for name in report.metrics if name.startswith("eval/")}
    assert evaluated <= found.data.metrics.keys() and found.data.tags["pedigree.evaluation"] in evaluations(report)
    assert [file.path for file in client.list_artifacts(found.info.run_id, "evaluation")] == ["evaluation/report.html"]


def evaluations(report: RunReport) -> set[str | None]:
    return {asset.fingerprint for asset in report.assets if asset.asset == "evaluation"}

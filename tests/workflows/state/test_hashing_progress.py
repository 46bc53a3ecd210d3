"""Progress of slow hashing: reported by an asset, by a job, and by a command on stderr."""

import json
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest

from tests.factories import write_inputs
from tests.workflows.homes import ATTRIBUTES, Checkout, Home, write_recipe
from tests.workflows.in_process import services_in
from training.contract.identity import file_hashing
from training.contract.protocol.events import Event, read_events
from workflows.commands.run import materialize
from workflows.recipes.discovery import load_recipe

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report progress for each file."""
    monkeypatch.setattr(file_hashing, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(file_hashing, "_BETWEEN_SECONDS", 0.0)


def test_slow_hashing_of_an_asset_and_a_job_is_logged_and_reported(tmp_path: Path):
    folder = tmp_path / "small"
    folder.mkdir()
    write_inputs(folder)
    events: list[Event] = []
    services = replace(services_in(tmp_path / "home"), listener=events.append)
    with dg.DagsterInstance.ephemeral() as instance:
        report = materialize(load_recipe(write_recipe(folder, ATTRIBUTES)), services, instance, "reference_logprobs")
        assert report.succeeded
        messages = [entry.user_message for entry in instance.all_logs(report.dagster_run_id)]
    reported = [(event["asset"], event["phase"]) for event in events if event["event"] == "phase"]
    weights = folder / "base" / "model.safetensors"
    assert ("base_model", f"hashing {weights}") in reported
    assert any(message.endswith(f"base_model: hashing {weights}") for message in messages), messages
    done = [event for event in events if event["event"] == "progress" and event["asset"] == "base_model"][-1]
    assert (done["unit"], done["seconds_left"]) == ("MB", 0.0) and done["done"] == done["total"]
    [job] = services.home.glob("jobs/raw_preferences-*/events.jsonl")
    phases = [event["phase"] for event in read_events(job) if event["event"] == "phase"]
    assert phases[-1].startswith(f"hashing {services.store.root / 'staging'}"), phases


@pytest.mark.parametrize("command", [("verify", "--rows", "0"), ("status",), ("plan",)], ids=lambda command: command[0])
def test_slow_hashing_of_a_command_is_on_stderr(checkout: Checkout, command: tuple[str, ...]):
    """The command works on no asset, so its report names files."""
    (checkout.home / "hashes.json").unlink(missing_ok=True)
    done = Home(checkout.home).invoke(command[0], str(checkout.folder), *command[1:], "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["recipe"] == "small", done.output
    assert f"files: hashing {checkout.folder / 'base' / 'model.safetensors'}" in done.stderr.splitlines()

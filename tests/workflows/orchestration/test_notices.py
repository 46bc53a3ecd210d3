"""The example of docs/guides/schedules.md: notices of failed runs and of new versions."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from tests.factories import write_inputs
from tests.workflows.homes import ATTRIBUTES, ROOT, check_error, check_values, write_recipe
from tests.workflows.in_process import services_in
from workflows.commands.run import materialize
from workflows.recipes.discovery import load_recipe

pytestmark = pytest.mark.slow


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the texts that a webhook received."""
    texts: list[str] = []

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            texts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Webhook) as server:
        monkeypatch.setenv("NOTICES_URL", f"http://127.0.0.1:{server.server_port}/")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield texts
        server.shutdown()
        thread.join()


def test_example_of_notices_reports_failures_and_versions(tmp_path: Path, packaged_here, notices: list[str]):
    example = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guides/schedules.md").read_text(), re.DOTALL)[0]
    sensors: dict[str, Any] = {}
    exec(example, sensors)
    folder = tmp_path / "small"
    folder.mkdir()
    write_inputs(folder)
    recipe = load_recipe(write_recipe(folder, ATTRIBUTES))
    (tmp_path / "home").mkdir()
    services = services_in(tmp_path / "home")
    with dg.DagsterInstance.ephemeral() as instance:

        def report_last_run() -> None:
            [record] = instance.get_run_records(limit=1)
            run, kind = record.dagster_run, dg.DagsterEventType
            is_failed = run.status == dg.DagsterRunStatus.FAILURE
            [event] = instance.all_logs(run.run_id, of_type=kind.RUN_FAILURE if is_failed else kind.RUN_SUCCESS)
            name = "failures" if is_failed else "releases"
            context = dg.build_run_status_sensor_context(name, event.dagster_event, instance, run)
            sensors[name](context.for_run_failure() if is_failed else context)

        assert materialize(recipe, services, instance).succeeded
        report_last_run()
        assert materialize(recipe, services, instance).succeeded
        report_last_run()
        with (folder / "preferences.jsonl").open("a") as rows:
            rows.write('{"prompt": "no answers"}\n' * 100)
        assert not materialize(recipe, services, instance).succeeded
        report_last_run()
        (folder / "preferences.jsonl").unlink()
        assert not materialize(recipe, services, instance).succeeded
        report_last_run()
    version, check, failure = notices
    check_values(version, "models:/small/1, champion: yes", "no champion before")
    check_values(check, "quarantine_within_limit: ", "100 of 124 rows (80.6%)")
    check_error(failure, "no-files", "small__preference_source failed: ", folder / "preferences.jsonl")

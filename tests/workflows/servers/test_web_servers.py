"""Both web servers, real ones, over a home in which a recipe was run: the pages that a user sees."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import dagster as dg
import pytest

from model_registry.registry import Registry
from tests.browser import FLAGS, chromium
from tests.workflows.homes import PEDIGREE, ROOT
from tests.workflows.recipes.test_discovery import EXPECTED
from training.contract.errors import PedigreeError
from workflows.servers import server_processes, web_servers
from workflows.servers.server_processes import free_port

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.xdist_group("ui")]  # one start of the servers for all
LOCATION = "workflows.definitions"

QUERY = """{
  assetNodes { assetKey { path } staleStatus
               assetMaterializations(limit: 1) { runId }
               assetChecksOrError { ... on AssetChecks {
                 checks { name blocking executionForLatestMaterialization { status } } } } }
  repositoriesOrError { ... on RepositoryConnection { nodes {
    schedules { name scheduleState { status } } sensors { name sensorType sensorState { status } } } } }
}"""


def graphql(address, query, **variables):
    body = json.dumps({"query": query, "variables": variables}).encode()
    request = urllib.request.Request(f"{address}/graphql", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["data"]


def test_dagster_shows_every_asset_fresh_with_its_checks_and_no_other_recipe(servers):
    found = graphql(servers[0], QUERY)
    assert {node["assetKey"]["path"][0] for node in found["assetNodes"]} == {"small", "wrong"}
    nodes = {
        node["assetKey"]["path"][1]: node for node in found["assetNodes"] if node["assetKey"]["path"][0] == "small"
    }
    assert set(nodes) == set(EXPECTED)
    assert {node["staleStatus"] for node in nodes.values()} == {"FRESH"}
    assert all(node["assetMaterializations"] for node in nodes.values())
    checks = {c["name"]: c for node in nodes.values() for c in node["assetChecksOrError"].get("checks", [])}
    assert len(checks) == 13
    assert {c["executionForLatestMaterialization"]["status"] for c in checks.values()} == {"SUCCEEDED"}
    assert {name for name, c in checks.items() if not c["blocking"]} == {
        "disclosure",
        "fresh_and_finite",
        "held_out_accuracy_above_chance",
        "no_held_out_prompt_trained_on_before",
        "policy_differs_from_reference",
    }


def test_dagster_shows_the_schedule_and_the_sensor(servers):
    [repository] = graphql(servers[0], QUERY)["repositoriesOrError"]["nodes"]
    schedules = {s["name"]: s["scheduleState"]["status"] for s in repository["schedules"]}
    sensors = {s["name"]: s["sensorState"]["status"] for s in repository["sensors"]}
    assert schedules == {"small_schedule": "RUNNING"}
    names = ("small_data_sensor", "small_automation", "small_detached_jobs_sensor", "wrong_data_sensor")
    assert sensors == dict.fromkeys(names, "RUNNING")
    types = {s["name"]: s["sensorType"] for s in repository["sensors"]}
    assert types["small_automation"] == "AUTOMATION", "evaluated in a process that knows our condition"


def test_no_command_has_the_address_of_the_database(servers):
    """All users of a machine see all commands on it, and such an address may hold a password."""
    port, commands = servers[1].rpartition(":")[2], []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            commands.append(file.read_text(errors="replace"))
    of_mlflow = [command for command in commands if f"--port\0{port}\0" in command]
    assert of_mlflow and "mlflow.db" not in "".join(of_mlflow)


def test_a_run_started_in_the_web_ui_reuses_everything(servers):
    launch = """mutation ($params: ExecutionParams!) { launchPipelineExecution(executionParams: $params) {
      __typename ... on LaunchRunSuccess { run { runId } } } }"""
    selector = {
        "repositoryLocationName": LOCATION,
        "repositoryName": "__repository__",
        "jobName": "small_retrain",
    }
    launched = graphql(servers[0], launch, params={"selector": selector, "mode": "default"})["launchPipelineExecution"]
    assert launched["__typename"] == "LaunchRunSuccess"
    run = f'{{ runOrError(runId: "{launched["run"]["runId"]}") {{ ... on Run {{ status }} }} }}'
    deadline = time.monotonic() + 180
    while (status := graphql(servers[0], run)["runOrError"]["status"]) not in ("SUCCESS", "FAILURE"):
        assert time.monotonic() < deadline, status
        time.sleep(1)
    assert status == "SUCCESS"
    outcomes = graphql(
        servers[0],
        """{ assetNodes { assetKey { path } assetMaterializations(limit: 1) {
           metadataEntries { label ... on TextMetadataEntry { text } } } } }""",
    )["assetNodes"]
    labels = [
        entry["text"]
        for node in outcomes
        if node["assetKey"]["path"][0] == "small"
        for entry in node["assetMaterializations"][0]["metadataEntries"]
        if entry["label"] == "outcome"
    ]
    assert labels == ["reused"] * len(EXPECTED)


@pytest.mark.parametrize("command", ["dagster", "dg"])
def test_the_code_location_has_one_name_whoever_serves_it(command, new_home):
    """Dagster stores stopped schedules and cursors of sensors by that name and their own."""
    home, port = new_home(), free_port(0)
    environment = home.environment | {"DAGSTER_HOME": str(home.path), "DO_NOT_TRACK": "1"}
    with open(home.path / "server.log", "wb") as log:
        process = subprocess.Popen(
            [Path(PEDIGREE).with_name(command), "dev", "--port", str(port)],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    try:
        assert names(f"http://127.0.0.1:{port}", process) == [LOCATION]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def names(address, process):
    """Return the names of the code locations that the server shows, as soon as it answers."""
    while process.poll() is None:
        with contextlib.suppress(OSError):
            found = graphql(address, "{ workspaceOrError { ... on Workspace { locationEntries { name } } } }")
            return [entry["name"] for entry in found["workspaceOrError"]["locationEntries"]]
        time.sleep(0.5)
    raise AssertionError(f"ended with {process.returncode}")


def test_the_pages_in_a_browser(servers, printed, first_run, tmp_path):
    """The printed addresses, and Dagster's link, open runs and charts."""
    _, report = first_run
    charts = servers[1] + report["mlflow_url"].removeprefix("http://127.0.0.1:5000")
    pages = {
        f"{servers[0]}/assets/small/policy": ["policy", "rewards"],
        printed[1]: ["Run Name", "small v1", "matching run"],
        charts: ["Model metrics", "eval/rewards", "Add chart"],
    }
    for number, (page, texts) in enumerate(pages.items()):
        shown = text_in_browser(page, tmp_path / str(number))
        assert all(text in shown for text in texts), (page, shown[-2000:])
        assert "Detect Issues in Your Traces" not in shown


def linked(address, asset):
    """Return the link to MLflow on Dagster's page of an asset."""
    query = """query ($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
      assetMaterializations(limit: 1) { metadataEntries { label ... on UrlMetadataEntry { url } } } } } }"""
    node = graphql(address, query, key={"path": ["small", asset]})["assetNodeOrError"]
    [url] = [e["url"] for e in node["assetMaterializations"][0]["metadataEntries"] if e["label"] == "mlflow"]
    return url


def text_in_browser(page, folder):
    """Return the text of the page after 20 seconds of the browser's own time."""
    command = [*browser_command(folder), "--timeout=20000", "--virtual-time-budget=20000", "--dump-dom", page]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return re.sub(r"<script.*?</script>", "", done.stdout, flags=re.S)


def browser_command(folder):
    """Return the command of a browser with its profile in `folder`."""
    return [chromium(), *FLAGS, f"--user-data-dir={folder}"]


def test_the_addresses_of_mlflow_open_runs_and_charts(servers, printed, first_run):
    """No server was running during the run, so the address of its charts is the default one."""
    _, report = first_run
    view = "viewStateShareKey=all&compareRunsMode=CHART&workflowType=machine_learning"
    assert printed[1] == f"{servers[1]}/#/experiments/1/runs?{view}"
    charts = f"/#/experiments/1/runs/{report['mlflow_run_id']}/model-metrics?workflowType=machine_learning"
    assert report["mlflow_url"] == f"http://127.0.0.1:5000{charts}"
    assert linked(servers[0], "policy") in (report["mlflow_url"], f"{servers[1]}{charts}")


def test_pages_over_a_database_have_the_printed_addresses(tmp_path, monkeypatch):
    """A database server has its address in no note. Dagster and its runs get the address, and no command shows the password."""
    monkeypatch.delenv("PEDIGREE_MLFLOW_UI", raising=False)
    started = []

    @contextlib.contextmanager
    def serving(wanted, report):
        started.extend(wanted)
        yield

    monkeypatch.setattr(web_servers, "serving", serving)
    port = free_port(0)
    runs, models = "postgresql://me:secret@db/runs", "postgresql://me:secret@db/models"
    registry = Registry(runs, tmp_path, models)
    with dg.instance_for_test() as instance:
        reference = instance.get_ref()
    hosts = ["tuning.example.org"]
    with web_servers.web_servers(tmp_path, reference, registry, (free_port(0), port), hosts, print) as pages:
        assert pages.mlflow == f"http://127.0.0.1:{port}"
    mlflow, *dagster = started
    common = {"PEDIGREE_MLFLOW_UI": pages.mlflow, "PEDIGREE_ALLOWED_HOSTS": "tuning.example.org"}
    assert [server.name for server in dagster if server.environment.items() >= common.items()] == [
        "Dagster's code server",
        "Dagster's daemon",
        "Dagster's web server",
    ]
    stores = {"MLFLOW_BACKEND_STORE_URI": runs, "MLFLOW_REGISTRY_STORE_URI": models}
    assert mlflow.environment == {**stores, "PEDIGREE_ALLOWED_HOSTS": "tuning.example.org"}
    assert "secret" not in " ".join(word for server in started for word in server.command)


def test_a_server_that_ends_is_started_again_once(tmp_path):
    """It would end again if it ends soon after that."""
    command = [sys.executable, "-c", "import time; time.sleep(0.2); raise SystemExit(7)"]
    mortal = server_processes.Server("A server", command, "", "", tmp_path / "log", restarts=True)
    reports: list[str] = []
    with (
        pytest.raises(PedigreeError, match=r"A server ended with status 7; its log is \S+/log.*\[server-ended\]$"),
        server_processes.serving([mortal], reports.append) as processes,
    ):
        processes.watch()
    assert len(reports) == 1 and "status 7" in reports[0]


def test_a_server_is_stopped_if_the_next_one_cannot_start(tmp_path):
    """The log of the second is unavailable, because it may be another user's."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    logs = (tmp_path / "first.log", tmp_path)
    sleepers = [
        server_processes.Server("A server", [sys.executable, "-c", "import time; time.sleep(600)"], "", "", log)
        for log in logs
    ]
    started = []

    def start(server):
        started.append(beginning(server))
        return started[-1]

    beginning = server_processes._start
    with pytest.MonkeyPatch.context() as patch, pytest.raises(IsADirectoryError):
        patch.setattr(server_processes, "_start", start)
        with server_processes.serving(sleepers, print):
            pass
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert [process.poll() is None for process in started] == [False]

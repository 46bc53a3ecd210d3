"""Pages of other sites against the real servers of `pedigree ui`: they start, read and delete nothing.

A real browser opens a page on another port of loopback. Its script tries every way to send a request: with and without a
preflight, as a form, as an image, in a frame, by websocket. The same page reaches a server without the check.
"""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from tests.workflows.servers.test_web_servers import browser_command, graphql

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.xdist_group("ui")]
MUTATION = """mutation { launchPipelineExecution(executionParams: {mode: "default", selector: {
  repositoryLocationName: "workflows.definitions", repositoryName: "__repository__", jobName: "small_retrain"}})
  { __typename } }"""
WIPE = 'mutation { wipeAssets(assetPartitionRanges: [{assetKey: {path: ["small", "policy"]}}]) { __typename } }'
CREATED = "/ajax-api/2.0/mlflow/experiments/create"
FOREIGN = [
    {"Host": "evil.example"},
    {"Host": "evil.example", "Origin": "http://evil.example"},
    {"Origin": "http://evil.example"},
    {"Origin": "http://127.0.0.1:8888"},
    {"Origin": "http://localhost:8888"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"},
]


def status(address, body=None, **headers):
    request = urllib.request.Request(address, body, headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def state(servers):
    """Return the ids of all runs and experiments, and the materialized assets."""
    found = graphql(
        servers[0],
        "{ runsOrError { ... on Runs { results { runId } } } assetNodes { id assetMaterializations(limit: 1) { runId } } }",
    )
    request = urllib.request.Request(
        f"{servers[1]}/ajax-api/2.0/mlflow/experiments/search",
        json.dumps({"max_results": 1000}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
        return found, json.load(answer)["experiments"]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
@pytest.mark.parametrize("mutation", [MUTATION, WIPE], ids=["start", "delete"])
def test_dagster_refuses_requests_of_other_sites(servers, headers, mutation):
    before = state(servers)
    body, address = json.dumps({"query": mutation}).encode(), f"{servers[0]}/graphql"
    in_address = f"{address}?{urllib.parse.urlencode({'query': mutation})}"
    assert status(address, body, **{"Content-Type": "application/json", **headers}) == 403
    assert status(in_address, b"", **{"Content-Type": "text/plain", **headers}) == 403
    assert status(in_address, **headers) == 403
    assert status(f"{servers[0]}/report_asset_materialization/small/policy", b"{}", **headers) == 403
    assert status(f"{servers[0]}/", **headers) == 403
    assert state(servers) == before


def test_dagster_answers_no_query_by_get(servers):
    """An older browser sends the GET of an image without any of these headers."""
    before = state(servers)
    address = f"{servers[0]}/graphql?{urllib.parse.urlencode({'query': MUTATION})}"
    assert status(address, Accept="image/*") == 405
    assert status(address, Accept="text/html") == 200, "the page with the editor"
    assert state(servers) == before


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_mlflow_refuses_requests_of_other_sites(servers, headers):
    before = state(servers)
    body = json.dumps({"name": "evil"}).encode()
    assert status(f"{servers[1]}{CREATED}", body, **{"Content-Type": "application/json", **headers}) == 403
    assert status(f"{servers[1]}/ajax-api/2.0/mlflow/experiments/get-by-name?experiment_name=small", **headers) == 403
    assert status(f"{servers[1]}/", **headers) == 403
    assert state(servers) == before


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:8888", "null"])
def test_dagster_refuses_websockets_of_other_sites(servers, origin):
    address = servers[0].replace("http", "ws") + "/graphql"
    with (
        pytest.raises(InvalidStatus) as refused,
        connect(address, origin=origin, subprotocols=[Subprotocol("graphql-ws")]),
    ):
        pass
    assert refused.value.response.status_code == 403
    with connect(address, origin=servers[0], subprotocols=[Subprotocol("graphql-ws")]) as websocket:
        websocket.send(json.dumps({"type": "connection_init"}))
        assert json.loads(websocket.recv())["type"] == "connection_ack"


def test_a_foreign_host_is_refused_by_websocket_too(servers):
    address = servers[0].replace("http", "ws") + "/graphql"
    port = int(servers[0].rpartition(":")[2])
    rebound = address.replace("127.0.0.1", "evil.example")
    connection = socket.create_connection(("127.0.0.1", port))
    with pytest.raises(InvalidStatus) as refused, connect(rebound, sock=connection, proxy=None):
        pass
    assert refused.value.response.status_code == 403


def test_all_servers_listen_on_loopback(servers):
    """`servers` are children of this process."""
    listening = [
        connection.laddr
        for process in psutil.Process().children(recursive=True)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {int(address.rpartition(":")[2]) for address in servers} <= {address.port for address in listening}
    assert {address.ip for address in listening} == {"127.0.0.1"}


def running(command):
    """Return the ids of the running servers with this word in their command."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            found |= {process.pid} if command in process.cmdline() else set()
    return found


def test_ended_servers_are_started_again(servers):
    """The web server connects to the new code server by itself."""
    for command in ("dagster._daemon", "code-server"):
        [ended] = running(command)
        os.kill(ended, signal.SIGKILL)
        deadline = time.monotonic() + 90
        while not running(command) - {ended}:
            assert time.monotonic() < deadline, command
            time.sleep(0.5)
    query = "{ repositoriesOrError { ... on RepositoryConnection { nodes { name } } } }"
    deadline = time.monotonic() + 90
    while not (found := graphql(servers[0], query)["repositoriesOrError"].get("nodes")):
        assert time.monotonic() < deadline
        time.sleep(1)
    assert len(found) == 1


PAGE = """<html><body><script>
const server = "SERVER", path = "PATH", body = BODY, results = {};
const query = path + "?query=" + encodeURIComponent(body.query || "");
async function attempt(name, action) {
  try { results[name] = await action(); } catch (error) { results[name] = "blocked"; }
}
const plain = {method: "POST", mode: "no-cors", body: JSON.stringify(body)};
(async () => {
  await attempt("json", async () => (await fetch(server + path, {method: "POST", body: JSON.stringify(body),
    headers: {"Content-Type": "application/json"}})).status);
  await attempt("text", async () => (await fetch(server + query, plain)).type);
  await attempt("get", async () => (await fetch(server + query, {mode: "no-cors"})).type);
  await attempt("read", async () => (await (await fetch(server + "/")).text()).length);
  await attempt("websocket", () => new Promise((resolve, reject) => {
    const socket = new WebSocket(server.replace("http", "ws") + path, "graphql-ws");
    socket.onopen = () => resolve("open"); socket.onerror = reject; }));
  await attempt("image", () => new Promise((resolve) => {
    const image = new Image(); image.onload = image.onerror = () => resolve("sent"); image.src = server + query; }));
  await attempt("frame", () => new Promise((resolve) => {
    const frame = document.createElement("iframe"); frame.onload = () => resolve("sent"); frame.src = server + query;
    document.body.append(frame); }));
  await attempt("form", () => new Promise((resolve) => {
    const frame = document.createElement("iframe"); frame.name = "target"; document.body.append(frame);
    frame.onload = () => resolve("sent");
    const form = document.createElement("form"); form.method = "post"; form.action = server + query;
    form.target = "target"; document.body.append(form); form.submit(); }));
  await fetch("/results", {method: "POST", body: JSON.stringify(results)});
})();
</script></body></html>"""


@contextlib.contextmanager
def serving(handle):
    """Serve on a free port of loopback; `handle` gets each request and returns the page."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            length = int(self.headers.get("Content-Length") or 0)
            page = handle(self.command, self.path, self.headers, self.rfile.read(length)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        do_POST = do_OPTIONS = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attack(server, path, body, folder):
    """Open the page of another port in a browser. Return the result of each of its attempts."""
    page = PAGE.replace("SERVER", server).replace("PATH", path).replace("BODY", json.dumps(body))
    results: queue.Queue[dict[str, Any]] = queue.Queue()

    def handle(method, path, headers, body):
        if method == "POST":
            results.put(json.loads(body))
        return page

    with serving(handle) as address:
        browser = subprocess.Popen([*browser_command(folder), address], stderr=subprocess.DEVNULL)
        try:
            return results.get(timeout=60)
        finally:
            browser.terminate()
            browser.wait(30)


def test_a_page_on_another_port_starts_and_reads_nothing(servers, tmp_path):
    before = state(servers)
    for number, (path, body) in enumerate([("/graphql", {"query": MUTATION}), (CREATED, {"name": "evil"})]):
        results = attack(servers[number], path, body, tmp_path / str(number))
        assert [results[name] for name in ("json", "read", "websocket")] == ["blocked"] * 3, results
        assert results.keys() == {"json", "text", "get", "read", "websocket", "image", "frame", "form"}
    assert state(servers) == before


def test_the_same_page_reaches_a_server_without_the_check(tmp_path):
    """So the page above does try."""
    requests = []

    def handle(method, path, headers, body):
        requests.append((method, path.partition("?")[0], headers.get("Origin") is not None, b"launch" in body))
        return "done"

    with serving(handle) as address:
        attack(address, "/graphql", {"query": MUTATION}, tmp_path / "browser")
    assert ("POST", "/graphql", True, True) in requests, "text"
    assert requests.count(("POST", "/graphql", True, False)) == 1, "form"
    assert requests.count(("GET", "/graphql", False, False)) >= 3, "get, image, frame"

"""Requests as browsers send them. The oracle is the Fetch standard: which page sends which headers."""

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from workflows.servers.same_origin import SameOriginOnly, is_loopback

PROXY = "tuning.example.org"
OWN = "127.0.0.1:3000"


async def page(_: Request) -> PlainTextResponse:
    return PlainTextResponse("done")


async def socket(websocket: WebSocket) -> None:
    await websocket.accept()
    await websocket.send_text("done")
    await websocket.close()


APP = Starlette(routes=[Route("/", page, methods=["GET", "POST"]), WebSocketRoute("/", socket)])
ALLOWED = [
    pytest.param({"host": OWN}, id="curl"),
    pytest.param({"host": "localhost:3000"}, id="by name"),
    pytest.param({"host": "[::1]:3000"}, id="IPv6"),
    pytest.param({"host": "LOCALHOST"}, id="port 80, other case"),
    pytest.param({"host": OWN, "origin": f"http://{OWN}", "sec-fetch-site": "same-origin"}, id="own page"),
    pytest.param({"host": OWN, "sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, id="typed address"),
    pytest.param({"host": PROXY, "origin": f"https://{PROXY}"}, id="behind a proxy"),
    pytest.param({"host": OWN, "origin": f"https://{PROXY}"}, id="behind a proxy that rewrites the host"),
]
REFUSED = [
    pytest.param({"host": "evil.example"}, id="rebound name"),
    pytest.param({"host": "evil.example:3000", "origin": "http://evil.example:3000"}, id="rebound page"),
    pytest.param({"host": "127.0.0.1.evil.example"}, id="name that begins like ours"),
    pytest.param({"host": "localhost@evil.example"}, id="user name like ours"),
    pytest.param({"host": ""}, id="no name"),
    pytest.param({"host": OWN, "origin": "http://evil.example"}, id="other site"),
    pytest.param({"host": OWN, "origin": "http://127.0.0.1:8888"}, id="other port"),
    pytest.param({"host": OWN, "origin": "http://localhost:3000"}, id="other name of loopback"),
    pytest.param({"host": OWN, "origin": "null"}, id="sandboxed frame or file"),
    pytest.param({"host": OWN, "origin": ""}, id="empty origin"),
    pytest.param({"host": OWN, "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, id="image"),
    pytest.param({"host": OWN, "sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}, id="image, other port"),
    pytest.param(
        {"host": OWN, "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
        id="frame",
    ),
    pytest.param({"host": f"{PROXY}:8443", "origin": f"https://{PROXY}:8443"}, id="other port of the proxy"),
]
LINK = {"host": OWN, "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


@pytest.fixture
def client():
    return TestClient(SameOriginOnly(APP, [PROXY]))


@pytest.mark.parametrize("headers", ALLOWED)
def test_requests_of_tools_and_of_the_own_page_are_answered(client: TestClient, headers: dict[str, str]):
    assert client.get("/", headers=headers).text == "done"
    assert client.post("/", headers=headers).text == "done"
    with client.websocket_connect("/", headers=headers) as websocket:
        assert websocket.receive_text() == "done"


@pytest.mark.parametrize("headers", REFUSED)
def test_requests_of_other_sites_are_refused(client: TestClient, headers: dict[str, str]):
    for answer in (client.get("/", headers=headers), client.post("/", headers=headers)):
        assert answer.status_code == 403 and answer.text.startswith("Refused: ")
    with pytest.raises(WebSocketDisconnect) as refused, client.websocket_connect("/", headers=headers):
        pass
    assert refused.value.code == 1008


def test_a_link_on_another_page_opens_a_page_but_sends_no_form(client: TestClient):
    assert client.get("/", headers=LINK).text == "done"
    assert client.post("/", headers=LINK).status_code == 403
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/", headers=LINK):
        pass


def test_a_server_on_any_address_compares_only_the_origin():
    client = TestClient(SameOriginOnly(APP, any_host=True))
    assert client.get("/", headers={"host": "gpu1.local"}).text == "done"
    assert client.post("/", headers={"host": "gpu1.local", "origin": "http://gpu1.local"}).text == "done"
    assert client.post("/", headers={"host": "gpu1.local", "origin": "http://evil.example"}).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_loopback(host: str):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gpu1.local"])
def test_not_loopback(host: str):
    assert not is_loopback(host)

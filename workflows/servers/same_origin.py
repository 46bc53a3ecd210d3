"""Refuse requests that pages of other sites make: our servers have no login.

A page can make a browser send requests to loopback. It cannot read the answers, but a mutation would take effect. If its own
host name resolves to 127.0.0.1 (DNS rebinding), it can read them too. Three headers show such requests: `Host`, `Origin` (sent
with every POST and websocket) and `Sec-Fetch-Site` (for requests without `Origin`, such as images). Pages cannot set them.
Other clients, such as curl and MLflow's, send only `Host`.

Sources: https://fetch.spec.whatwg.org/#origin-header, https://www.w3.org/TR/fetch-metadata/
"""

from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

ALLOWED_HOSTS_VARIABLE = "PEDIGREE_ALLOWED_HOSTS"
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_OWN_SITES = ("same-origin", "none")  # `none`: the user typed the address


class SameOriginOnly:
    """ASGI middleware that answers 403 to requests of other sites, over HTTP and websockets.

    `hosts` are names, or names with a port, by which a proxy passes requests on, besides loopback. If the server listens on
    another address, `any_host`, its names are unknown: then only the page's origin is compared.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str] = (), any_host: bool = False) -> None:
        self._app, self._hosts, self._any_host = app, frozenset(host.lower() for host in hosts), any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope) if scope["type"] in ("http", "websocket") else None
        if problem is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": problem[:100]})
        else:
            await PlainTextResponse(f"Refused: {problem}\n", 403)(scope, receive, send)

    def _problem(self, scope: Scope) -> str | None:
        """Return why the request is refused; None if it is allowed."""
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        if not self._any_host and not self._is_allowed_host(host):
            return f"{host!r} is not a name of this server; expected localhost, or a name set by `pedigree ui --allow-host`"
        if (origin := headers.get("origin")) is not None:
            return None if self._is_own_origin(origin, host) else f"a page of {origin!r} may not send requests here"
        if headers.get("sec-fetch-site", "none") in _OWN_SITES or _is_navigation(scope, headers):
            return None
        return "a page of another site may not send requests here"

    def _is_allowed_host(self, host: str) -> bool:
        return host in self._hosts or _name(host) in _LOOPBACK_NAMES

    def _is_own_origin(self, origin: str, host: str) -> bool:
        place = urlsplit(origin).netloc.lower()
        return place != "" and (place == host or place in self._hosts)


def is_loopback(host: str) -> bool:
    """Return whether a server on the address `host` is only reachable from this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def allowed_hosts(environment: Mapping[str, str]) -> list[str]:
    """Return the names in `ALLOWED_HOSTS_VARIABLE`, separated by commas."""
    return [host for host in environment.get(ALLOWED_HOSTS_VARIABLE, "").split(",") if host]


def _is_navigation(scope: Scope, headers: Headers) -> bool:
    """Return whether the user follows a link to a page in a tab of its own."""
    is_page = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
    return is_page and scope["type"] == "http" and scope["method"] == "GET"


def _name(host: str) -> str:
    """Return the name in a `Host` header, without port and brackets; empty if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""

"""Dagster's web server, closed to pages of other sites: `python -m workflows.servers.dagster_app PORT WORKSPACE`."""

import os
import sys
from typing import Any

import dagster as dg
import uvicorn
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import WorkspaceFileTarget
from dagster_webserver.cli import DEFAULT_DB_STATEMENT_TIMEOUT, DEFAULT_POOL_MAX_OVERFLOW, DEFAULT_POOL_RECYCLE
from dagster_webserver.version import __version__
from dagster_webserver.webserver import DagsterWebserver
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from workflows.servers.same_origin import SameOriginOnly, allowed_hosts
from workflows.servers.server_processes import LOOPBACK

_POLL_MS = 2000  # as in `dagster dev`


class SameOriginWebserver(DagsterWebserver[Any, Any]):
    """Dagster's web server behind `SameOriginOnly`. Queries need POST: an image on a page can send a GET."""

    def build_middleware(self) -> list[Middleware]:
        """Put the check in front of all routes, also of websockets."""
        return [Middleware(SameOriginOnly, hosts=allowed_hosts(os.environ)), *super().build_middleware()]

    def make_security_headers(self) -> dict[str, str]:
        """Return Dagster's headers, and forbid frames of other sites."""
        return {**super().make_security_headers(), "X-Frame-Options": "SAMEORIGIN"}

    async def graphql_http_endpoint(self, request: Request) -> Response:
        """Answer a GraphQL request. A GET only gets the page with the editor."""
        if request.method == "GET" and "text/html" not in request.headers.get("Accept", ""):
            return PlainTextResponse("Send GraphQL queries by POST, as JSON.\n", 405, {"Allow": "POST"})
        answer: Response = await super().graphql_http_endpoint(request)
        return answer


def main(port: str, workspace: str) -> None:
    """Run the server on loopback until a signal."""
    with dg.DagsterInstance.get() as instance:
        instance.optimize_for_webserver(DEFAULT_DB_STATEMENT_TIMEOUT, DEFAULT_POOL_RECYCLE, DEFAULT_POOL_MAX_OVERFLOW)
        target = WorkspaceFileTarget(paths=[workspace])  # type: ignore[call-arg]
        with WorkspaceProcessContext(instance, target, version=__version__, read_only=False) as context:
            app = SameOriginWebserver(context, live_data_poll_rate=_POLL_MS).create_asgi_app()
            uvicorn.run(app, host=LOOPBACK, port=int(port), log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Dagster's web server, closed to pages of other sites: `python -m workflows.servers.dagster_app PORT WORKSPACE`."""

import os
import sys
from http import HTTPStatus
from pathlib import Path
from typing import Any

import dagster as dg
import uvicorn
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import WorkspaceFileTarget
from dagster_webserver.cli import DEFAULT_DB_STATEMENT_TIMEOUT, DEFAULT_POOL_MAX_OVERFLOW, DEFAULT_POOL_RECYCLE
from dagster_webserver.version import __version__
from dagster_webserver.webserver import DagsterWebserver
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from assets.views.pages import CARD, LINK, PAGES_FOLDER, PAGES_PATH
from assets.views.result_card import render_card
from model_registry.connection import PAGES_VARIABLE
from workflows.servers.same_origin import SameOriginOnly, allowed_hosts
from workflows.servers.server_processes import LOOPBACK

_POLL_MS = 2000  # as in `dagster dev`


class Pages(StaticFiles):
    """The pages of the latest materializations, with texts from data. They get no scripts and no origin."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Return a file, or a redirect to the address in it. Replace a missing card with a card "Not materialized yet."."""
        try:
            answer = await super().get_response(path, scope)
        except HTTPException as error:
            if error.status_code != HTTPStatus.NOT_FOUND or not path.endswith(CARD):
                raise
            answer = Response(render_card("Not materialized yet.", None), media_type="image/svg+xml")
        if isinstance(answer, FileResponse) and path.endswith(LINK):
            address = Path(answer.path).read_text(encoding="utf-8")
            return RedirectResponse(_at_current_port(address), headers={"Cache-Control": "no-store"})
        answer.headers["Content-Security-Policy"] = "sandbox; default-src 'none'; style-src 'unsafe-inline'"
        answer.headers["Cache-Control"] = "no-cache"
        return answer


class SameOriginWebserver(DagsterWebserver[Any, Any]):
    """Dagster's web server behind `SameOriginOnly`. Queries need POST: an image on a page can send a GET.

    It also serves the pages that assets link to.
    """

    def build_routes(self) -> list[BaseRoute]:
        """Put the route of the pages before Dagster's, whose last one takes every path."""
        pages = Pages(directory=Path(os.environ["PEDIGREE_HOME"]) / PAGES_FOLDER, check_dir=False)
        return [Mount(PAGES_PATH, pages), *super().build_routes()]  # type: ignore[no-untyped-call]

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


def _at_current_port(address: str) -> str:
    """Return the address of an MLflow page on the server of today, which may have another port than its writer's."""
    server = os.environ.get(PAGES_VARIABLE)
    return f"{server}/#/{address.partition('/#/')[2]}" if server else address


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

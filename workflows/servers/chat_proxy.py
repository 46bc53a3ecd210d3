"""An OpenAI-compatible server of one model, in front of `transformers serve`.

`transformers serve` names a model by its folder, and samples only if the model's own settings enable it. So the proxy rewrites
requests: a temperature of 0, the default, is greedy, a higher one samples. It also puts the model's name into answers. Neither
Dagster's process nor the command's imports this module.
"""

import json
import math
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from training.contract.config.json_object import JsonObject
from workflows.servers.proxy_settings import ProxySettings
from workflows.servers.same_origin import SameOriginOnly, is_loopback

_DATA = "data: "


class BadRequest(Exception):
    """A request that cannot be answered, with the HTTP status of the response."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def application(proxy: ProxySettings) -> Starlette:
    """Build the server: `/v1/models`, `/v1/chat/completions` and `/health`."""
    description = {"id": proxy.model, "object": "model", "created": int(time.time()), "owned_by": "pedigree"}

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [description]})

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def completions(request: Request) -> Response:
        return await _answer(proxy, request)

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/chat/completions", completions, methods=["POST"]),
            Route("/health", health),
        ],
        middleware=[Middleware(SameOriginOnly, hosts=[proxy.host], any_host=not is_loopback(proxy.host))],
        exception_handlers={BadRequest: _error_response},
        lifespan=_lifespan(proxy.upstream),
    )


def translate_request(proxy: ProxySettings, body: Any) -> JsonObject:
    """Rewrite a request for `transformers serve`. Raises BadRequest if it is malformed."""
    body = _check_request(proxy, body)
    temperature = body.get("temperature") or 0
    fields = {name: value for name, value in body.items() if name not in ("n", "generation_config")}
    request = {**fields, "model": proxy.served_as, "temperature": float(temperature)}
    if temperature > 0:
        request["generation_config"] = json.dumps(_sampling(proxy.generation))
    return request


def _check_request(proxy: ProxySettings, body: Any) -> JsonObject:
    """Return the request. Raises BadRequest with the wrong field."""
    if not isinstance(body, dict):
        raise BadRequest(f"the request is a JSON {type(body).__name__}; expected an object with `messages`")
    if (model := body.get("model", proxy.model)) != proxy.model:
        raise BadRequest(f"`model` is {model!r}; this server has only {proxy.model!r}: ask for that", 404)
    if not _are_messages(body.get("messages")):
        raise BadRequest('`messages` must be a list such as [{"role": "user", "content": "Hello"}]')
    if body.get("n") not in (None, 1):
        raise BadRequest(f"`n` is {body['n']!r}; expected 1: send the request again for another answer")
    temperature = body.get("temperature") or 0
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        raise BadRequest(f"`temperature` is {temperature!r}; expected 0 (greedy) or a larger number")
    for name in ("max_tokens", "max_completion_tokens"):
        if (length := body.get(name)) is not None and (type(length) is not int or length < 1):
            raise BadRequest(f"`{name}` is {length!r}; expected an integer of 1 or more, or leave it out")
    return body


def _sampling(generation: JsonObject) -> JsonObject:
    """Return the settings for a sampled answer: the model's own ones, as settings in a request replace them all.

    The length is the default of `transformers serve`.
    """
    length = max(generation.get("max_new_tokens") or 0, 1024)
    return {**generation, "do_sample": True, "max_new_tokens": length}


def _are_messages(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in value)


async def _answer(proxy: ProxySettings, request: Request) -> Response:
    try:
        body = await request.json()
    except ValueError as error:
        raise BadRequest(f"the request is not JSON: {error}") from error
    client: httpx2.AsyncClient = request.state.client
    upstream_request = client.build_request("POST", "/v1/chat/completions", json=translate_request(proxy, body))
    try:
        answer = await client.send(upstream_request, stream=True)
        if answer.status_code != 200 or not body.get("stream"):
            return await _complete_answer(proxy, answer)
    except httpx2.HTTPError as error:
        raise BadRequest(f"the model does not answer: {error!r}; start the server again", 502) from error
    return StreamingResponse(_events(proxy, answer), media_type="text/event-stream")


async def _complete_answer(proxy: ProxySettings, answer: httpx2.Response) -> Response:
    """Return one answer. Raises BadRequest with the message of `transformers serve` if it refuses."""
    try:
        content = (await answer.aread()).decode("utf-8", "replace")
    finally:
        await answer.aclose()
    if answer.status_code != 200:
        raise BadRequest(_refusal_message(content), answer.status_code)
    return JSONResponse({**json.loads(content), "model": proxy.model})


def _refusal_message(content: str) -> str:
    """Return the message of a refusal."""
    try:
        return str(json.loads(content)["detail"])
    except (ValueError, KeyError, TypeError):
        return content


async def _events(proxy: ProxySettings, answer: httpx2.Response) -> AsyncIterator[str]:
    """Yield the parts of an answer as they come. If the client disconnects, cancel the request."""
    try:
        async for line in answer.aiter_lines():
            if line.startswith(_DATA):
                yield f"{_DATA}{_rename_model(proxy, line.removeprefix(_DATA))}\n\n"
        yield f"{_DATA}[DONE]\n\n"
    finally:
        await answer.aclose()


def _rename_model(proxy: ProxySettings, part: str) -> str:
    try:
        content = json.loads(part)
    except ValueError:
        return part
    return json.dumps({**content, "model": proxy.model} if "model" in content else content)


async def _error_response(_: Request, error: Exception) -> Response:
    status = error.status if isinstance(error, BadRequest) else 500
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": str(error), "type": kind, "code": status}}, status)


def _lifespan(upstream: str) -> Callable[[Starlette], AbstractAsyncContextManager[JsonObject]]:
    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[JsonObject]:
        # No timeout, as an answer may take minutes; no proxy, as this is loopback.
        async with httpx2.AsyncClient(base_url=upstream, timeout=None, trust_env=False) as client:
            yield {"client": client}

    return lifespan


def main(settings: str) -> None:
    proxy = ProxySettings.parse(settings)
    uvicorn.run(application(proxy), host=proxy.host, port=proxy.port, log_level="info", timeout_graceful_shutdown=3)


if __name__ == "__main__":
    main(*sys.argv[1:])

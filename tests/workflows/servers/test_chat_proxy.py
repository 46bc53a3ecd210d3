"""Requests rewritten by the proxy, by the rules of OpenAI's interface. test_serving.py tests the rest with a real model."""

import json
from typing import Any

import pytest

from workflows.servers.chat_proxy import BadRequest, translate_request
from workflows.servers.proxy_settings import ProxySettings

GENERATION = {"eos_token_id": 7, "do_sample": False, "temperature": 0.0, "max_new_tokens": 2048}
PROXY = ProxySettings("demo", "./model", "http://127.0.0.1:1", "127.0.0.1", 1, GENERATION)
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("greedy", [{}, {"temperature": None}, {"temperature": 0}, {"temperature": 0.0}])
def test_translate_request_without_temperature_or_zero_is_greedy(greedy: dict[str, Any]):
    request = translate_request(PROXY, {"model": "demo", "messages": HELLO, "n": 1, "max_tokens": 3, **greedy})
    assert request == {"model": "./model", "messages": HELLO, "max_tokens": 3, "temperature": 0.0}


def test_translate_request_with_temperature_samples_with_the_models_settings():
    request = translate_request(PROXY, {"messages": HELLO, "temperature": 1, "top_p": 0.5, "stream": True})
    assert json.loads(request.pop("generation_config")) == {**GENERATION, "do_sample": True}
    assert request == {"model": "./model", "messages": HELLO, "temperature": 1.0, "top_p": 0.5, "stream": True}


def test_translate_request_sampled_has_the_default_length():
    """The default of `transformers serve` is 1024 tokens if neither request nor model set a length."""
    short = ProxySettings("demo", "./model", "", "", 1, {"max_new_tokens": 16})
    request = translate_request(short, {"messages": HELLO, "temperature": 0.5})
    assert json.loads(request["generation_config"]) == {"max_new_tokens": 1024, "do_sample": True}


@pytest.mark.parametrize(
    ("body", "status", "values"),
    [
        ([], 400, ("list", "`messages`")),
        ({}, 400, ("`messages`",)),
        ({"messages": []}, 400, ("`messages`",)),
        ({"messages": ["Hello"]}, 400, ("`messages`",)),
        ({"messages": [{"content": "Hello"}]}, 400, ("`messages`",)),
        ({"messages": HELLO, "model": "/home/me/model"}, 404, ("`model` is '/home/me/model'", "'demo'")),
        ({"messages": HELLO, "temperature": -1}, 400, ("`temperature` is -1", "expected 0")),
        ({"messages": HELLO, "temperature": "hot"}, 400, ("`temperature` is 'hot'",)),
        ({"messages": HELLO, "temperature": True}, 400, ("`temperature` is True",)),
        ({"messages": HELLO, "temperature": float("nan")}, 400, ("`temperature` is nan",)),
        ({"messages": HELLO, "max_tokens": 0}, 400, ("`max_tokens` is 0", "1 or more")),
        ({"messages": HELLO, "max_completion_tokens": 2.5}, 400, ("`max_completion_tokens` is 2.5",)),
        ({"messages": HELLO, "n": 3}, 400, ("`n` is 3", "expected 1")),
    ],
)
def test_translate_request_malformed_raises_with_the_field(body: Any, status: int, values: tuple[str, ...]):
    with pytest.raises(BadRequest) as refused:
        translate_request(PROXY, body)
    assert refused.value.status == status
    assert all(value in str(refused.value) for value in values)


def test_proxy_settings_survive_the_command_line():
    assert ProxySettings.parse(str(PROXY)) == PROXY

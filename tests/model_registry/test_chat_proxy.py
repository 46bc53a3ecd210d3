"""What the proxy makes of a request, by the rules of OpenAI's interface. The rest of it is seen with a real model."""

import json
from typing import Any

import pytest

from model_registry.chat_proxy import BadRequest, translated
from model_registry.proxy_settings import ProxySettings

GENERATION = {"eos_token_id": 7, "do_sample": False, "temperature": 0.0, "max_new_tokens": 2048}
PROXY = ProxySettings("demo", "./model", "http://127.0.0.1:1", "127.0.0.1", 1, GENERATION)
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("greedy", [{}, {"temperature": None}, {"temperature": 0}, {"temperature": 0.0}])
def test_no_temperature_or_zero_is_greedy(greedy: dict[str, Any]):
    made = translated(PROXY, {"model": "demo", "messages": HELLO, "n": 1, "max_tokens": 3, **greedy})
    assert made == {"model": "./model", "messages": HELLO, "max_tokens": 3, "temperature": 0.0}


def test_a_temperature_samples_with_the_models_own_settings():
    made = translated(PROXY, {"messages": HELLO, "temperature": 1, "top_p": 0.5, "stream": True})
    assert json.loads(made.pop("generation_config")) == {**GENERATION, "do_sample": True}
    assert made == {"model": "./model", "messages": HELLO, "temperature": 1.0, "top_p": 0.5, "stream": True}


def test_a_sampled_answer_may_be_as_long_as_a_greedy_one():
    """`transformers serve` has 1024 tokens for one whose length neither request nor model says."""
    short = ProxySettings("demo", "./model", "", "", 1, {"max_new_tokens": 16})
    made = translated(short, {"messages": HELLO, "temperature": 0.5})
    assert json.loads(made["generation_config"]) == {"max_new_tokens": 1024, "do_sample": True}


@pytest.mark.parametrize(
    ("asked", "status", "words"),
    [
        ([], 400, "a JSON list; expected an object with `messages`"),
        ({}, 400, "`messages` must be a list"),
        ({"messages": []}, 400, "`messages` must be a list"),
        ({"messages": ["Hello"]}, 400, "`messages` must be a list"),
        ({"messages": [{"content": "Hello"}]}, 400, "`messages` must be a list"),
        (
            {"messages": HELLO, "model": "/home/me/model"},
            404,
            "`model` is '/home/me/model'; this server has 'demo' alone",
        ),
        ({"messages": HELLO, "temperature": -1}, 400, "`temperature` is -1; expected 0"),
        ({"messages": HELLO, "temperature": "hot"}, 400, "`temperature` is 'hot'"),
        ({"messages": HELLO, "temperature": True}, 400, "`temperature` is True"),
        ({"messages": HELLO, "temperature": float("nan")}, 400, "`temperature` is nan"),
        ({"messages": HELLO, "max_tokens": 0}, 400, "`max_tokens` is 0; expected an integer of 1 or more"),
        ({"messages": HELLO, "max_completion_tokens": 2.5}, 400, "`max_completion_tokens` is 2.5"),
        ({"messages": HELLO, "n": 3}, 400, "`n` is 3; expected 1"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_with_the_field(asked: Any, status: int, words: str):
    with pytest.raises(BadRequest) as refused:
        translated(PROXY, asked)
    assert refused.value.status == status
    assert words in str(refused.value)


def test_settings_survive_the_command_line():
    assert ProxySettings.parse(str(PROXY)) == PROXY

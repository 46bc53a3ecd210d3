"""Chat templates that never end or need gigabytes: each is refused in time, with the limit that it exceeds."""

import resource
import signal
import threading
import time
from functools import partial

import pytest

from tests import factories
from training.contract.errors import TemplateError
from training.contract.system.child_process import MEMORY_BYTES, MemoryExceeded, run_in_child
from training.data.templates import render_limits
from training.data.templates.chat_template import ChatTemplate

pytestmark = pytest.mark.slow

TURNS = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"})
WRITE_ALL = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}"
DOUBLING = "{% set n = namespace(t='a') %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}{{ n.t }}"
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
MEMORY = [
    "{{ 'a' * 10**9 * 2 }}",
    "{{ 'a' * 10**10 }}",
    "{{ ('a' * 10**6) | center(10**10) }}",
    "{{ '%9999999999s' % 'a' }}",
    "{{ ([[1] * 10**6] * 10**9) | length }}",
    DOUBLING,
]
TIME = [NESTED, "{{ 9 ** (9 ** 9) }}", "{{ messages | length ** (9 ** 9) * 7 ** (9 ** 9) }}"]


def template(text: str) -> ChatTemplate:
    tokenizer = factories.word_tokenizer(["a"])
    tokenizer.chat_template = text
    return ChatTemplate(tokenizer, {})


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("text", MEMORY)
def test_a_template_that_fills_the_memory_is_refused(text: str):
    hostile = template(f"{{% if messages[0]['content'] == 'Hello' %}}{text}{{% endif %}}{WRITE_ALL}")
    with pytest.raises(MemoryExceeded, match="more than 2 GiB of memory"):
        run_in_child(partial(hostile.render, TURNS))
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < peak_bytes() + 1.2 * MEMORY_BYTES


@pytest.mark.parametrize("text", TIME)
def test_a_template_that_never_ends_is_refused(text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(render_limits, "SECONDS", 1.0)
    hostile = f"{{% if messages[0]['content'] == 'Hello' %}}{text}{{% endif %}}{WRITE_ALL}"
    with pytest.raises(TemplateError, match=r"more than 1 s of CPU time.*\[template-limit\]$"):
        template(hostile).render(TURNS)
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_a_long_text_is_refused_unless_the_conversation_is_long():
    long = template("{% if messages[0]['content'] == 'Hello' %}{{ 'a' * 2 ** 25 }}{% endif %}" + WRITE_ALL)
    with pytest.raises(
        TemplateError, match=r"writes 33,554,\d+ characters for a conversation of 20.*\[template-limit\]$"
    ):
        long.render(TURNS)
    turns = ({"role": "user", "content": "b" * 2**25}, TURNS[1])
    assert len(long.render(turns)["text"]) == 2**25 + len("user  assistant Hi ")


def test_a_suspended_process_stays_within_the_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(render_limits, "SECONDS", 0.2)
    render_limits.start_timer()
    time.sleep(0.5)
    render_limits.stop_timer()


def test_rendering_works_in_another_thread():
    found: list[str] = []
    chat = template(WRITE_ALL)
    thread = threading.Thread(target=lambda: found.append(chat.render(TURNS)["text"]))
    thread.start()
    thread.join()
    assert found == ["user Hello assistant Hi "]

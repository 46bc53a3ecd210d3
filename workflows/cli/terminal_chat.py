"""A conversation with a served model in the terminal: a line is a question, and its answer is shown as it comes."""

import importlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from workflows.servers.web_servers import UNPROXIED

_PROMPT = "> "
_DATA, _DONE = "data: ", "[DONE]"


@dataclass
class Conversation:
    """What was said so far, and how answers are asked for, at the address of a server."""

    address: str
    settings: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, question: str) -> Iterator[str]:
        """The parts of the answer. What came of it is remembered, and nothing if it failed. Raises OSError."""
        self.messages.append({"role": "user", "content": question})
        parts: list[str] = []
        try:
            for part in self._stream():
                parts.append(part)
                yield part
        finally:
            if parts:
                self.messages.append({"role": "assistant", "content": "".join(parts)})
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[str]:
        body = {**self.settings, "messages": self.messages, "stream": True}
        request = urllib.request.Request(
            f"{self.address}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with UNPROXIED.open(request) as answer:
            for line in answer:
                data = line.decode().strip().removeprefix(_DATA)
                if data and data != _DONE:
                    yield _content(json.loads(data))


def converse(conversation: Conversation, write: Callable[[str], object], complain: Callable[[str], None]) -> None:
    """Answer each line of stdin until its end. Ctrl-C ends an answer; raises KeyboardInterrupt when a question is due."""
    for question in _questions():
        try:
            for part in conversation.ask(question):
                write(part)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
        except OSError as error:
            complain(_told(error))
        write("\n")


def _questions() -> Iterator[str]:
    prompt = ""
    if sys.stdin.isatty():
        importlib.import_module("readline")  # `input` then has a history; elsewhere its import may print
        prompt = _PROMPT
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return
        if line.strip():
            yield line


def _content(part: dict[str, Any]) -> str:
    """The text in a part of an answer. Raises OSError if it tells of a failure."""
    if "error" in part:
        raise OSError(str(part["error"]))
    return "".join(choice["delta"].get("content") or "" for choice in part["choices"])


def _told(error: OSError) -> str:
    if not isinstance(error, urllib.error.HTTPError):
        return str(error)
    with error:
        content = error.read().decode("utf-8", "replace")
    with suppress(ValueError, KeyError, TypeError):
        content = json.loads(content)["error"]["message"]
    return f"the server answers {error.code}: {content}"

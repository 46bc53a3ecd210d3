"""A conversation with a served model in the terminal: each line is a question, and its answer is streamed."""

import importlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from training.contract.config.json_object import JsonObject
from workflows.servers.server_processes import UNPROXIED

_PROMPT = "> "
_DATA, _DONE = "data: ", "[DONE]"


@dataclass
class Conversation:
    """The messages so far, and the address and settings for requests."""

    address: str
    settings: JsonObject
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, question: str) -> Iterator[str]:
        """Yield the parts of the answer.

        Remember a partial answer, but forget the question if it failed at once. Raises OSError.
        """
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
    """Answer each line of stdin until its end. Ctrl-C ends an answer; at the prompt it raises KeyboardInterrupt."""
    for question in _questions():
        try:
            for part in conversation.ask(question):
                write(part)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
        except OSError as error:
            complain(_error_text(error))
        write("\n")


def _questions() -> Iterator[str]:
    prompt = ""
    if sys.stdin.isatty():
        importlib.import_module("readline")  # gives `input` a history; without a terminal, its import may print
        prompt = _PROMPT
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return
        if line.strip():
            yield line


def _content(part: JsonObject) -> str:
    """Return the text in a part of an answer. Raises OSError if the part is an error."""
    if "error" in part:
        raise OSError(str(part["error"]))
    return "".join(choice["delta"].get("content") or "" for choice in part["choices"])


def _error_text(error: OSError) -> str:
    if not isinstance(error, urllib.error.HTTPError):
        return str(error)
    with error:
        content = error.read().decode("utf-8", "replace")
    with suppress(ValueError, KeyError, TypeError):
        content = json.loads(content)["error"]["message"]
    return f"the server answers {error.code}: {content}"

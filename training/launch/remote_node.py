"""A node as the conductor sees it: the local process that reaches it through its command prefix, and its messages.

ssh closes inherited files, and the lock's is one, so a shell runs it, which keeps that open as long as ssh lives.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import threading
from collections import deque

from training.launch.node import MARK, Order, Word
from training.launch.nodes_file import Node

_HOLD_OPEN = ("sh", "-c", '"$@"; exit "$?"', "sh")
_LAST_OUTPUT_SECONDS = 1.0  # what a prefix leaves running, as ssh's ControlPersist, may keep the pipe open for ever
_LAST_LINES = 19  # with a heading, as many as the message of a failure shows
_LINES_SHOWN = 5


class RemoteNode:
    """`word`: the last message of the process on the node, with its `detail`; None before the first."""

    def __init__(self, node: Node, order: Order):
        self.number = order.node
        self.name = f"node {order.node} ({node})"
        self.word: Word | None = None
        self.detail = ""
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._command = [*node.run, node.python, "-P", "-m", "training.launch.node"]
        self._process = subprocess.Popen(
            [*_HOLD_OPEN, *self._command],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            close_fds=False,  # the lock is the one open file that can be inherited, and it has to be
            start_new_session=True,
        )
        self._copier = threading.Thread(target=self._copy, daemon=True)
        self._copier.start()
        self.send(order.model_dump_json())

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, as its status shows
            self._process.stdin.write(f"{line}\n".encode())

    def status(self) -> int | None:
        """The exit status of the local process, once its output was read; None while it runs."""
        status = self._process.poll()
        if status is not None:
            self._copier.join(_LAST_OUTPUT_SECONDS)
        return status

    def succeeded(self) -> bool:
        """By its status and by its last message, since not every prefix passes a status on."""
        return (self.status(), self.word, self.detail) == (0, Word.ENDED, "0")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, which is forced after `seconds`."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            write(f"{self.name} has not ended in time; its connection is cut")
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._copier.join(_LAST_OUTPUT_SECONDS)

    def problem(self) -> str | None:
        """Why it failed; None if its ranks, or torchrun, have said so."""
        status = self.status()
        said = " / ".join(list(self.last_lines)[-_LINES_SHOWN:]) or "nothing"
        if self.word == Word.REFUSED:
            return f"{self.name}: {self.detail}"
        if self.word == Word.ENDED:
            return None
        if self.word is not None:
            return f"{self.name}: the connection broke, or what ran there was killed (status {status}); it said: {said}"
        ended = "has not answered" if status is None else f"ended with status {status} before it answered"
        return (
            f"node {self.number}: `{shlex.join(self._command)}` {ended}; it said: {said}. The prefix must reach the machine "
            "without a question, and the environment's Python must be there (`python` in nodes.yaml, if it is elsewhere): "
            "try it by hand"
        )

    def _copy(self) -> None:
        assert self._process.stdout is not None
        with open(self._process.stdout.fileno(), encoding="utf-8", errors="replace", closefd=False) as said:
            for line in said:
                # Others may have left a line without an end before the mark.
                text, mark, said_by_node = line.rstrip("\r\n").partition(MARK)
                if mark:
                    word, _, self.detail = said_by_node.partition(" ")
                    self.word = Word(word)
                if text:
                    self.last_lines.append(text)
                write(f"[node {self.number}] {text}{mark}{said_by_node}")


def write(text: str) -> None:
    """To the log of the job, whole lines at a time."""
    os.write(1, f"{text}\n".encode())

"""Limits for one rendering of a chat template: CPU time and length of the text.

A template is a program that comes with a model. One line of it may loop for years. (Memory is limited by
contract/system/child_process.py.) The time limit works in the main thread of a process only.
"""

import signal
import threading
from types import FrameType

SECONDS = 10.0  # CPU time, so that a suspended process or a busy machine changes nothing
CHARACTERS = 1 << 24
GROWTH = 16  # a conversation longer than CHARACTERS / GROWTH may give a text of this many times its length
_REPEAT_SECONDS = 0.1  # Jinja's compiler swallows errors of constant expressions


class LimitExceeded(Exception):
    """A rendering took too much. The message is a predicate, such as `takes more than 10 s of CPU time`."""


def start_timer() -> None:
    """Let LimitExceeded be raised in this thread after `SECONDS` of CPU time, unless `stop_timer` comes first."""
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGPROF) is not _on_time_over:
            signal.signal(signal.SIGPROF, _on_time_over)
        signal.setitimer(signal.ITIMER_PROF, SECONDS, _REPEAT_SECONDS)


def stop_timer() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.setitimer(signal.ITIMER_PROF, 0)


def check_length(text: str, conversation: int) -> None:
    """Raise LimitExceeded if `text` is too long for a conversation of this many characters."""
    if len(text) > max(CHARACTERS, GROWTH * conversation):
        raise LimitExceeded(f"writes {len(text):,} characters for a conversation of {conversation:,}")


def _on_time_over(number: int, frame: FrameType | None) -> None:
    raise LimitExceeded(f"takes more than {SECONDS:.0f} s of CPU time")

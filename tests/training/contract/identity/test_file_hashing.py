"""Hashing files: the oracle is hashlib of the bytes. What is told of it, and how it ends early."""

import hashlib
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from training.contract.identity import file_hashing
from training.contract.identity.file_hashing import Tally, hash_file, hash_files, hash_in_threads, report_hashing_to

MEGABYTE = 10**6
BLOCK = 1 << 18  # of hashlib


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is worth a word."""
    monkeypatch.setattr(file_hashing, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(file_hashing, "_BETWEEN_SECONDS", 0.0)


@pytest.fixture
def told() -> list[dict[str, Any]]:
    return []


def hash_and_tell(told: list[dict[str, Any]], files: list[Path]) -> list[str]:
    with report_hashing_to(lambda event, **fields: told.append({"event": event, **fields})):
        return hash_files(files)


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])
def test_a_file_is_hashed_whole(tmp_path: Path, size: int):
    content = (bytes(range(251)) * (size // 251 + 1))[:size]
    (tmp_path / "file").write_bytes(content)
    assert hash_file(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_many_files_are_hashed_in_their_order(tmp_path: Path):
    files = [tmp_path / str(number) for number in range(40)]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]) * (40 - number) * 1000)
    assert hash_files(files) == [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    assert hash_files([]) == []


def test_a_long_one_tells_where_how_far_and_when_it_ends(tmp_path: Path, impatient, told):
    """3 and 7 MB, 10 in all; each word is of one more block than the one before, whichever thread read it."""
    (tmp_path / "model").mkdir()
    files = [tmp_path / "model" / "a", tmp_path / "model" / "b"]
    for file, size in zip(files, (3, 7), strict=True):
        file.write_bytes(bytes(size * MEGABYTE))
    assert hash_and_tell(told, files) == [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    assert told[0] == {"event": "phase", "phase": f"hashing {tmp_path / 'model'}"}
    words = told[1:]
    assert {(word["event"], word["total"], word["unit"]) for word in words} == {("progress", 10, "MB")}
    assert len(words) > 10 * MEGABYTE // BLOCK and all(a["done"] <= b["done"] for a, b in pairwise(words))
    assert (words[-1]["done"], words[-1]["seconds_left"]) == (10, 0.0)
    assert all(word["seconds_left"] >= 0 for word in words)


def test_one_file_is_told_by_its_own_name(tmp_path: Path, impatient, told):
    (tmp_path / "file").write_bytes(b"x")
    hash_and_tell(told, [tmp_path / "file"])
    assert told[0]["phase"] == f"hashing {tmp_path / 'file'}"


def test_what_takes_no_time_is_not_worth_a_word(tmp_path: Path, told):
    (tmp_path / "file").write_bytes(b"x")
    hash_and_tell(told, [tmp_path / "file"])
    assert told == []


def test_after_the_block_nobody_is_told(tmp_path: Path, impatient, told):
    (tmp_path / "file").write_bytes(b"x")
    hash_and_tell(told, [tmp_path / "file"])
    before = len(told)
    assert before and hash_files([tmp_path / "file"]) and len(told) == before


def test_a_file_that_grows_meanwhile_is_never_more_than_done(tmp_path: Path, impatient, told):
    (tmp_path / "file").write_bytes(bytes(2 * MEGABYTE))

    def read_more(path: Path, count: Tally) -> None:
        for _ in range(5):
            count(MEGABYTE)

    with report_hashing_to(lambda event, **fields: told.append({"event": event, **fields})):
        hash_in_threads(read_more, [tmp_path / "file"], [tmp_path / "file"])
    assert [word["done"] for word in told[1:]] == [1, 2, 2, 2, 2, 2]


def test_an_error_ends_the_others_at_their_next_block():
    """The other one never ends by itself. (With a single core it does not begin.)"""
    has_begun = threading.Event()

    def hash_one(is_endless: bool, count: Tally) -> None:
        while is_endless:
            has_begun.set()
            count(1)
        has_begun.wait(5)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        hash_in_threads(hash_one, [False, True], [])


INTERRUPTED = """
import signal, sys
from pathlib import Path
from training.contract.identity.file_hashing import hash_files, report_hashing_to

signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite that a script runs in the background ignores it
with report_hashing_to(lambda event, **fields: print(event, flush=True)):
    hash_files([Path(sys.argv[1])])
"""


def test_ctrl_c_need_not_wait_for_the_end_of_a_file(tmp_path: Path):
    """A file of 2 TB, all of it a hole: to the end it would take a quarter of an hour."""
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(2 * 10**12)
    program = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "huge")]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "phase\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and "KeyboardInterrupt" in errors

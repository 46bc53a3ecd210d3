"""Hashing files, compared with hashlib: digests, progress reports, and early ends."""

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
    """Report each block."""
    monkeypatch.setattr(file_hashing, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(file_hashing, "_BETWEEN_SECONDS", 0.0)


@pytest.fixture
def events() -> list[dict[str, Any]]:
    return []


def hash_and_report(events: list[dict[str, Any]], files: list[Path]) -> list[str]:
    with report_hashing_to(lambda event, **fields: events.append({"event": event, **fields})):
        return hash_files(files)


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])
def test_hash_file_hashes_all_bytes(tmp_path: Path, size: int):
    content = (bytes(range(251)) * (size // 251 + 1))[:size]
    (tmp_path / "file").write_bytes(content)
    assert hash_file(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_hash_files_returns_digests_in_order(tmp_path: Path):
    files = [tmp_path / str(number) for number in range(40)]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]) * (40 - number) * 1000)
    assert hash_files(files) == [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    assert hash_files([]) == []


def test_long_hashing_reports_folder_progress_and_seconds_left(tmp_path: Path, impatient, events):
    """3 and 7 MB, 10 together; one report per block, from both threads."""
    (tmp_path / "model").mkdir()
    files = [tmp_path / "model" / "a", tmp_path / "model" / "b"]
    for file, size in zip(files, (3, 7), strict=True):
        file.write_bytes(bytes(size * MEGABYTE))
    assert hash_and_report(events, files) == [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    assert events[0] == {"event": "phase", "phase": f"hashing {tmp_path / 'model'}"}
    reports = events[1:]
    assert {(report["event"], report["total"], report["unit"]) for report in reports} == {("progress", 10, "MB")}
    assert len(reports) > 10 * MEGABYTE // BLOCK and all(a["done"] <= b["done"] for a, b in pairwise(reports))
    assert (reports[-1]["done"], reports[-1]["seconds_left"]) == (10, 0.0)
    assert all(report["seconds_left"] >= 0 for report in reports)


def test_hashing_one_file_reports_its_name(tmp_path: Path, impatient, events):
    (tmp_path / "file").write_bytes(b"x")
    hash_and_report(events, [tmp_path / "file"])
    assert events[0]["phase"] == f"hashing {tmp_path / 'file'}"


def test_short_hashing_is_not_reported(tmp_path: Path, events):
    (tmp_path / "file").write_bytes(b"x")
    hash_and_report(events, [tmp_path / "file"])
    assert events == []


def test_hashing_after_the_block_is_not_reported(tmp_path: Path, impatient, events):
    (tmp_path / "file").write_bytes(b"x")
    hash_and_report(events, [tmp_path / "file"])
    count = len(events)
    assert count and hash_files([tmp_path / "file"]) and len(events) == count


def test_progress_of_a_growing_file_stops_at_its_total(tmp_path: Path, impatient, events):
    (tmp_path / "file").write_bytes(bytes(2 * MEGABYTE))

    def read_more(path: Path, count: Tally) -> None:
        for _ in range(5):
            count(MEGABYTE)

    with report_hashing_to(lambda event, **fields: events.append({"event": event, **fields})):
        hash_in_threads(read_more, [tmp_path / "file"], [tmp_path / "file"])
    assert [event["done"] for event in events[1:]] == [1, 2, 2, 2, 2, 2]


def test_error_in_one_thread_ends_the_others_at_their_next_block():
    """The other thread would never end. (With a single core it does not begin.)"""
    has_begun = threading.Event()

    def hash_one(is_endless: bool, count: Tally) -> None:
        while is_endless:
            has_begun.set()
            count(1)
        has_begun.wait(5)
        raise OSError("missing")

    with pytest.raises(OSError, match="missing"):
        hash_in_threads(hash_one, [False, True], [])


INTERRUPTED = """
import signal, sys
from pathlib import Path
from training.contract.identity.file_hashing import hash_files, report_hashing_to

signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite that a script runs in the background ignores it
with report_hashing_to(lambda event, **fields: print(event, flush=True)):
    hash_files([Path(sys.argv[1])])
"""


def test_ctrl_c_ends_hashing_within_a_file(tmp_path: Path):
    """A sparse file of 2 TB: hashing all of it would take a quarter of an hour."""
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(2 * 10**12)
    program = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "huge")]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "phase\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and "KeyboardInterrupt" in errors

"""Encoding on several processes: the same pairs as on one, in the same order, and no process left behind."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from training.data.tokenization import tokenizer_pool
from training.data.tokenization.tokenizer_pool import encode_batches


@pytest.fixture
def three_processes(monkeypatch):
    """However few the rows and the cores are."""
    monkeypatch.setattr(tokenizer_pool, "_FEWEST_ROWS", 1)
    monkeypatch.setattr(tokenizer_pool, "cores", lambda: 3)


@pytest.mark.shared
@pytest.mark.parametrize("train_on", ["last_response", "assistant_turns"])
def test_pairs_are_those_of_one_process(workshop, shared_data, tiny_chat, request, monkeypatch, train_on):
    """2,400 real rows in ten batches, nearly half of which are too long; and rows that the template does not take."""
    with (shared_data / "preferences-real.jsonl").open("rb") as file:
        rows = [json.loads(line) for _, line in zip(range(2400), file, strict=False)]
    rows[7]["prompt"] = [*rows[7]["prompt"][:1], {"role": "system", "content": "Late."}, *rows[7]["prompt"][-1:]]
    rows[1900]["chosen"][0]["content"] += "<|im_end|>"
    read, spec = workshop.rows(rows), workshop.tokenizer(tiny_chat, train_on=train_on, max_length=256)
    alone = workshop.pairs(read, spec)
    assert alone.details["counts"]["dropped"] > 800 and len(alone.details["reasons"]) > 1
    request.getfixturevalue("three_processes")
    together = workshop.pairs(read, spec)
    assert together.made.fingerprint == alone.made.fingerprint
    differing = {name for name, value in alone.details.items() if together.details[name] != value}
    assert differing <= {"provenance"}
    assert (together.folder / "pairs.arrow").read_bytes() == (alone.folder / "pairs.arrow").read_bytes()


class Telling:
    """Stands in for an encoder: of each pair it gives the process that was asked, after some seconds."""

    def __init__(self, seconds: float):
        self._seconds = seconds

    def encode(self, rows):
        time.sleep(self._seconds)
        return [os.getpid()] * len(rows)


def telling(seconds: float = 0.0) -> Any:
    return Telling(seconds)


def test_batches_come_in_order_from_processes_of_their_own_and_not_all_are_read_ahead(three_processes):
    read = []

    def batches():
        for number in range(40):
            read.append(number)
            yield [{"row": number}]

    ahead, made = [], []
    for [row], [process] in encode_batches(telling(0.01), batches(), 40):
        ahead.append(len(read) - 1 - row["row"])
        made.append((row["row"], process))
    assert [row for row, _ in made] == list(range(40)) and max(ahead) <= 6
    assert os.getpid() not in (used := {process for _, process in made}) and len(used) == 3
    assert multiprocessing.active_children() == []


def test_few_rows_are_encoded_here():
    assert list(encode_batches(telling(), [[{}], [{}]], 2)) == [([{}], [os.getpid()])] * 2


def test_a_process_that_is_killed_is_told_as_lack_of_memory(three_processes):
    def batches():
        yield [{}]
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        while True:
            yield [{}]

    with pytest.raises(MemoryError, match="a process that encodes pairs was killed"):
        list(encode_batches(telling(0.05), batches(), 9))
    assert multiprocessing.active_children() == []


PROGRAM = """
import itertools, multiprocessing
from tests.training.data.tokenization.test_tokenizer_pool import telling
from training.data import encoding_pool
tokenizer_pool.cores = lambda: 3
for _ in tokenizer_pool.encode_batches(telling(0.05), itertools.repeat([{}]), 10**6):
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
"""


def test_they_end_with_a_process_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        workers = [int(word) for word in process.stdout.readline().split()]
        assert len(workers) == 3 and all(map(_is_there, workers))
        process.kill()
    until = time.monotonic() + 60
    while any(map(_is_there, workers)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(_is_there, workers))


def _is_there(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

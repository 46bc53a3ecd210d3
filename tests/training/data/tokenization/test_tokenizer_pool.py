"""Encoding on several processes: the same pairs in the same order as on one. All processes end."""

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
    """Use three processes for any number of rows and cores."""
    monkeypatch.setattr(tokenizer_pool, "_FEWEST_ROWS", 1)
    monkeypatch.setattr(tokenizer_pool, "cores", lambda: 3)


@pytest.mark.shared
@pytest.mark.parametrize("train_on", ["last_response", "assistant_turns"])
def test_pairs_of_several_processes_equal_those_of_one(
    workshop, shared_data, tiny_chat, request, monkeypatch, train_on
):
    """Ten batches of 2,400 real rows. Nearly half are too long, and the template rejects some."""
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


class PidEncoder:
    """A fake encoder that returns its process id for each pair, after some seconds."""

    def __init__(self, seconds: float):
        self._seconds = seconds

    def encode(self, rows):
        time.sleep(self._seconds)
        return [os.getpid()] * len(rows)


def pid_encoder(seconds: float = 0.0) -> Any:
    return PidEncoder(seconds)


def test_encode_batches_keeps_the_order_and_reads_few_batches_ahead(three_processes):
    read = []

    def batches():
        for number in range(40):
            read.append(number)
            yield [{"row": number}]

    ahead, outcomes = [], []
    for [row], [process] in encode_batches(pid_encoder(0.01), batches(), 40):
        ahead.append(len(read) - 1 - row["row"])
        outcomes.append((row["row"], process))
    assert [row for row, _ in outcomes] == list(range(40)) and max(ahead) <= 6
    assert os.getpid() not in (used := {process for _, process in outcomes}) and len(used) == 3
    assert multiprocessing.active_children() == []


def test_encode_batches_of_few_rows_uses_this_process():
    assert list(encode_batches(pid_encoder(), [[{}], [{}]], 2)) == [([{}], [os.getpid()])] * 2


def test_encode_batches_with_a_killed_process_raises_memory_error(three_processes):
    def batches():
        yield [{}]
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        while True:
            yield [{}]

    with pytest.raises(MemoryError, match="killed"):
        list(encode_batches(pid_encoder(0.05), batches(), 9))
    assert multiprocessing.active_children() == []


PROGRAM = """
import itertools, multiprocessing
from tests.training.data.tokenization.test_tokenizer_pool import pid_encoder
from training.data.tokenization import tokenizer_pool
tokenizer_pool.cores = lambda: 3
for _ in tokenizer_pool.encode_batches(pid_encoder(0.05), itertools.repeat([{}]), 10**6):
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
"""


def test_encode_batches_processes_end_with_a_killed_parent():
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert len(workers) == 3 and all(map(_is_running, workers))
        process.kill()
    until = time.monotonic() + 60
    while any(map(_is_running, workers)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(_is_running, workers))


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

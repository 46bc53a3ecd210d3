"""Encoding on several processes: the same pairs in the same order as on one. All processes end."""

import faulthandler
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, cast

import pytest

from tests import factories
from training.contract.system import child_process
from training.data.tokenization import tokenizer_pool
from training.data.tokenization.encoded_pair import Dropped, DropReason
from training.data.tokenization.tokenize_pair import PairEncoder
from training.data.tokenization.tokenizer_pool import encode_batches

pytestmark = pytest.mark.slow


@pytest.fixture
def three_processes(monkeypatch):
    """Use three processes for any number of rows and cores."""
    monkeypatch.setattr(tokenizer_pool, "_FEWEST_ROWS", 1)
    monkeypatch.setattr(tokenizer_pool, "cores", lambda: 3)


@pytest.mark.shared
@pytest.mark.parametrize("train_on", ["last_response", "assistant_turns"])
def test_pairs_of_several_processes_equal_those_of_one(
    job_runner, shared_data, tiny_chat, request, monkeypatch, train_on
):
    """Ten batches of 2,400 real rows. Nearly half are too long, and the template rejects some."""
    with (shared_data / "preferences-real.jsonl").open("rb") as file:
        rows = [json.loads(line) for _, line in zip(range(2400), file, strict=False)]
    rows[7]["prompt"] = [*rows[7]["prompt"][:1], {"role": "system", "content": "Late."}, *rows[7]["prompt"][-1:]]
    rows[1900]["chosen"][0]["content"] += "<|im_end|>"
    read, spec = job_runner.rows(rows), job_runner.tokenizer(tiny_chat, train_on=train_on, max_length=256)
    alone = job_runner.pairs(read, spec)
    shutil.rmtree(alone.folder.parents[1] / "tokens")
    assert alone.details.counts.dropped > 800 and len(alone.details.reasons) > 1
    request.getfixturevalue("three_processes")
    together = job_runner.pairs(read, spec)
    assert together.made.fingerprint == alone.made.fingerprint
    differing = factories.differing(alone.details, together.details)
    assert differing <= {"provenance"}
    assert (together.folder / "pairs.arrow").read_bytes() == (alone.folder / "pairs.arrow").read_bytes()


class PidEncoder:
    """An encoder that drops each pair with its process id as the reason, after some seconds."""

    def __init__(self, seconds: float):
        self._seconds = seconds

    def encode(self, rows):
        time.sleep(self._seconds)
        return [Dropped(DropReason.TEMPLATE, str(os.getpid()))] * len(rows)


def process_of(tokens) -> int:
    [process] = tokens.column("detail").to_pylist()
    return int(process)


def pid_encoder(seconds: float = 0.0) -> Any:
    return PidEncoder(seconds)


def test_encode_batches_keeps_the_order_and_reads_few_batches_ahead(three_processes):
    read = []

    def batches():
        for number in range(40):
            read.append(number)
            yield [{"row": number}]

    ahead, outcomes = [], []
    for [row], tokens in encode_batches(pid_encoder(0.01), batches(), 40):
        ahead.append(len(read) - 1 - row["row"])
        outcomes.append((row["row"], process_of(tokens)))
    assert [row for row, _ in outcomes] == list(range(40)) and max(ahead) <= 6
    assert os.getpid() not in (used := {process for _, process in outcomes}) and len(used) == 3
    assert multiprocessing.active_children() == []


def test_encode_batches_of_few_rows_uses_one_other_process():
    batches = list(encode_batches(pid_encoder(), [[{}], [{}]], 2))
    assert [rows for rows, _ in batches] == [[{}], [{}]]
    assert len(used := {process_of(tokens) for _, tokens in batches}) == 1 and os.getpid() not in used


def test_encode_batches_with_a_killed_process_goes_on(three_processes):
    """Also if it held the lock of the pool's queue, and this process handles SIGTERM."""
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        encode_with_a_killed_process()
    finally:
        signal.signal(signal.SIGTERM, handler)


def encode_with_a_killed_process():
    def batches():
        for number in range(9):
            if number == 3:
                time.sleep(0.3)  # so that one of them waits at the queue
                for process in multiprocessing.active_children()[:2]:
                    os.kill(process.pid, signal.SIGKILL)
            yield [{"row": number}, {"row": number}]

    encoded = list(encode_batches(pid_encoder(0.05), batches(), 9))
    assert [rows[0]["row"] for rows, _ in encoded] == list(range(9))
    assert all(len(tokens) == 2 for _, tokens in encoded)
    assert multiprocessing.active_children() == []


class HungryEncoder:
    """An encoder that needs more memory than a process may have, or fails, for some rows."""

    def encode(self, rows):
        for row in rows:
            match row["row"]:
                case 5:
                    bytearray(child_process.MEMORY_BYTES * 2)
                case 7:
                    faulthandler.disable()  # pytest's would print a traceback
                    os.kill(os.getpid(), signal.SIGABRT)  # as Rust does if an allocation fails
            yield Dropped(DropReason.TEMPLATE, "fine")


def test_rows_beyond_the_memory_limit_are_dropped_alone():
    batches: list[list[Mapping[str, Any]]] = [[{"row": 4 * batch + at} for at in range(4)] for batch in range(3)]
    encoded = list(encode_batches(cast("PairEncoder", HungryEncoder()), batches, 12))
    assert [rows for rows, _ in encoded] == batches
    details = [detail for _, tokens in encoded for detail in tokens.column("detail").to_pylist()]
    assert [at for at, detail in enumerate(details) if detail != "fine"] == [5, 7]
    assert all("more than 2 GiB of memory" in details[at] for at in (5, 7))


def test_a_row_whose_process_the_system_kills_raises_memory_error():
    class KilledEncoder:
        def encode(self, rows):
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(MemoryError, match="killed"):
        list(encode_batches(cast("PairEncoder", KilledEncoder()), [[{}]], 1))
    assert multiprocessing.active_children() == []


PROGRAM = """
import itertools, multiprocessing
from tests.training.data.tokenization.test_tokenizer_pool import pid_encoder
from training.contract.system import child_process
from training.data.tokenization import tokenizer_pool
from training.data.tokenization.encoded_pair import Dropped, DropReason
from training.data.tokenization.tokenize_pair import PairEncoder
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

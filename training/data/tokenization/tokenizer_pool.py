"""Encoding pairs on all cores: a tokenizer has threads, but rendering a template and looking at the result is Python, on one.

The processes are forked, so that they share what was imported, and begin at once. They live no longer than the one that forked
them. Few pairs are not worth it.
"""

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from training.contract.system.cgroups import cores
from training.contract.system.process import die_with_parent
from training.data.tokenization.tokenize_pair import Dropped, EncodedPair, PairEncoder

_FEWEST_ROWS = 4096
_MOST_PROCESSES = 16  # beyond, the one that writes what they made cannot keep up
_AHEAD = 2  # batches that wait for each process

Rows = list[Mapping[str, Any]]
Outcomes = list[EncodedPair | Dropped]

_encoder: PairEncoder


def encode_batches(encoder: PairEncoder, batches: Iterable[Rows], rows: int) -> Iterator[tuple[Rows, Outcomes]]:
    """Each of `batches`, which have so many `rows` in all, in order, with what becomes of its pairs."""
    processes = min(cores(), _MOST_PROCESSES)
    if processes == 1 or rows < _FEWEST_ROWS:
        yield from ((batch, list(encoder.encode(batch))) for batch in batches)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _begin, (encoder, os.getpid())) as pool:
        pool.submit(
            os.getpid
        )  # forks all of them, before the first batch is read by threads that no process would have
        try:
            yield from _in_order(pool, batches, processes * _AHEAD)
        except BrokenProcessPool as error:
            raise MemoryError(
                "a process that encodes pairs was killed, as the system does where memory runs out"
            ) from error


def _in_order(pool: ProcessPoolExecutor, batches: Iterable[Rows], most: int) -> Iterator[tuple[Rows, Outcomes]]:
    """The batches with their outcomes, at most so many of them waiting in memory."""
    waiting: deque[tuple[Rows, Future[Outcomes]]] = deque()
    for batch in batches:
        waiting.append((batch, pool.submit(_encode, batch)))
        if len(waiting) > most:
            first, found = waiting.popleft()
            yield first, found.result()
    yield from ((batch, found.result()) for batch, found in waiting)


def _begin(encoder: PairEncoder, parent: int) -> None:
    global _encoder
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads were not forked
    _encoder = encoder


def _encode(batch: Rows) -> Outcomes:
    return list(_encoder.encode(batch))

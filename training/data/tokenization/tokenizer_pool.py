"""Encode pairs on all cores.

A tokenizer has its own threads, but rendering and checking a template is Python on one core. The processes are forked, so they
share all imports and start at once. They end with their parent process. A few rows are encoded in the parent itself.
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
_MOST_PROCESSES = 16  # the parent, which writes the results, cannot keep up with more
_AHEAD = 2  # waiting batches per process

Rows = list[Mapping[str, Any]]
Outcomes = list[EncodedPair | Dropped]

_encoder: PairEncoder


def encode_batches(encoder: PairEncoder, batches: Iterable[Rows], rows: int) -> Iterator[tuple[Rows, Outcomes]]:
    """Yield each batch with the outcomes of its pairs, in order. `rows` is the number of rows of all batches."""
    processes = min(cores(), _MOST_PROCESSES)
    if processes == 1 or rows < _FEWEST_ROWS:
        yield from ((batch, list(encoder.encode(batch))) for batch in batches)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _begin, (encoder, os.getpid())) as pool:
        # Fork all processes now: reading a batch starts threads, which forked processes lack.
        pool.submit(os.getpid)
        try:
            yield from _in_order(pool, batches, processes * _AHEAD)
        except BrokenProcessPool as error:
            raise MemoryError(
                "a process that encodes pairs was killed, as the system does when memory runs out"
            ) from error


def _in_order(pool: ProcessPoolExecutor, batches: Iterable[Rows], most: int) -> Iterator[tuple[Rows, Outcomes]]:
    """Yield the batches with their outcomes. At most `most` batches wait in memory."""
    waiting: deque[tuple[Rows, Future[Outcomes]]] = deque()
    for batch in batches:
        waiting.append((batch, pool.submit(_encode, batch)))
        if len(waiting) > most:
            first, outcomes = waiting.popleft()
            yield first, outcomes.result()
    yield from ((batch, outcomes.result()) for batch, outcomes in waiting)


def _begin(encoder: PairEncoder, parent: int) -> None:
    global _encoder
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tokenizer's threads were not forked
    _encoder = encoder


def _encode(batch: Rows) -> Outcomes:
    return list(_encoder.encode(batch))

"""Encode pairs on all cores, in processes with a limit of memory, as a chat template is a program from elsewhere.

A tokenizer has its own threads, but rendering and checking a template is Python on one core. The processes are forked, so they
share all imports and start at once. They end with their parent process. If one of them exceeds its limit, the pairs of its
batch are encoded again, each in a process of its own: only those at fault are dropped.
"""

import gc
import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

import pyarrow as pa

from training.contract.system.cgroups import cores
from training.contract.system.child_process import (
    MemoryExceeded,
    MemoryLimit,
    end_exhausted,
    prepare_child,
    run_in_child,
)
from training.data.tokenization.encoded_pair import Dropped, DropReason
from training.data.tokenization.token_rows import to_rows
from training.data.tokenization.tokenize_pair import PairEncoder

_FEWEST_ROWS = 4096  # for several processes
_MOST_PROCESSES = 16  # the parent, which writes the results, cannot keep up with more
_OBJECTS = 100_000  # made between two garbage collections: reference counts free what a batch makes
_AHEAD = 2  # waiting batches per process

Rows = list[Mapping[str, Any]]

_encoder: PairEncoder
_limit: MemoryLimit


def encode_batches(encoder: PairEncoder, batches: Iterable[Rows], rows: int) -> Iterator[tuple[Rows, pa.RecordBatch]]:
    """Yield each batch with the tokens of its pairs (TOKEN_ROWS), in order. `rows` is the number of rows of all batches."""
    if not rows:
        return
    processes = 1 if rows < _FEWEST_ROWS else min(cores(), _MOST_PROCESSES)
    waiting: deque[Rows] = deque()
    source = iter(batches)
    while True:
        try:
            for batch, tokens in _encode_in_pool(encoder, source, waiting, processes):
                waiting.popleft()
                yield batch, tokens
            return
        except BrokenProcessPool as error:
            if not waiting:
                raise RuntimeError(
                    "the processes that encode pairs cannot start; their error is in the job's log"
                ) from error
        batch = waiting.popleft()
        yield batch, pa.concat_batches([_encode_alone(encoder, row) for row in batch])


def _encode_in_pool(
    encoder: PairEncoder, source: Iterator[Rows], waiting: deque[Rows], processes: int
) -> Iterator[tuple[Rows, pa.RecordBatch]]:
    """Encode the batches in `waiting`, then those of `source`. `waiting` gets the batches without a result yet."""
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _begin, (encoder, os.getpid())) as pool:
        # Fork all processes now, not while batches are read: that starts threads, and a lock may be held at a fork.
        pool.submit(os.getpid).result()
        results: deque[Future[pa.RecordBatch]] = deque(pool.submit(_encode, batch) for batch in waiting)
        for batch in source:
            waiting.append(batch)
            results.append(pool.submit(_encode, batch))
            if len(results) > processes * _AHEAD:
                yield waiting[0], results.popleft().result()
        while results:
            yield waiting[0], results.popleft().result()


def _encode_alone(encoder: PairEncoder, row: Mapping[str, Any]) -> pa.RecordBatch:
    """Encode one row in a process of its own. Raises MemoryError if the system ended it."""
    try:
        return run_in_child(partial(_to_rows, encoder, [row]))
    except MemoryExceeded as error:
        return to_rows(
            [Dropped(DropReason.TEMPLATE, f"its tokens need {error}; shorten the pair, or the template's loops")]
        )


def _to_rows(encoder: PairEncoder, batch: Rows) -> pa.RecordBatch:
    return to_rows(list(encoder.encode(batch)))


def _begin(encoder: PairEncoder, parent: int) -> None:
    global _encoder, _limit
    prepare_child(parent)
    gc.set_threshold(_OBJECTS)
    _encoder, _limit = encoder, MemoryLimit()


def _encode(batch: Rows) -> pa.RecordBatch:
    try:
        tokens = _to_rows(_encoder, batch)
    except MemoryError:
        end_exhausted()
    _limit.end_if_exhausted()
    return tokens

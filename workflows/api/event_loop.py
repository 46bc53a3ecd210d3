"""Synchronous work inside a running event loop, as in the cells of a notebook.

Dagster runs event loops of its own, for example for a user's async checks. Python refuses to run a second loop in a thread, so
such a check would fail in a notebook. A synchronous call stops the thread's loop anyway: until it returns, the loop counts as
not running. asyncio has functions for this, for authors of event loops (in its documentation: "Extending asyncio").
"""

import asyncio
from asyncio import tasks
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_running_loop() -> Iterator[None]:
    """Let other event loops run in this thread in the block."""
    if (loop := asyncio._get_running_loop()) is None:
        yield
        return
    task = asyncio.current_task(loop)
    if task is not None:
        tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        if task is not None:
            tasks._enter_task(loop, task)

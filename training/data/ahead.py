"""Making things ready while others are in use."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Ready = TypeVar("Ready")


def ahead(make_ready: Callable[[Item], Ready], items: Sequence[Item]) -> Iterator[tuple[Item, Ready]]:
    """Each item with what `make_ready` gives for it, made in a thread while the one before is in use, one at a time.

    What it raises is raised when its item's turn comes.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread:
        coming = [thread.submit(make_ready, item) for item in items[:1]]
        for number, item in enumerate(items, 1):
            ready = coming.pop().result()
            coming += [thread.submit(make_ready, following) for following in items[number : number + 1]]
            yield item, ready

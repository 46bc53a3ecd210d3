"""Prefetching: in order, one item ahead, while the previous item is in use."""

import threading

import pytest

from training.model.device_prefetch import prefetch


def test_prefetch_computes_the_next_item_while_one_is_in_use():
    """The user of item n waits for item n + 1: without a thread this would never end."""
    computed = [threading.Event() for _ in range(4)]

    def make_ready(item: int) -> int:
        computed[item].set()
        return item * item

    for item, ready in prefetch(make_ready, range(4)):
        assert ready == item * item
        if item < 3:
            assert computed[item + 1].wait(10)
        if item < 2:
            assert not computed[item + 2].is_set()


def test_prefetch_raises_an_error_when_its_item_is_due():
    used = []
    with pytest.raises(ZeroDivisionError):
        for item, _ in prefetch(lambda item: 1 / item, [2, 1, 0]):
            used.append(item)
    assert used == [2, 1]


def test_prefetch_without_items_is_empty():
    assert list(prefetch(str, [])) == []

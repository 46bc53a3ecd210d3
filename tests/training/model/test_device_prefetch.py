"""What is prefetched: in order, one at a time and while the one before is in use."""

import threading

import pytest

from training.model.device_prefetch import prefetch


def test_the_next_is_made_while_one_is_in_use():
    """Whoever uses item n waits until item n + 1 is there: without a thread that would be for ever."""
    made = [threading.Event() for _ in range(4)]

    def make_ready(item: int) -> int:
        made[item].set()
        return item * item

    for item, ready in prefetch(make_ready, range(4)):
        assert ready == item * item
        if item < 3:
            assert made[item + 1].wait(10)
        if item < 2:
            assert not made[item + 2].is_set()


def test_an_error_comes_in_its_turn():
    used = []
    with pytest.raises(ZeroDivisionError):
        for item, _ in prefetch(lambda item: 1 / item, [2, 1, 0]):
            used.append(item)
    assert used == [2, 1]


def test_of_nothing_nothing():
    assert list(prefetch(str, [])) == []

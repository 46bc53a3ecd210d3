"""Gradient buckets are cut from the end, and sent in the same order for any order of completion."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from training.distributed import Group
from training.parallel.gradient_buckets import GradientBuckets

SIZES = (4, 3, 2, 1)


@dataclass(frozen=True)
class Watched(Group):
    """A group of one rank that records the tensors to sum."""

    sent: list[list[float]] = field(default_factory=list)

    def start_sum_(self, tensor: Tensor) -> Callable[[], object]:
        self.sent.append(tensor.tolist())
        return super().start_sum_(tensor)


def buckets(limit_numbers: int) -> tuple[GradientBuckets, Watched]:
    group = Watched(0, 1, torch.device("cpu"))
    return GradientBuckets(torch.arange(10.0), SIZES, group, bucket_bytes=4 * limit_numbers), group


# The numbers 0 to 9 are parameters of sizes 4, 3, 2 and 1. Buckets of at most five: 7 8 9, then 4 5 6, then 0 1 2 3.
IN_FIVES = [[7, 8, 9], [4, 5, 6], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("limit", "expected"), [(5, IN_FIVES), (100, [list(range(10))]), (1, [[9], [7, 8], [4, 5, 6], [0, 1, 2, 3]])]
)
def test_buckets_are_cut_from_the_end_up_to_the_limit(limit: int, expected: list[list[float]]):
    found, group = buckets(limit)
    assert bool(found.finish())
    assert group.sent == expected


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_buckets_are_sent_in_one_order_for_any_order_of_completion(order: tuple[int, ...]):
    found, group = buckets(5)
    found.expect()
    for number in order:
        found.complete(number)
        completed = set(order[: order.index(number) + 1])
        assert (len(group.sent) > 0) == ({2, 3} <= completed)
    assert group.sent == IN_FIVES


def test_no_bucket_is_sent_before_the_last_pass():
    found, group = buckets(5)
    for number in range(4):
        found.complete(number)
    assert group.sent == []
    found.expect()
    found.complete(3)
    found.complete(2)
    assert group.sent == IN_FIVES[:1]
    found.finish()
    assert group.sent == IN_FIVES
    found.begin()
    found.finish()
    assert group.sent == IN_FIVES * 2

"""Batches: properties for any data, and one small case by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.data.tokenization.batch_sampler import BatchSampler, TokenCounts, distribute, epoch_order, seed_sequence

TOKENS = st.lists(st.integers(1, 120), min_size=1, max_size=40)


def batches(items: int, **changes: int) -> BatchSampler:
    settings = {"batch_size": 4, "micro_tokens": 100, "seed": 0} | changes
    tokens = np.random.default_rng(0).integers(2, 60, size=items)
    return BatchSampler(items=np.arange(items), lengths=TokenCounts(tokens + 5, tokens), **settings)


@given(TOKENS, st.integers(1, 200), st.integers(1, 6))
def test_distribute_places_each_item_once_within_the_budget(tokens, micro_tokens: int, world: int):
    tokens_I = np.array(tokens)
    items = np.arange(len(tokens))[::2]
    parts = distribute(items, tokens_I, micro_tokens, world)
    assert len(parts) == world
    assert sorted(int(i) for part in parts for micro in part for i in micro) == items.tolist()
    for micro in (micro for part in parts for micro in part):
        assert len(micro) == 1 or tokens_I[micro].sum() <= micro_tokens


@given(TOKENS, st.integers(1, 200))
def test_distribute_opens_few_micro_batches(tokens, micro_tokens: int):
    """Any two micro-batches together exceed the budget, so there are fewer than twice the minimum, plus one."""
    tokens_I = np.array(tokens)
    (parts,) = distribute(np.arange(len(tokens)), tokens_I, micro_tokens, 1)
    loads = sorted(int(tokens_I[micro].sum()) for micro in parts)
    assert len(loads) < 2 or loads[0] + loads[1] > micro_tokens


@given(TOKENS, st.integers(1, 6))
def test_distribute_balances_ranks_within_the_longest_item(tokens, world: int):
    """With a greedy assignment, longest first, the loads of two ranks differ by at most the longest item."""
    tokens_I = np.array(tokens)
    parts = distribute(np.arange(len(tokens)), tokens_I, 64, world)
    loads = [sum(int(tokens_I[micro].sum()) for micro in part) for part in parts]
    assert max(loads) - min(loads) <= tokens_I.max()


def test_distribute_by_hand():
    """Tokens 12, 10, 4, 4, 2 on two ranks are 12 + 4 and 10 + 4 + 2: one micro-batch of 16 each, or two of 12."""
    items, tokens_I = np.arange(5), np.array([4, 12, 10, 4, 2])
    assert [[m.tolist() for m in part] for part in distribute(items, tokens_I, 16, 2)] == [[[1, 3]], [[2, 0, 4]]]
    assert [[m.tolist() for m in part] for part in distribute(items, tokens_I, 12, 2)] == [[[1], [3]], [[2, 4], [0]]]


def test_batch_of_an_epoch_is_a_permutation_with_a_smaller_last_batch():
    sampler = batches(10)
    assert sampler.steps_per_epoch == 3
    assert [len(sampler.batch(step)) for step in range(1, 7)] == [4, 4, 2, 4, 4, 2]
    for first in (1, 4):
        assert sorted(np.concatenate([sampler.batch(step) for step in range(first, first + 3)])) == list(range(10))


def test_batch_has_only_the_sampled_items():
    ones = np.ones(9, dtype=np.int64)
    sampler = BatchSampler(np.array([1, 4, 7]), TokenCounts(ones, ones), batch_size=2, micro_tokens=10, seed=3)
    for epoch in (0, 1, 2):
        epoch_batches = [sampler.batch(2 * epoch + 1), sampler.batch(2 * epoch + 2)]
        assert np.concatenate(epoch_batches).tolist() == [(1, 4, 7)[at] for at in epoch_order(3, 3, epoch)]


def test_epoch_order_changes_with_epoch_and_seed_only():
    assert not np.array_equal(epoch_order(50, 0, 0), epoch_order(50, 0, 1))
    assert not np.array_equal(epoch_order(50, 0, 0), epoch_order(50, 1, 0))
    assert not np.array_equal(epoch_order(50, -1, 0), epoch_order(50, 1, 0))
    a, b = batches(20, micro_tokens=10), batches(20, micro_tokens=1000)
    assert all(np.array_equal(a.batch(step), b.batch(step)) for step in range(1, 12))


def test_epoch_order_is_the_same_in_every_version():
    """The order of the first draws of PCG64(SeedSequence([0, 0])). numpy keeps this stream fixed."""
    draws = np.random.Generator(np.random.PCG64(np.random.SeedSequence([0, 0]))).bit_generator.random_raw(8)
    assert epoch_order(8, 0, 0).tolist() == sorted(range(8), key=lambda i: draws[i]) == GOLDEN


GOLDEN = [3, 2, 1, 6, 0, 7, 4, 5]


def test_distribute_keeps_the_order_of_equally_long_items():
    """So the rows of a step do not depend on the machine's sort."""
    random = np.random.default_rng(0)
    items, tokens = random.permutation(400), random.integers(1, 4, 400)
    [[only]] = distribute(items, tokens, 400 * 4, world=1)
    assert only.tolist() == sorted(items.tolist(), key=lambda item: -tokens[item])


def test_seed_sequence_differs_for_every_combination_of_parts():
    """Dropout uses step and rank: rank 1 in step 2 differs from rank 2 in step 1."""
    states = {
        seed_sequence(seed, a, b).generate_state(2).tobytes() for seed in (0, -1) for a in range(4) for b in range(4)
    }
    assert len(states) == 2 * 4 * 4


def test_epoch_order_is_read_only():
    with pytest.raises(ValueError, match="read-only"):
        epoch_order(8, 0, 0)[0] = 5


def test_micro_batches_of_more_ranks_than_items_may_be_empty():
    sampler = batches(10)
    assert [len(sampler.micro_batches(3, rank, 4)) for rank in range(4)].count(0) == 2
    assert sampler.tokens(3) == sampler.lengths.sequences_I[sampler.batch(3)].sum()


def test_micro_batches_without_sharing_count_all_tokens():
    """Two pairs of 14 tokens contain a prompt of 4 twice. Within 20 tokens, both fit only if the prompt runs once."""
    sampler = BatchSampler(
        np.arange(2), TokenCounts(np.array([14, 14]), np.array([10, 10])), batch_size=2, micro_tokens=20, seed=0
    )
    shared, unshared = (
        [len(part.items) for part in sampler.micro_batches(1, 0, 1, sharing=sharing)] for sharing in (True, False)
    )
    assert (shared, unshared) == ([2], [1, 1])


def test_micro_batches_in_lockstep_repeat_the_shortest_item():
    """By hand: with 20, 20, 20, 11 and 12 tokens within 23, three ranks have 20; 20 and 12; 20 and 11. One runs 11 again."""
    tokens = np.array([20, 20, 20, 11, 12])
    sampler = BatchSampler(np.arange(5), TokenCounts(tokens, tokens), batch_size=5, micro_tokens=23, seed=0)
    counted, discarded = (
        [
            [m.items.tolist() for m in sampler.micro_batches(1, rank, 3, in_lockstep=True) if m.counts is counts]
            for rank in range(3)
        ]
        for counts in (True, False)
    )
    assert sorted(map(len, counted)) == [1, 2, 2]
    assert sorted(discarded) == [[], [], [[3]]]
    assert sorted(item for rank in counted for items in rank for item in items) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_micro_batches_of_all_ranks_are_the_batch(world: int):
    sampler = batches(30, batch_size=9)
    items = [item for rank in range(world) for micro in sampler.micro_batches(2, rank, world) for item in micro.items]
    assert sorted(items) == sorted(sampler.batch(2))

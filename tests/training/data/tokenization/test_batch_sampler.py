"""Batches: properties that must hold for any data, and one small case by hand."""

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
def test_every_item_is_somewhere_once_and_no_budget_is_broken(tokens, micro_tokens: int, world: int):
    tokens_I = np.array(tokens)
    items = np.arange(len(tokens))[::2]
    parts = distribute(items, tokens_I, micro_tokens, world)
    assert len(parts) == world
    assert sorted(int(i) for part in parts for micro in part for i in micro) == items.tolist()
    for micro in (micro for part in parts for micro in part):
        assert len(micro) == 1 or tokens_I[micro].sum() <= micro_tokens


@given(TOKENS, st.integers(1, 200))
def test_few_micro_batches_are_opened(tokens, micro_tokens: int):
    """Any two together exceed the budget, so they are fewer than twice the least number there can be, and one."""
    tokens_I = np.array(tokens)
    (parts,) = distribute(np.arange(len(tokens)), tokens_I, micro_tokens, 1)
    loads = sorted(int(tokens_I[micro].sum()) for micro in parts)
    assert len(loads) < 2 or loads[0] + loads[1] > micro_tokens


@given(TOKENS, st.integers(1, 6))
def test_ranks_are_balanced_within_the_longest_item(tokens, world: int):
    """A greedy assignment, longest first, never leaves two ranks further apart than the largest item."""
    tokens_I = np.array(tokens)
    parts = distribute(np.arange(len(tokens)), tokens_I, 64, world)
    loads = [sum(int(tokens_I[micro].sum()) for micro in part) for part in parts]
    assert max(loads) - min(loads) <= tokens_I.max()


def test_by_hand():
    """Tokens 12, 10, 4, 4, 2 on two ranks: 12+4 and 10+4+2, each in one micro-batch of 16; of 12, in two."""
    items, tokens_I = np.arange(5), np.array([4, 12, 10, 4, 2])
    assert [[m.tolist() for m in part] for part in distribute(items, tokens_I, 16, 2)] == [[[1, 3]], [[2, 0, 4]]]
    assert [[m.tolist() for m in part] for part in distribute(items, tokens_I, 12, 2)] == [[[1], [3]], [[2, 4], [0]]]


def test_an_epoch_is_a_permutation_and_the_last_batch_keeps_the_rest():
    found = batches(10)
    assert found.steps_per_epoch == 3
    assert [len(found.batch(step)) for step in range(1, 7)] == [4, 4, 2, 4, 4, 2]
    for first in (1, 4):
        assert sorted(np.concatenate([found.batch(step) for step in range(first, first + 3)])) == list(range(10))


def test_only_the_items_given_are_trained_on():
    ones = np.ones(9, dtype=np.int64)
    found = BatchSampler(np.array([1, 4, 7]), TokenCounts(ones, ones), batch_size=2, micro_tokens=10, seed=3)
    for epoch in (0, 1, 2):
        batches_of_it = [found.batch(2 * epoch + 1), found.batch(2 * epoch + 2)]
        assert np.concatenate(batches_of_it).tolist() == [(1, 4, 7)[at] for at in epoch_order(3, 3, epoch)]


def test_order_changes_with_epoch_and_seed_and_with_nothing_else():
    assert not np.array_equal(epoch_order(50, 0, 0), epoch_order(50, 0, 1))
    assert not np.array_equal(epoch_order(50, 0, 0), epoch_order(50, 1, 0))
    assert not np.array_equal(epoch_order(50, -1, 0), epoch_order(50, 1, 0))
    a, b = batches(20, micro_tokens=10), batches(20, micro_tokens=1000)
    assert all(np.array_equal(a.batch(step), b.batch(step)) for step in range(1, 12))


def test_order_is_the_same_in_every_version():
    """Ranks of the first draws of PCG64(SeedSequence([0, 0])), whose stream numpy keeps fixed."""
    draws = np.random.Generator(np.random.PCG64(np.random.SeedSequence([0, 0]))).bit_generator.random_raw(8)
    assert epoch_order(8, 0, 0).tolist() == sorted(range(8), key=lambda i: draws[i]) == GOLDEN


GOLDEN = [3, 2, 1, 6, 0, 7, 4, 5]


def test_equally_long_items_keep_their_order():
    """So that the rows of a step are one and the same on every machine, whatever its sort does with equals."""
    random = np.random.default_rng(0)
    items, tokens = random.permutation(400), random.integers(1, 4, 400)
    [[only]] = distribute(items, tokens, 400 * 4, world=1)
    assert only.tolist() == sorted(items.tolist(), key=lambda item: -tokens[item])


def test_every_combination_of_numbers_is_a_randomness_of_its_own():
    """Those of dropout are a step and a rank: rank 1 in step 2 is not rank 2 in step 1."""
    states = {
        seed_sequence(seed, a, b).generate_state(2).tobytes() for seed in (0, -1) for a in range(4) for b in range(4)
    }
    assert len(states) == 2 * 4 * 4


def test_nobody_writes_into_the_order_that_others_share():
    with pytest.raises(ValueError, match="read-only"):
        epoch_order(8, 0, 0)[0] = 5


def test_a_rank_may_have_nothing_to_do():
    found = batches(10)
    assert [len(found.micro_batches(3, rank, 4)) for rank in range(4)].count(0) == 2
    assert found.tokens(3) == found.lengths.sequences_I[found.batch(3)].sum()


def test_a_model_that_shares_no_prompts_packs_by_the_tokens_of_the_sequences():
    """Two pairs of 14 tokens, a prompt of 4 among them twice: within 20 both can run if it runs once, and else one."""
    found = BatchSampler(
        np.arange(2), TokenCounts(np.array([14, 14]), np.array([10, 10])), batch_size=2, micro_tokens=20, seed=0
    )
    shared, unshared = (
        [len(part.items) for part in found.micro_batches(1, 0, 1, sharing=how)] for how in (True, False)
    )
    assert (shared, unshared) == ([2], [1, 1])


def test_in_lockstep_ranks_with_fewer_micro_batches_run_the_shortest_item_for_company():
    """Of 20, 20, 20, 11 and 12 tokens in rows of 23 three ranks have 20 + nothing, 20 and 12, 20 and 11: one runs 11 again."""
    tokens = np.array([20, 20, 20, 11, 12])
    found = BatchSampler(np.arange(5), TokenCounts(tokens, tokens), batch_size=5, micro_tokens=23, seed=0)
    counted, company = (
        [
            [m.items.tolist() for m in found.micro_batches(1, rank, 3, in_lockstep=True) if m.counts is counts]
            for rank in range(3)
        ]
        for counts in (True, False)
    )
    assert sorted(map(len, counted)) == [1, 2, 2]
    assert sorted(company) == [[], [], [[3]]]
    assert sorted(item for rank in counted for items in rank for item in items) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_together_have_the_batch(world: int):
    found = batches(30, batch_size=9)
    mine = [item for rank in range(world) for micro in found.micro_batches(2, rank, world) for item in micro.items]
    assert sorted(mine) == sorted(found.batch(2))

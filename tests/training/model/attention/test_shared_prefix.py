"""Rows derived by hand, and a property of any row: a token attends to the same tokens as in a row of its own."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from training.model.attention.shared_prefix import TokenSequence, build_row, common_prefix

CPU = torch.device("cpu")


def sequence(ids: list[int], first: int) -> TokenSequence:
    """Return `ids` with a response from index `first` on."""
    return TokenSequence(torch.tensor(ids), torch.arange(len(ids)) >= first)


def test_build_row_of_two_groups_by_hand():
    """Prompt 1 2 3; responses 4 5 6 and 4 7: the 4 is shared. The last token of each response is only a target."""
    row = build_row([[sequence([1, 2, 3, 4, 5, 6], 3), sequence([1, 2, 3, 4, 7], 3)], [sequence([8, 9], 1)]], CPU)
    assert row.ids_T.tolist() == [1, 2, 3, 4, 5, 8]
    assert row.positions_T.tolist() == [0, 1, 2, 3, 4, 0]
    assert [(s.start, s.length, s.prefix) for s in row.plan.segments] == [(0, 4, None), (4, 1, 0), (5, 1, None)]
    assert row.predictors_N.tolist() == [2, 3, 4, 2, 3, 5]
    assert row.targets_N.tolist() == [4, 5, 6, 4, 7, 9]
    assert row.counts_S.tolist() == [3, 2, 1]


def test_masks_by_hand():
    """A response of 2 after a prefix of 3. With a window of 2 each query attends to itself and the token before."""
    row = build_row([[sequence([1, 2, 3, 4, 5, 6], 3), sequence([1, 2, 3, 7, 8], 3)]], CPU)
    assert row.plan.mask(0, None) is None
    assert row.plan.mask(1, None).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert row.plan.mask(1, 2).int().tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert row.plan.mask(0, 2).int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert row.plan.mask(0, 3) is None


def test_gathered_keys_and_values_by_hand():
    row = build_row([[sequence([1, 2, 3, 4, 5, 6], 3), sequence([1, 2, 3, 7, 8], 3)]], CPU)
    gathered = row.plan.gathered
    keys, values = [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5], [6, 7, 8, 6, 7, 8, 9, 10, 6, 7, 8, 11]
    assert gathered.copies.rows_G.tolist() == keys + values
    key_copies = [[0, 3, 8], [1, 4, 9], [2, 5, 10], [6, 24, 24], [7, 24, 24], [11, 24, 24]]
    value_copies = [[12, 15, 20], [13, 16, 21], [14, 17, 22], [18, 24, 24], [19, 24, 24], [23, 24, 24]]
    assert gathered.copies.places_RC.tolist() == key_copies + value_copies
    assert gathered.query_bounds.tolist() == [0, 3, 5, 6] and gathered.key_bounds.tolist() == [0, 3, 8, 12]
    assert (gathered.longest_query, gathered.longest_key) == (3, 5)
    assert gathered.query_bounds.dtype == torch.int32


def test_a_row_without_prefixes_gathers_no_keys():
    gathered = build_row([[sequence([1, 2, 3], 1)], [sequence([4, 5, 6, 7], 1)]], CPU).plan.gathered
    assert gathered.copies is None and gathered.key_bounds.tolist() == gathered.query_bounds.tolist() == [0, 2, 5]


IDS = st.lists(st.integers(0, 2), min_size=1, max_size=7)


@given(st.lists(st.lists(IDS, min_size=1, max_size=4), min_size=1, max_size=3))
def test_every_token_attends_to_exactly_its_sequence(groups: list[list[list[int]]]):
    """By the plan, each predictor attends to the ids before its target in the sequence."""
    sequences = [[sequence(ids, 0) for ids in group] for group in groups]
    row = build_row(sequences, CPU)
    attended = {}
    for number, segment in enumerate(row.plan.segments):
        before: list[int] = []
        if segment.prefix is not None:
            prefix = row.plan.segments[segment.prefix]
            before = row.ids_T[prefix.start : prefix.start + prefix.length].tolist()
        for index in range(segment.start, segment.start + segment.length):
            attended[index] = before + row.ids_T[segment.start : index + 1].tolist()
            assert int(row.positions_T[index]) == len(attended[index]) - 1
        assert row.plan.before(number) == len(before)
    assert sorted(attended) == list(range(len(row.ids_T)))
    flat = [ids for group in groups for ids in group]
    expected = [(ids[: index + 1], ids[index + 1]) for ids in flat for index in range(len(ids) - 1)]
    predictions = zip(row.predictors_N, row.targets_N, strict=True)
    assert [(attended[int(index)], int(target)) for index, target in predictions] == expected


@given(st.lists(IDS, min_size=1, max_size=4))
def test_common_prefix_is_the_longest_common_beginning(runs: list[list[int]]):
    found = common_prefix([torch.tensor(run) for run in runs])
    assert len({tuple(run[:found]) for run in runs}) == 1
    assert len({tuple(run[: found + 1]) for run in runs}) > 1 or any(len(run) == found for run in runs)

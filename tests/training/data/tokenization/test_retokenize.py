"""The sample of pairs that is tokenized again after an upgrade."""

import itertools

import pyarrow as pa

from training.contract.identity.software import COMPARED
from training.data.tokenization.pair_dataset import Pairs
from training.data.tokenization.retokenize import _sample_positions


def pairs_of(lengths: list[tuple[int, int]]) -> Pairs:
    lists = {
        side: pa.array([[0] * pair[n] for pair in lengths], pa.list_(pa.int32()))
        for n, side in enumerate(("chosen_ids", "rejected_ids"))
    }
    return Pairs(pa.table({**lists, "prompt_length": pa.array([1] * len(lengths), pa.int32())}))


def test_sample_is_sample_positions_over_the_lengths_of_the_longer_response():
    lengths = [(1 + 7 * n % 1000, 3) for n in range(1000)]
    sample = _sample_positions(pairs_of(lengths))
    longest = sorted(max(lengths[at]) for at in sample)
    assert len(set(sample)) == COMPARED == 64
    assert longest[0] == 3 and longest[-1] == 1000
    assert max(b - a for a, b in itertools.pairwise(longest)) <= 1000 / 63 + 1


def test_sample_of_few_pairs_is_all_of_them():
    assert sorted(_sample_positions(pairs_of([(5, 2), (1, 9), (3, 3)]))) == [0, 1, 2]

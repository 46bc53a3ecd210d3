"""The distinct sequences of all pairs, by their keys."""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from training.data.tokenization.pair_dataset import Pairs
from training.scoring.cached_sequences import DistinctSequences


@dataclass(frozen=True)
class Keyed:
    """The keys of pairs: first the chosen side, then the rejected side."""

    keys_2PK: npt.NDArray[np.uint8]

    def keys(self, side: str) -> npt.NDArray[np.uint8]:
        return np.split(self.keys_2PK, 2)[side == "rejected"]

    def lengths(self, side: str) -> npt.NDArray[Any]:
        return np.split(np.arange(len(self.keys_2PK)), 2)[side == "rejected"]


# Bytes that texts or signed numbers would order differently; few, so that keys repeat or differ in one byte.
KEYS = st.lists(st.sampled_from([0, 127, 128, 255]), min_size=2, max_size=2).map(lambda ends: ends[:1] * 31 + ends[1:])


@given(keys=st.lists(KEYS, min_size=2, max_size=40).filter(lambda keys: len(keys) % 2 == 0))
def test_distinct_sequences_are_those_of_numpy_unique(keys: list[list[int]]):
    keys_2PK = np.array(keys, dtype=np.uint8)
    found = DistinctSequences.of(cast(Pairs, Keyed(keys_2PK)))
    keys_SK, first_S, sequence_2P = np.unique(keys_2PK, axis=0, return_index=True, return_inverse=True)
    np.testing.assert_array_equal(found.keys_SK, keys_SK, strict=True)
    np.testing.assert_array_equal(found.first_S, first_S, strict=True)
    np.testing.assert_array_equal(found.sequence_2P, sequence_2P.reshape(-1), strict=True)
    assert found.lengths_S.tolist() == found.first_S.tolist(), "a place's length is its number here"

"""Which items each rank trains on in each step: pure functions of (seed, step), so resuming needs no loader's state.

An item is what a global batch counts: a pair with its two sequences, or one sequence. Three decisions, in this order:

1. Order. The epoch's permutation sorts the items by random bits of PCG64 seeded with (seed, epoch): a bit generator's
   stream is fixed for ever, unlike the shuffling built upon it. Batches are cut from it, `batch_size` items each. The
   last batch of an epoch keeps what is left: no data is lost, and its loss is divided by its own number of items.
2. Ranks. The longest item goes to the rank with the fewest tokens so far, and so on: a third over the best balance at
   most (Graham 1969). A rank may get none, if there are more ranks than items.
3. Micro-batches. A rank's items, longest first, are cut so that none holds more than `micro_tokens` tokens with every
   sequence padded to the longest. An item over the budget goes alone.

Neither 2 nor 3 changes a result but for rounding: losses are sums over the items divided by the global count.

Legend: I items, S sequences of an item, `lengths_IS` their tokens.
"""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.contract.errors import DataError
from training.data.batches import Pairs

Positions = NDArray[np.int64]
_SEEDS = 2**64


@dataclass(frozen=True)
class Batches:
    """The batches of a run over `items`, a part of the I items; steps count from 1 and go on over the epochs."""

    items: Positions
    lengths_IS: Positions
    batch_size: int
    micro_tokens: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.items) // self.batch_size)

    def batch(self, step: int) -> Positions:
        """The items of the global batch of `step`."""
        assert step >= 1, f"step {step}"
        epoch, index = divmod(step - 1, self.steps_per_epoch)
        order = epoch_order(len(self.items), self.seed, epoch)
        return self.items[order[index * self.batch_size :][: self.batch_size]]

    def micro_batches(self, step: int, rank: int, world: int) -> list[Positions]:
        """The part of the batch of `step` that is `rank`'s, in micro-batches; an empty list if it has no part."""
        return share(self.batch(step), self.lengths_IS, self.micro_tokens, world)[rank]

    def tokens(self, step: int) -> int:
        """Tokens of the global batch of `step`, padding not counted."""
        return int(self.lengths_IS[self.batch(step)].sum())


def train_items(pairs: Pairs) -> Positions:
    """The pairs to train on. Raises DataError if there are none."""
    items = pairs.indices("train")
    if not len(items):
        raise DataError(
            f"none of the {len(pairs)} tokenized pairs is in the train split; "
            f"lower `data.validation_fraction` or add preference data"
        )
    return items


def epoch_order(items: int, seed: int, epoch: int) -> Positions:
    """The permutation of `items` items in `epoch`, counted from 0."""
    bits = np.random.PCG64(seed_sequence(seed, epoch)).random_raw(items)
    return np.argsort(bits, kind="stable")


def seed_sequence(seed: int, *parts: int) -> np.random.SeedSequence:
    """Independent randomness for every combination of the recipe's seed, which may be negative, and of `parts`."""
    return np.random.SeedSequence([seed % _SEEDS, *parts])


def share(items: Positions, lengths_IS: Positions, micro_tokens: int, world: int) -> list[list[Positions]]:
    """Distribute `items` over `world` ranks, and each rank's part over micro-batches."""
    return [_cut(part, lengths_IS, micro_tokens) for part in _balance(items, lengths_IS, world)]


def _balance(items: Positions, lengths_IS: Positions, world: int) -> list[Positions]:
    """Every rank's items, longest first; equals keep the order of `items`, so the outcome is one and the same."""
    tokens = lengths_IS[items].sum(axis=1)
    parts: list[list[int]] = [[] for _ in range(world)]
    loads = [(0, rank) for rank in range(world)]
    for at in np.argsort(-tokens, kind="stable"):
        load, rank = loads[0]
        parts[rank].append(int(items[at]))
        heapq.heapreplace(loads, (load + int(tokens[at]), rank))
    return [np.array(part, dtype=np.int64) for part in parts]


def _cut(items: Positions, lengths_IS: Positions, micro_tokens: int) -> list[Positions]:
    if not len(items):
        return []
    longest, sequences = lengths_IS[items].max(axis=1), lengths_IS.shape[1]
    by_length = np.argsort(-longest, kind="stable")
    cuts, start = [], 0
    for end in range(1, len(items) + 1):
        if (end - start) * sequences * longest[by_length[start]] > micro_tokens and end - start > 1:
            cuts.append(end - 1)
            start = end - 1
    return np.split(items[by_length], cuts)

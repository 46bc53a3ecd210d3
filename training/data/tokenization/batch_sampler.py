"""Which items each rank trains on in each step: pure functions of (seed, step), so resuming needs no state of a loader.

An item is a pair with its two sequences, or one sequence. Its cost is the tokens to run: a prompt that two sequences share
counts once, unless the model cannot share it, and there is no padding. Three decisions, in this order:

1. Order. An epoch's permutation sorts the items by random bits of PCG64 seeded with (seed, epoch); numpy guarantees the
   stream of a bit generator, but not its shuffle. Batches of `batch_size` items are cut from it. The last batch of an
   epoch is what is left: no data is lost, and its loss is divided by its own number of items.
2. Ranks. Longest first, each item goes to the rank with the fewest tokens so far: at most a third over the best balance
   (Graham 1969). A rank may get none, if there are more ranks than items.
3. Micro-batches. Longest first, each of a rank's items goes to the first micro-batch that has room for it under
   `micro_tokens`, else to a new one: at most 11/9 of the fewest possible, and one more (Dósa 2007). An item over the
   budget goes alone.

Neither 2 nor 3 changes a result but for rounding: losses are sums over the items divided by the global count.

With sharded weights every pass is collective, so all ranks must run the same number: those with fewer micro-batches run the
batch's shortest item again, and its result is thrown away.

Legend: I items.
"""

import functools
import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.contract.errors import DataError
from training.data.tokenization.pair_dataset import Pairs

Positions = NDArray[np.int64]
_SEEDS = 2**64


@dataclass(frozen=True)
class TokenCounts:
    """For each of I items: the tokens of its sequences, and those a model runs that shares their prompt (which counts once)."""

    sequences_I: Positions
    run_I: Positions


@dataclass(frozen=True)
class MicroBatch:
    """The items of one pass; its result is thrown away unless it `counts`."""

    items: Positions
    counts: bool = True


@dataclass(frozen=True)
class BatchSampler:
    """The batches of a run over `items`, some of the I items; steps count from 1, through all epochs."""

    items: Positions
    lengths: TokenCounts
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

    def micro_batches(
        self, step: int, rank: int, world: int, in_lockstep: bool = False, sharing: bool = True
    ) -> list[MicroBatch]:
        """What `rank` runs of the batch of `step`; empty if there is nothing for it.

        With `in_lockstep` every rank gets as many micro-batches as the one with the most, some of which do not count.
        `sharing`: whether the model runs a prompt once for both sequences; else all their tokens are held to `micro_tokens`.
        """
        batch, tokens_I = self.batch(step), self.lengths.run_I if sharing else self.lengths.sequences_I
        shares = distribute(batch, tokens_I, self.micro_tokens, world)
        own = [MicroBatch(items) for items in shares[rank]]
        if not in_lockstep:
            return own
        shortest = batch[[int(np.argmin(tokens_I[batch]))]]
        return own + [MicroBatch(shortest, counts=False)] * (max(map(len, shares)) - len(own))

    def tokens(self, step: int) -> int:
        """Tokens of the sequences of the global batch of `step`."""
        return int(self.lengths.sequences_I[self.batch(step)].sum())


def train_items(pairs: Pairs) -> Positions:
    """The pairs to train on. Raises DataError if there are none."""
    items = pairs.indices("train")
    if not len(items):
        raise DataError(
            f"none of the {len(pairs)} tokenized pairs is in the train split; "
            f"lower `data.validation_fraction` or add preference data"
        )
    return items


@functools.lru_cache(maxsize=2)  # a step asks for it four times, and a million items take 0.2 seconds to sort
def epoch_order(items: int, seed: int, epoch: int) -> Positions:
    """The permutation of `items` items in `epoch`, counted from 0; not to be written to."""
    bits = np.random.PCG64(seed_sequence(seed, epoch)).random_raw(items)
    order = np.argsort(bits, kind="stable")
    order.flags.writeable = False
    return order


def seed_sequence(seed: int, *parts: int) -> np.random.SeedSequence:
    """Independent randomness for every combination of the recipe's seed, which may be negative, and of `parts`."""
    return np.random.SeedSequence([seed % _SEEDS, *parts])


def distribute(items: Positions, tokens_I: Positions, micro_tokens: int, world: int) -> list[list[Positions]]:
    """Distribute `items` over `world` ranks, and each rank's part over micro-batches."""
    return [_pack(part, tokens_I, micro_tokens) for part in _balance(items, tokens_I, world)]


def _balance(items: Positions, tokens_I: Positions, world: int) -> list[Positions]:
    """Every rank's items, longest first; those of equal length in the order of `items`, so it is deterministic."""
    tokens = tokens_I[items]
    parts: list[list[int]] = [[] for _ in range(world)]
    loads = [(0, rank) for rank in range(world)]
    for at in np.argsort(-tokens, kind="stable"):
        load, rank = loads[0]
        parts[rank].append(int(items[at]))
        heapq.heapreplace(loads, (load + int(tokens[at]), rank))
    return [np.array(part, dtype=np.int64) for part in parts]


def _pack(items: Positions, tokens_I: Positions, micro_tokens: int) -> list[Positions]:
    """Micro-batches of `items`, which come longest first."""
    parts: list[list[int]] = []
    rooms: list[int] = []
    for item in items:
        tokens = int(tokens_I[item])
        place = next((n for n, room in enumerate(rooms) if tokens <= room), len(parts))
        if place == len(parts):
            parts.append([])
            rooms.append(micro_tokens)
        parts[place].append(int(item))
        rooms[place] -= tokens
    return [np.array(part, dtype=np.int64) for part in parts]

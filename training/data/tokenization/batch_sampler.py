"""Choose the items of each step, rank and micro-batch: pure functions of (seed, step), so resuming needs no loader state.

An item is a pair with its two sequences, or one sequence. Its cost is the tokens to run, without padding. A prompt that two
sequences share counts once, unless the model cannot share it.

1. Order. Sort the items by random bits of PCG64, seeded with (seed, epoch): numpy guarantees the stream of a bit generator, but
   not its shuffle. Cut batches of `batch_size` items. The last batch of an epoch may be smaller; its loss is divided by its own
   number of items.
2. Ranks. Longest first, give each item to the rank with the fewest tokens so far. The largest load is at most a third over the
   optimum (Graham 1969). With more ranks than items, some ranks get no item.
3. Micro-batches. Longest first, put each item of a rank into the first micro-batch with room under `micro_tokens`, else into a
   new one. This needs at most 11/9 of the fewest micro-batches, plus one (Dósa 2007). A longer item is alone.

Steps 2 and 3 change results only by rounding: losses are sums over the items, divided by the global count.

With sharded weights every pass is collective, so all ranks must run as many passes. Ranks with fewer micro-batches run the
batch's shortest item again and discard the result.

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
    """For each item: the tokens of its sequences, and the tokens to run if the model shares their prompt."""

    sequences_I: Positions
    run_I: Positions


@dataclass(frozen=True)
class MicroBatch:
    """The items of one pass. Its result is discarded unless it `counts`."""

    items: Positions
    counts: bool = True


@dataclass(frozen=True)
class BatchSampler:
    """The batches of a run over `items`, a subset of the I items. Steps count from 1, through all epochs."""

    items: Positions
    lengths: TokenCounts
    batch_size: int
    micro_tokens: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.items) // self.batch_size)

    def batch(self, step: int) -> Positions:
        """Return the items of the global batch of `step`."""
        assert step >= 1, f"step {step}"
        epoch, index = divmod(step - 1, self.steps_per_epoch)
        order = epoch_order(len(self.items), self.seed, epoch)
        return self.items[order[index * self.batch_size :][: self.batch_size]]

    def micro_batches(
        self, step: int, rank: int, world: int, in_lockstep: bool = False, sharing: bool = True
    ) -> list[MicroBatch]:
        """Return the micro-batches of `rank` in `step`; they may be empty.

        With `in_lockstep`, all ranks get as many micro-batches; the additional ones do not count. With `sharing`, the model
        runs a prompt once for both sequences; without it, all their tokens count towards `micro_tokens`.
        """
        batch, tokens_I = self.batch(step), self.lengths.run_I if sharing else self.lengths.sequences_I
        shares = distribute(batch, tokens_I, self.micro_tokens, world)
        micro_batches = [MicroBatch(items) for items in shares[rank]]
        if not in_lockstep:
            return micro_batches
        shortest = batch[[int(np.argmin(tokens_I[batch]))]]
        missing = max(map(len, shares)) - len(micro_batches)
        return micro_batches + [MicroBatch(shortest, counts=False)] * missing

    def tokens(self, step: int) -> int:
        """Return the tokens of the sequences in the global batch of `step`."""
        return int(self.lengths.sequences_I[self.batch(step)].sum())


def train_items(pairs: Pairs) -> Positions:
    """Return the positions of the pairs in the train split. Raise DataError without such pairs."""
    items = pairs.indices("train")
    if not len(items):
        raise DataError(
            f"0 of the {len(pairs)} tokenized pairs are in the train split; "
            f"lower `data.validation_fraction` or add preference data",
            "no-train-pairs",
        )
    return items


@functools.lru_cache(maxsize=2)  # each step calls it four times, and sorting a million items takes 0.2 seconds
def epoch_order(items: int, seed: int, epoch: int) -> Positions:
    """Return the read-only permutation of `items` items in `epoch`, counted from 0."""
    bits = np.random.PCG64(seed_sequence(seed, epoch)).random_raw(items)
    order = np.argsort(bits, kind="stable")
    order.flags.writeable = False
    return order


def seed_sequence(seed: int, *parts: int) -> np.random.SeedSequence:
    """Return independent randomness for each combination of seed (it may be negative) and `parts`."""
    return np.random.SeedSequence([seed % _SEEDS, *parts])


def distribute(items: Positions, tokens_I: Positions, micro_tokens: int, world: int) -> list[list[Positions]]:
    """Distribute `items` over `world` ranks, and each rank's part over micro-batches."""
    return [_pack(part, tokens_I, micro_tokens) for part in _balance(items, tokens_I, world)]


def _balance(items: Positions, tokens_I: Positions, world: int) -> list[Positions]:
    """Return each rank's items, longest first. Items of equal length keep their order, so the result is deterministic."""
    tokens = tokens_I[items]
    parts: list[list[int]] = [[] for _ in range(world)]
    loads = [(0, rank) for rank in range(world)]
    for at in np.argsort(-tokens, kind="stable"):
        load, rank = loads[0]
        parts[rank].append(int(items[at]))
        heapq.heapreplace(loads, (load + int(tokens[at]), rank))
    return [np.array(part, dtype=np.int64) for part in parts]


def _pack(items: Positions, tokens_I: Positions, micro_tokens: int) -> list[Positions]:
    """Pack `items`, which come longest first, into micro-batches."""
    parts: list[list[int]] = []
    rooms: list[int] = []
    for item in items:
        tokens = int(tokens_I[item])
        index = next((n for n, room in enumerate(rooms) if tokens <= room), len(parts))
        if index == len(parts):
            parts.append([])
            rooms.append(micro_tokens)
        parts[index].append(int(item))
        rooms[index] -= tokens
    return [np.array(part, dtype=np.int64) for part in parts]

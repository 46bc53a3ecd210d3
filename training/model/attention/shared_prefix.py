"""Sequences that share prompts in one row, in which each prompt appears once.

    P1 C1 R1 P2 C2 R2 ...        P the prefix of a group, C and R what its sequences add to it; no padding

A group is any number of sequences, a pair for example; its prefix is the longest they have in common, found by comparing
tokens, so it may reach into the responses. Each response attends to its prefix and to itself, and its positions go on from the
end of the prefix: so its hidden states are those it would have alone. Tokens after the one that predicts the last response
token are left out, since nothing attends to them.

Legend: T tokens of the row, N response tokens of all sequences, S sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from training.model.device_prefetch import to_device


@dataclass(frozen=True)
class TokenSequence:
    """A prompt with one response. `ids_T`: token ids, int64; `mask_T`: True where a token belongs to the response."""

    ids_T: Tensor
    mask_T: Tensor


@dataclass(frozen=True)
class PrefixSegment:
    """Consecutive tokens of the row. They attend to all of segment number `prefix`, and causally to themselves."""

    start: int
    length: int
    prefix: int | None


@dataclass(frozen=True)
class KVCopies:
    """The R = 2 T keys and values of the row, keys first, gathered for each segment: G copies, those of keys first.

    `rows_G`: which of the R each copies; `places_RC`: where the copies of each of the R are, G where one has fewer than C.
    """

    rows_G: Tensor
    places_RC: Tensor


@dataclass(frozen=True)
class VarlenLayout:
    """The plan for one call of a kernel for sequences of unequal length: for each segment its queries and its keys.

    `copies` is None if no segment has a prefix: then each sees only itself.
    """

    copies: KVCopies | None
    query_bounds: Tensor
    key_bounds: Tensor
    longest_query: int
    longest_key: int


class PackedAttentionPlan:
    """Which tokens of a row attend to which: its segments, in order and without gaps. It serves one forward pass."""

    def __init__(self, segments: tuple[PrefixSegment, ...], device: torch.device) -> None:
        self.segments, self.device = segments, device
        self.lengths = [segment.length for segment in segments]
        self.gathered = self._gather()
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def before(self, number: int) -> int:
        """How many tokens come before segment `number` in its own sequence."""
        prefix = self.segments[number].prefix
        return 0 if prefix is None else self.segments[prefix].length

    def mask(self, number: int, window: int | None) -> Tensor | None:
        """Which keys (its prefix, then itself) segment `number` attends to; None where that is plain causal attention.

        Query i has position `before + i`; with a window it attends to that position and to the `window - 1` before.
        """
        before, length = self.before(number), self.segments[number].length
        if not window or window >= before + length:
            window = None
        if before == 0 and window is None:
            return None
        if (number, window) not in self._masks:
            mask = torch.ones(length, before + length, dtype=torch.bool, device=self.device).tril_(before)
            self._masks[number, window] = mask if window is None else mask.triu_(before - window + 1)
        return self._masks[number, window]

    def _gather(self) -> VarlenLayout:
        keys = [self.before(number) + segment.length for number, segment in enumerate(self.segments)]
        return VarlenLayout(
            self._copies() if keys != self.lengths else None,
            to_device(_bounds(self.lengths), self.device),
            to_device(_bounds(keys), self.device),
            max(self.lengths),
            max(keys),
        )

    def _copies(self) -> KVCopies:
        """Each segment's keys and values: those of its prefix, if it has one, and its own."""
        rows: list[Tensor] = []
        for segment in self.segments:
            seen = [segment] if segment.prefix is None else [self.segments[segment.prefix], segment]
            rows += [torch.arange(part.start, part.start + part.length) for part in seen]
        of_keys = torch.cat(rows)
        rows_G = torch.cat([of_keys, of_keys + sum(self.lengths)])
        counts_R = rows_G.bincount()
        order_G, ends_R = rows_G.argsort(stable=True), counts_R.cumsum(0)
        places_RC = torch.full((len(counts_R), int(counts_R.max())), len(rows_G))
        owners_G = rows_G[order_G]
        places_RC[owners_G, torch.arange(len(rows_G)) - (ends_R - counts_R)[owners_G]] = order_G
        return KVCopies(to_device(rows_G, self.device), to_device(places_RC, self.device))


@dataclass(frozen=True)
class PackedRow:
    """Tokens to run, with their positions; those at `predictors_N` predict the response tokens `targets_N`.

    Both are sequence after sequence, `counts_S` of each; the last token of a prefix may predict for several sequences.
    `sequences_T`: of how many sequences each token is part.
    """

    ids_T: Tensor
    positions_T: Tensor
    sequences_T: Tensor
    plan: PackedAttentionPlan
    predictors_N: Tensor
    targets_N: Tensor
    counts_S: Tensor


def build_row(groups: Sequence[Sequence[TokenSequence]], device: torch.device, whole: bool = False) -> PackedRow:
    """One row of all groups, on `device`: for each group its prefix, then what each of its sequences adds to it.

    With `whole` the tokens stay that nothing attends to: the length of a sequence may matter where they do not.
    """
    segments: list[PrefixSegment] = []
    ids, positions, sequences, predictors, targets, counts = [], [], [], [], [], []
    end = 0  # of the row so far
    for group in groups:
        predicted = [_predicted(sequence) for sequence in group]
        runs = [sequence.ids_T[: None if whole else _needed(p)] for sequence, p in zip(group, predicted, strict=True)]
        shared = common_prefix(runs)
        prefix, prefix_start = (len(segments) if shared else None), end
        if shared:
            segments.append(PrefixSegment(end, shared, None))
            ids.append(runs[0][:shared])
            positions.append(torch.arange(shared))
            sequences.append(torch.full((shared,), len(group)))
            end += shared
        for sequence, run, places in zip(group, runs, predicted, strict=True):
            before = places - 1  # each is predicted by the token before it, in the prefix or in its own segment
            predictors.append(torch.where(before < shared, prefix_start + before, end - shared + before))
            targets.append(sequence.ids_T[places])
            counts.append(len(places))
            if len(run) > shared:
                segments.append(PrefixSegment(end, len(run) - shared, prefix))
                ids.append(run[shared:])
                positions.append(torch.arange(shared, len(run)))
                sequences.append(torch.ones(len(run) - shared, dtype=torch.int64))
                end += len(run) - shared
    of_tokens = (torch.cat(parts) for parts in (ids, positions, sequences, predictors, targets))
    ids_T, positions_T, sequences_T, predictors_N, targets_N = (to_device(tensor, device) for tensor in of_tokens)
    counts_S, plan = to_device(torch.tensor(counts), device), PackedAttentionPlan(tuple(segments), device)
    return PackedRow(ids_T, positions_T, sequences_T, plan, predictors_N, targets_N, counts_S)


def common_prefix(runs: Sequence[Tensor]) -> int:
    """How many tokens all of `runs` begin with."""
    shortest = min(len(run) for run in runs)
    same = torch.stack([run[:shortest] for run in runs]).eq(runs[0][:shortest]).all(dim=0)
    return int(same.long().cumprod(0).sum())


def _predicted(sequence: TokenSequence) -> Tensor:
    """The places of the response tokens; nothing predicts the first token of a sequence."""
    places = sequence.mask_T.bool().nonzero()[:, 0]
    return places[places > 0]


def _needed(predicted: Tensor) -> int:
    """Tokens up to the one that predicts the last response token; at least one."""
    return int(predicted[-1]) if len(predicted) else 1


def _bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)

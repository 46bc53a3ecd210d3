"""Rows of sequences that share prompts: each prompt appears once.

    P1 C1 R1 P2 C2 R2 ...        P the prefix of a group, C and R the remaining tokens of its sequences; no padding

A group is any number of sequences, for example a pair. Its prefix is their longest common beginning. We find it by comparing
tokens, so it may reach into the responses. Each response attends to its prefix and to itself, and its positions continue from
the end of the prefix. So its hidden states are the same as in a row of its own. Tokens after the predictor of the last
response token are left out, because nothing attends to them.

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
    """A prompt with one response. `ids_T`: token ids, int64; `mask_T`: True for the tokens of the response."""

    ids_T: Tensor
    mask_T: Tensor


@dataclass(frozen=True)
class PrefixSegment:
    """Consecutive tokens of the row. They attend to all of segment `prefix`, and causally to themselves."""

    start: int
    length: int
    prefix: int | None


@dataclass(frozen=True)
class KVCopies:
    """Indices that gather the R = 2 T keys and values of the row (keys first) into G copies, segment after segment.

    `rows_G`: the source of each copy; `places_RC`: the copies of each source, filled up with G to C columns.
    """

    rows_G: Tensor
    places_RC: Tensor


@dataclass(frozen=True)
class VarlenLayout:
    """The bounds of each segment's queries and keys for one call of a kernel for sequences of unequal length.

    `copies` is None if no segment has a prefix: then each segment attends only to itself.
    """

    copies: KVCopies | None
    query_bounds: Tensor
    key_bounds: Tensor
    longest_query: int
    longest_key: int


class PackedAttentionPlan:
    """The segments of a row, in order and without gaps. A plan serves one forward pass."""

    def __init__(self, segments: tuple[PrefixSegment, ...], device: torch.device) -> None:
        self.segments, self.device = segments, device
        self.lengths = [segment.length for segment in segments]
        self.gathered = self._gather()
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def before(self, number: int) -> int:
        """Return the number of tokens before segment `number` in its sequence."""
        prefix = self.segments[number].prefix
        return 0 if prefix is None else self.segments[prefix].length

    def mask(self, number: int, window: int | None) -> Tensor | None:
        """Return the mask of segment `number` over its keys (prefix, then itself); None for plain causal attention.

        Query i has position `before + i`. With a window it attends to this position and the `window - 1` before it.
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
        """Return the copies for each segment: keys and values of its prefix, if any, and of itself."""
        rows: list[Tensor] = []
        for segment in self.segments:
            attended = [segment] if segment.prefix is None else [self.segments[segment.prefix], segment]
            rows += [torch.arange(part.start, part.start + part.length) for part in attended]
        key_rows = torch.cat(rows)
        rows_G = torch.cat([key_rows, key_rows + sum(self.lengths)])
        counts_R = rows_G.bincount()
        order_G, ends_R = rows_G.argsort(stable=True), counts_R.cumsum(0)
        places_RC = torch.full((len(counts_R), int(counts_R.max())), len(rows_G))
        owners_G = rows_G[order_G]
        places_RC[owners_G, torch.arange(len(rows_G)) - (ends_R - counts_R)[owners_G]] = order_G
        return KVCopies(to_device(rows_G, self.device), to_device(places_RC, self.device))


@dataclass(frozen=True)
class PackedRow:
    """Tokens to run, with their positions. The tokens at `predictors_N` predict the response tokens `targets_N`.

    Both go sequence by sequence, `counts_S` tokens each. The last token of a prefix may predict for several sequences.
    `sequences_T`: the number of sequences that contain each token.
    """

    ids_T: Tensor
    positions_T: Tensor
    sequences_T: Tensor
    plan: PackedAttentionPlan
    predictors_N: Tensor
    targets_N: Tensor
    counts_S: Tensor


def build_row(groups: Sequence[Sequence[TokenSequence]], device: torch.device, whole: bool = False) -> PackedRow:
    """Return one row of all groups on `device`: each group's prefix, then the remaining tokens of its sequences.

    `whole` keeps the tokens that nothing attends to, for models whose results depend on the length of a sequence.
    """
    segments: list[PrefixSegment] = []
    ids, positions, sequences, predictors, targets, counts = [], [], [], [], [], []
    end = 0  # of the row so far
    for group in groups:
        predicted = [_target_indices(sequence) for sequence in group]
        runs = [
            sequence.ids_T[: None if whole else _run_length(indices)]
            for sequence, indices in zip(group, predicted, strict=True)
        ]
        shared = common_prefix(runs)
        prefix, prefix_start = (len(segments) if shared else None), end
        if shared:
            segments.append(PrefixSegment(end, shared, None))
            ids.append(runs[0][:shared])
            positions.append(torch.arange(shared))
            sequences.append(torch.full((shared,), len(group)))
            end += shared
        for sequence, run, indices in zip(group, runs, predicted, strict=True):
            before = indices - 1  # the token before a target predicts it, in the prefix or in the same segment
            predictors.append(torch.where(before < shared, prefix_start + before, end - shared + before))
            targets.append(sequence.ids_T[indices])
            counts.append(len(indices))
            if len(run) > shared:
                segments.append(PrefixSegment(end, len(run) - shared, prefix))
                ids.append(run[shared:])
                positions.append(torch.arange(shared, len(run)))
                sequences.append(torch.ones(len(run) - shared, dtype=torch.int64))
                end += len(run) - shared
    tensors = (torch.cat(parts) for parts in (ids, positions, sequences, predictors, targets))
    ids_T, positions_T, sequences_T, predictors_N, targets_N = (to_device(tensor, device) for tensor in tensors)
    counts_S, plan = to_device(torch.tensor(counts), device), PackedAttentionPlan(tuple(segments), device)
    return PackedRow(ids_T, positions_T, sequences_T, plan, predictors_N, targets_N, counts_S)


def common_prefix(runs: Sequence[Tensor]) -> int:
    """Return the length of the common beginning of all `runs`."""
    shortest = min(len(run) for run in runs)
    same = torch.stack([run[:shortest] for run in runs]).eq(runs[0][:shortest]).all(dim=0)
    return int(same.long().cumprod(0).sum())


def _target_indices(sequence: TokenSequence) -> Tensor:
    """Return the indices of the response tokens, except index 0: nothing predicts the first token."""
    indices = sequence.mask_T.bool().nonzero()[:, 0]
    return indices[indices > 0]


def _run_length(predicted: Tensor) -> int:
    """Return the number of tokens up to the predictor of the last response token; at least one."""
    return int(predicted[-1]) if len(predicted) else 1


def _bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)

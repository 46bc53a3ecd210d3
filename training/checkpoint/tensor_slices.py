"""Pieces: large tensors that several ranks write together, each some rows of them into a file of its own.

Ranks that hold copies of the same rows write an equal part each; a rank that holds a shard writes the shard. A reader asks
for rows and gets them from whichever pieces overlap them. So files can be read by another number of ranks, and with
another layout of the weights, than they were written.

A file is plain safetensors. A piece's name there is `<tensor>@<first row>`; the header's metadata has, as JSON under
`pieces`, the shape of each whole tensor. A tensor without dimensions is one piece, `<tensor>@0`.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from training.contract.errors import CorruptArtifact

_METADATA = "pieces"


@dataclass(frozen=True)
class LocalRows:
    """Rows `first` to `first + rows` of a tensor of `total`; `copies` ranks hold the same, and this one is number `copy`."""

    first: int
    rows: int
    total: int
    copy: int
    copies: int

    def own(self) -> tuple[int, int]:
        """The part of these rows that this rank writes: from and to, counted from `first`."""
        return self.rows * self.copy // self.copies, self.rows * (self.copy + 1) // self.copies


@dataclass(frozen=True)
class TensorSlice:
    """Rows of the tensor `name`, from number `first` on; `shape` is that of the whole tensor."""

    name: str
    first: int
    shape: tuple[int, ...]
    rows: Tensor


def piece_of(name: str, tensor: Tensor, local: LocalRows) -> TensorSlice:
    """What this rank writes of a tensor of which it holds the rows `tensor`."""
    assert len(tensor) == local.rows, f"{name}: {len(tensor)} rows, {local.rows} expected"
    begin, end = local.own()
    return TensorSlice(name, local.first + begin, (local.total, *tensor.shape[1:]), tensor.detach()[begin:end])


def write_pieces(pieces: Iterable[TensorSlice], file: Path) -> None:
    """Raises OSError or SafetensorError where the disk does not take it."""
    filled = [piece for piece in pieces if piece.rows.numel()]
    shapes = {piece.name: piece.shape for piece in filled}
    tensors = {f"{piece.name}@{piece.first}": piece.rows.contiguous() for piece in filled}
    save_file(tensors, file, metadata={_METADATA: json.dumps(shapes)})


@dataclass(frozen=True)
class _OpenSlice:
    """A piece in an open file: which rows of its tensor it has."""

    file: Any
    key: str
    first: int
    rows: int

    def cut(self, first: int, end: int) -> Tensor:
        """Those of the tensor's rows `first` to `end` that this piece has."""
        begin, stop = max(first - self.first, 0), min(end - self.first, self.rows)
        rows: Tensor = self.file.get_slice(self.key)[begin : max(begin, stop)]
        return rows


class TensorSliceReader:
    """Reads rows of the tensors whose pieces are in `files`; `shapes` are those of the whole tensors."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Raises CorruptArtifact for a file that holds no pieces."""
        self._pieces: dict[str, list[_OpenSlice]] = defaultdict(list)
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            try:
                self._index(file)
            except (OSError, SafetensorError, ValueError, KeyError) as error:
                raise CorruptArtifact(f"{file} does not hold pieces of tensors: {error!r}") from error

    def read(self, name: str, first: int = 0, rows: int | None = None) -> Tensor:
        """Rows `first` to `first + rows` of a tensor, by default all. Raises CorruptArtifact where one is missing."""
        if name not in self.shapes:
            raise CorruptArtifact(f"no file holds a piece of {name}, but of {', '.join(sorted(self.shapes)[:5])} ...")
        shape, pieces = self.shapes[name], self._pieces[name]
        if not shape:
            scalar: Tensor = pieces[0].file.get_tensor(pieces[0].key)
            return scalar.clone()  # else the whole file stays mapped as long as this number
        end = shape[0] if rows is None else first + rows
        found = [piece.cut(first, end) for piece in sorted(pieces, key=lambda piece: piece.first)]
        whole = torch.cat([part for part in found if len(part)] or found[:1])
        if len(whole) != end - first:
            raise CorruptArtifact(f"of the rows {first} to {end} of {name} the files hold {len(whole)}")
        return whole

    def _index(self, file: Path) -> None:
        opened: Any = safe_open(file, framework="pt")
        shapes = json.loads(opened.metadata()[_METADATA])
        self.shapes |= {name: tuple(shape) for name, shape in shapes.items()}
        for key in opened.keys():  # noqa: SIM118  # not a dict
            name, _, first = key.rpartition("@")
            rows = opened.get_slice(key).get_shape()[0] if shapes[name] else 1
            self._pieces[name].append(_OpenSlice(opened, key, int(first), rows))

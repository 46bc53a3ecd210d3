"""Pieces: a set of large tensors in files of several ranks, each with some rows of some of them.

A rank that holds all rows writes an equal part of them, as does every other rank that holds the same; a rank that holds a
shard writes that. Reading does not ask who wrote what: whoever needs some rows takes them from whatever pieces overlap
them. So what one number of ranks wrote in one way of sharing, another reads in another.

A file is plain safetensors. A piece's name there is `<tensor>@<first row>`; the header's metadata says, as JSON under
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
    """Rows `first` to `first + rows` of a tensor that has `of`; `copies` ranks hold the same, this one is number `copy`."""

    first: int
    rows: int
    of: int
    copy: int
    copies: int

    def own(self) -> tuple[int, int]:
        """Where this rank's share of the rows begins and ends, counted from `first`: what it writes."""
        return self.rows * self.copy // self.copies, self.rows * (self.copy + 1) // self.copies


@dataclass(frozen=True)
class Piece:
    """Some rows of the tensor `name` of `shape`, the first of them number `first`."""

    name: str
    first: int
    shape: tuple[int, ...]
    rows: Tensor


def piece_of(name: str, tensor: Tensor, held: LocalRows) -> Piece:
    """What this rank writes of a tensor of which it holds the rows `tensor`."""
    assert len(tensor) == held.rows, f"{name}: {len(tensor)} rows, {held.rows} expected"
    begin, end = held.own()
    return Piece(name, held.first + begin, (held.of, *tensor.shape[1:]), tensor.detach()[begin:end])


def write_pieces(pieces: Iterable[Piece], file: Path) -> None:
    """Raises OSError or SafetensorError where the disk does not take it."""
    there = [piece for piece in pieces if piece.rows.numel()]
    shapes = {piece.name: piece.shape for piece in there}
    tensors = {f"{piece.name}@{piece.first}": piece.rows.contiguous() for piece in there}
    save_file(tensors, file, metadata={_METADATA: json.dumps(shapes)})


@dataclass(frozen=True)
class _Part:
    """A piece in a file that is open, and which rows it has."""

    file: Any
    key: str
    first: int
    rows: int

    def cut(self, first: int, end: int) -> Tensor:
        """Those of the rows `first` to `end` that are here."""
        begin, stop = max(first - self.first, 0), min(end - self.first, self.rows)
        rows: Tensor = self.file.get_slice(self.key)[begin : max(begin, stop)]
        return rows


class PieceReader:
    """Reads rows of the tensors that `files` hold together; `shapes` are those of the whole tensors."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Raises CorruptArtifact for a file that holds no pieces."""
        self._parts: dict[str, list[_Part]] = defaultdict(list)
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
        shape, parts = self.shapes[name], self._parts[name]
        if not shape:
            scalar: Tensor = parts[0].file.get_tensor(parts[0].key)
            return scalar
        end = shape[0] if rows is None else first + rows
        found = [part.cut(first, end) for part in sorted(parts, key=lambda part: part.first)]
        whole = torch.cat([rows for rows in found if len(rows)] or found[:1])
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
            self._parts[name].append(_Part(opened, key, int(first), rows))

"""Tensor slices: each rank writes some rows of the large tensors into its own file.

If several ranks hold copies of the same rows, each writes an equal part of them. A rank that holds a shard writes the shard. A
reader takes rows from all slices that overlap them. So other numbers of ranks and other placements can read the files.

A file is plain safetensors. The name of a slice is `<tensor>@<first row>`. The header's metadata has the full shape of each
tensor, as JSON under `pieces`. A tensor without dimensions is one slice, `<tensor>@0`.
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
    """Rows `first` to `first + rows` of a tensor of `total` rows. `copies` ranks hold them; this rank is number `copy`."""

    first: int
    rows: int
    total: int
    copy: int
    copies: int

    def own(self) -> tuple[int, int]:
        """Return the begin and end of the rows that this rank writes, counted from `first`."""
        return self.rows * self.copy // self.copies, self.rows * (self.copy + 1) // self.copies


@dataclass(frozen=True)
class TensorSlice:
    """Rows of the tensor `name`, from row `first`. `shape` is the shape of the full tensor."""

    name: str
    first: int
    shape: tuple[int, ...]
    rows: Tensor


def piece_of(name: str, tensor: Tensor, local: LocalRows) -> TensorSlice:
    """Return the slice that this rank writes. `tensor` holds the rows on this rank."""
    assert len(tensor) == local.rows, f"{name}: {len(tensor)} rows, {local.rows} expected"
    begin, end = local.own()
    return TensorSlice(name, local.first + begin, (local.total, *tensor.shape[1:]), tensor.detach()[begin:end])


def write_pieces(pieces: Iterable[TensorSlice], file: Path) -> None:
    """Write the slices that are not empty. Raises OSError or SafetensorError if the disk refuses."""
    nonempty = [piece for piece in pieces if piece.rows.numel()]
    shapes = {piece.name: piece.shape for piece in nonempty}
    tensors = {f"{piece.name}@{piece.first}": piece.rows.contiguous() for piece in nonempty}
    save_file(tensors, file, metadata={_METADATA: json.dumps(shapes)})


@dataclass(frozen=True)
class _OpenSlice:
    """A slice in an open file: rows `first` to `first + rows` of its tensor."""

    file: Any
    key: str
    first: int
    rows: int

    def cut(self, first: int, end: int) -> Tensor:
        """Return the overlap of this slice with the tensor's rows `first` to `end`."""
        begin, stop = max(first - self.first, 0), min(end - self.first, self.rows)
        rows: Tensor = self.file.get_slice(self.key)[begin : max(begin, stop)]
        return rows


class TensorSliceReader:
    """Reads rows of the tensors in `files`. `shapes` are the full shapes of the tensors."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Open the files. Raises CorruptArtifact for a file without slices."""
        self._pieces: dict[str, list[_OpenSlice]] = defaultdict(list)
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            try:
                self._index(file)
            except (OSError, SafetensorError, ValueError, KeyError) as error:
                raise CorruptArtifact(f"{file} does not hold tensor slices: {error!r}", "bad-slice-file") from error

    def read(self, name: str, first: int = 0, rows: int | None = None) -> Tensor:
        """Return rows `first` to `first + rows` of a tensor, by default all. Raises CorruptArtifact if a row is missing."""
        if name not in self.shapes:
            known = ", ".join(sorted(self.shapes)[:5])
            raise CorruptArtifact(f"the files have the tensors {known} ..., but not {name}", "missing-tensor")
        shape, pieces = self.shapes[name], self._pieces[name]
        if not shape:
            scalar: Tensor = pieces[0].file.get_tensor(pieces[0].key)
            return scalar.clone()  # a view would keep the file mapped
        end = shape[0] if rows is None else first + rows
        parts = [piece.cut(first, end) for piece in sorted(pieces, key=lambda piece: piece.first)]
        tensor = torch.cat([part for part in parts if len(part)] or parts[:1])
        if len(tensor) != end - first:
            raise CorruptArtifact(
                f"the files have {len(tensor)} of the {end - first} rows {first} to {end} of {name}", "missing-rows"
            )
        return tensor

    def _index(self, file: Path) -> None:
        opened: Any = safe_open(file, framework="pt")
        shapes = json.loads(opened.metadata()[_METADATA])
        self.shapes |= {name: tuple(shape) for name, shape in shapes.items()}
        for key in opened.keys():  # noqa: SIM118  # not a dict
            name, _, first = key.rpartition("@")
            rows = opened.get_slice(key).get_shape()[0] if shapes[name] else 1
            self._pieces[name].append(_OpenSlice(opened, key, int(first), rows))

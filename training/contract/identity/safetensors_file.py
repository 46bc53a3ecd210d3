"""The byte spans of the tensors in a safetensors file, and memory-mapped tensors.

A file consists of the header's length (8 bytes, little-endian), the header (JSON: name -> dtype, shape, begin and end after
the header) and the bytes. The safetensors library checks sizes, bounds and overlaps. It accepts a header with a name twice;
this module does not.

https://huggingface.co/docs/safetensors#format
"""

import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from training.contract.config.json_object import JsonObject

_LENGTH_BYTES = 8
_DTYPES = {"F64": "<f8", "F32": "<f4", "I64": "<i8", "I32": "<i4", "U8": "|u1"}


@dataclass(frozen=True)
class TensorSpan:
    """A tensor of a file; `begin` and `end` are byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_places(file: Path) -> list[TensorSpan]:
    """Return the tensors of `file` in the order of their bytes. Raises OSError, or ValueError if the file is invalid."""
    with open(file, "rb") as opened:  # open first: safetensors reports an unreadable file as missing
        try:
            # Read, not mapped: if another process truncates a mapped file, this process dies.
            with safe_open(file, framework="numpy", backend="pread"):
                pass
        except SafetensorError as error:
            raise ValueError(str(error)) from error
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        header = json.loads(opened.read(length), object_pairs_hook=_unique_names)
    start = _LENGTH_BYTES + length
    tensors = [
        TensorSpan(name, entry["dtype"], tuple(entry["shape"]), *(start + offset for offset in entry["data_offsets"]))
        for name, entry in header.items()
        if name != "__metadata__"
    ]
    return sorted(tensors, key=lambda tensor: (tensor.begin, tensor.name))


def map_tensors(file: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of `file` by name, read-only and memory-mapped. Raises OSError, or ValueError if it is invalid."""
    spans = read_places(file)
    with open(file, "rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    arrays = {}
    for span in spans:
        if span.dtype not in _DTYPES:
            raise ValueError(f"{span.name} is of dtype {span.dtype}, expected one of {', '.join(_DTYPES)}")
        count = int(np.prod(span.shape, dtype=np.int64))
        arrays[span.name] = np.frombuffer(mapped, _DTYPES[span.dtype], count, span.begin).reshape(span.shape)
    return arrays


def _unique_names(pairs: list[tuple[str, Any]]) -> JsonObject:
    """Build a JSON object. Raises ValueError if a name occurs twice, because parsers differ in the value they keep."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("its header has a name twice")
    return content

"""Where the tensors of a safetensors file lie, and mapping them into memory there.

A file is the length of the header (8 bytes, little-endian), the header (JSON: name -> dtype, shape, begin and end after the
header) and the bytes. The safetensors library checks sizes, bounds and overlaps; a header that has a name twice, which it
accepts, is refused here.

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

_LENGTH_BYTES = 8
_DTYPES = {"F64": "<f8", "F32": "<f4", "I64": "<i8", "I32": "<i4", "U8": "|u1"}


@dataclass(frozen=True)
class TensorSpan:
    """A tensor of a file: `begin` and `end` are bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_places(file: Path) -> list[TensorSpan]:
    """The tensors of `file` in the order of their bytes. Raises OSError, or ValueError if it is not sound."""
    with open(file, "rb") as opened:  # first, since safetensors calls a file that may not be read one that is not there
        try:
            # Read, not mapped: a map of a file that somebody truncates would end the process.
            with safe_open(file, framework="numpy", backend="pread"):
                pass
        except SafetensorError as error:
            raise ValueError(str(error)) from error
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        header = json.loads(opened.read(length), object_pairs_hook=_unique)
    start = _LENGTH_BYTES + length
    tensors = [
        TensorSpan(name, about["dtype"], tuple(about["shape"]), *(start + offset for offset in about["data_offsets"]))
        for name, about in header.items()
        if name != "__metadata__"
    ]
    return sorted(tensors, key=lambda tensor: (tensor.begin, tensor.name))


def map_tensors(file: Path) -> dict[str, npt.NDArray[Any]]:
    """The tensors of `file` by name, read-only and memory-mapped. Raises OSError, or ValueError if it is not sound."""
    places = read_places(file)
    with open(file, "rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    arrays = {}
    for place in places:
        if place.dtype not in _DTYPES:
            raise ValueError(f"{place.name} is of dtype {place.dtype}, expected one of {', '.join(_DTYPES)}")
        count = int(np.prod(place.shape, dtype=np.int64))
        arrays[place.name] = np.frombuffer(mapped, _DTYPES[place.dtype], count, place.begin).reshape(place.shape)
    return arrays


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are all different, since readers differ in which of two values they take."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("its header has a name twice")
    return content

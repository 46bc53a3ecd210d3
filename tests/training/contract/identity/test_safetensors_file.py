"""The spans of tensors in a file, compared with files written byte by byte."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from training.contract.identity.safetensors_file import map_tensors, read_places


def write(file: Path, header: dict[str, Any], content: bytes) -> Path:
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return file


def test_read_places_returns_tensors_in_the_order_of_their_bytes(tmp_path: Path):
    """`b` is first in the header, but after the 8 bytes of `a` in the file."""
    header = {
        "b": {"dtype": "I32", "shape": [1], "data_offsets": [8, 12]},
        "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
    }
    content = np.array([1.5, -2.0], "<f4").tobytes() + np.array([7], "<i4").tobytes()
    file = write(tmp_path / "file", header, content)
    start = len(file.read_bytes()) - 12
    spans = [(span.name, span.begin, span.end) for span in read_places(file)]
    assert spans == [("a", start, start + 8), ("b", start + 8, start + 12)]
    assert {name: array.tolist() for name, array in map_tensors(file).items()} == {"a": [[1.5], [-2.0]], "b": [7]}


def test_map_tensors_of_dtype_unknown_to_numpy_raises(tmp_path: Path):
    header = {"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}
    with pytest.raises(ValueError, match=r"a .*BF16.* F64, "):
        map_tensors(write(tmp_path / "file", header, b"\0\0"))

"""Where tensors lie in a file, against files whose every byte is written here."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from training.contract.identity.safetensors_file import map_tensors, read_places


def written(file: Path, header: dict[str, Any], content: bytes) -> Path:
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return file


def test_tensors_are_told_in_the_order_of_their_bytes(tmp_path: Path):
    """By hand: `b` is named first and lies second, after 8 bytes of `a`."""
    header = {
        "b": {"dtype": "I32", "shape": [1], "data_offsets": [8, 12]},
        "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
    }
    content = np.array([1.5, -2.0], "<f4").tobytes() + np.array([7], "<i4").tobytes()
    file = written(tmp_path / "file", header, content)
    start = len(file.read_bytes()) - 12
    found = [(place.name, place.begin, place.end) for place in read_places(file)]
    assert found == [("a", start, start + 8), ("b", start + 8, start + 12)]
    assert {name: array.tolist() for name, array in map_tensors(file).items()} == {"a": [[1.5], [-2.0]], "b": [7]}


def test_a_dtype_that_numpy_does_not_have_is_refused(tmp_path: Path):
    header = {"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}
    with pytest.raises(ValueError, match="a is of dtype BF16, expected one of F64, "):
        map_tensors(written(tmp_path / "file", header, b"\0\0"))

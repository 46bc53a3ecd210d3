"""The bytes freed by removing a folder. tests/workflows/commands/test_gc.py tests the removal itself."""

import os
from pathlib import Path

from training.contract.store.removal import freed_bytes


def test_freed_bytes_of_hard_linked_file_is_zero(tmp_path: Path):
    """The registry links released weights."""
    (tmp_path / "policy" / "part").mkdir(parents=True)
    for name, size in (("model.safetensors", 1000), ("part/pairs.parquet", 20)):
        (tmp_path / "policy" / name).write_bytes(bytes(size))
    assert freed_bytes(tmp_path / "policy") == 1020
    os.link(tmp_path / "policy" / "model.safetensors", tmp_path / "released")
    assert freed_bytes(tmp_path / "policy") == 20
    (tmp_path / "released").unlink()
    assert freed_bytes(tmp_path / "policy") == 1020

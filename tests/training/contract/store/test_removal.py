"""What removing a folder frees; the removal itself is seen in tests/workflows/commands/test_gc.py."""

import os
from pathlib import Path

from training.contract.store.removal import freed_bytes


def test_a_file_that_has_another_name_elsewhere_frees_nothing(tmp_path: Path):
    """As released weights do, which the registry links."""
    (tmp_path / "policy" / "part").mkdir(parents=True)
    for name, size in (("model.safetensors", 1000), ("part/pairs.parquet", 20)):
        (tmp_path / "policy" / name).write_bytes(bytes(size))
    assert freed_bytes(tmp_path / "policy") == 1020
    os.link(tmp_path / "policy" / "model.safetensors", tmp_path / "released")
    assert freed_bytes(tmp_path / "policy") == 20
    (tmp_path / "released").unlink()
    assert freed_bytes(tmp_path / "policy") == 1020

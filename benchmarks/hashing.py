"""Time to identify a model: the first read, and again through the cache.

    python -m pytest benchmarks/hashing.py -s

The measure beside it is one thread of sha256 over the same bytes in memory. With as many threads as cores, and files in the
page cache, a model should take about that time divided by the number of cores.
"""

import hashlib
import os
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from training.contract.identity.hash_cache import HashCache
from training.contract.identity.model_identity import weights_identity

LAYERS, ROWS, COLUMNS = 64, 2048, 4096  # 2 GiB in float32


def seconds(work: object) -> float:
    started = time.monotonic()
    assert callable(work)
    work()
    return time.monotonic() - started


def test_two_gibibytes_of_weights(tmp_path: Path) -> None:
    tensor = np.frombuffer(np.random.default_rng(0).bytes(4 * ROWS * COLUMNS), np.float32).reshape(ROWS, COLUMNS)
    (tmp_path / "config.json").write_text("{}")
    save_file({f"layers.{number}.weight": tensor for number in range(LAYERS)}, tmp_path / "model.safetensors")
    one_thread = LAYERS * seconds(lambda: hashlib.sha256(tensor.tobytes()).digest())
    plain = seconds(lambda: weights_identity(tmp_path).fingerprint)
    cache = tmp_path / "hashes.json"
    time.sleep(2.5)
    first = seconds(lambda: weights_identity(tmp_path, HashCache(cache)))
    again = seconds(lambda: weights_identity(tmp_path, HashCache(cache)))
    size = LAYERS * tensor.nbytes
    print(  # noqa: T201
        f"\n{size / 2**30:.0f} GiB in one file, {len(os.sched_getaffinity(0))} cores: {plain:.2f} s "
        f"({size / plain / 1e6:,.0f} MB/s; one thread of sha256: {one_thread:.2f} s), filling the cache {first:.2f} s, "
        f"through the cache {again * 1000:.1f} ms"
    )
    assert again < 0.5

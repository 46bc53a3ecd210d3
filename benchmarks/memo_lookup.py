"""Time and memory for looking up ten million sequences.

    python -m pytest benchmarks/memo_lookup.py -s

Keys are random, as hashes are; half of the requested ones are known. Each measurement has its own process, and so its own
memory. Anonymous memory is what the machine must have; mapped files can be given back at any time.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from training.contract.store.logprob_cache import LogprobCache
from training.contract.store.store import Store

RULE = "a" * 64
SEQUENCES, TOKENS = 10_000_000, 4
MOST_SECONDS, MOST_MEBIBYTES = 60.0, 1024

LOOKUP = """
import json, sys, time
from pathlib import Path
import numpy as np
from training.contract.store.logprob_cache import LogprobCache
from training.contract.store.store import Store

def anonymous_mebibytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

memo, sequences, seed = LogprobCache(Store(Path(sys.argv[1])), sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
keys = np.random.default_rng(seed).integers(0, 256, (sequences, 32), dtype=np.uint8)
asked = np.concatenate([keys[: sequences // 2], 255 - keys[: sequences // 2]])[np.random.default_rng(1).permutation(sequences)]
del keys
before, seconds = anonymous_mebibytes(), [time.monotonic()]
for part in (asked[:0], asked, asked[:1]):
    found = memo.lookup(part).found_Q.sum()
    seconds.append(time.monotonic())
    if len(part) == sequences:
        assert found == sequences // 2, found
print(json.dumps({"seconds": np.diff(seconds).tolist(), "mebibytes": anonymous_mebibytes() - before}))
"""


@pytest.mark.parametrize("shards", [10, 1000])
def test_ten_million_sequences(tmp_path: Path, shards: int) -> None:
    memo, seed = LogprobCache(Store(tmp_path), RULE), 7
    keys = np.random.default_rng(seed).integers(0, 256, (SEQUENCES, 32), dtype=np.uint8)
    for part in np.split(keys, shards):
        memo.add(part, np.full(len(part), TOKENS, np.int32), np.full(len(part) * TOKENS, -1.0, np.float32))
    command = [sys.executable, "-c", LOOKUP, str(tmp_path), RULE, str(SEQUENCES), str(seed)]
    measured = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    opening, lookup, again = measured["seconds"]
    print(  # noqa: T201
        f"\n{SEQUENCES:,} sequences in {shards:,} shards: opened and hashed in {opening:.1f} s, as many looked up in "
        f"{lookup:.1f} s, one more in {again * 1000:.0f} ms; {measured['mebibytes']:.0f} MiB of memory"
    )
    assert opening + lookup < MOST_SECONDS and measured["mebibytes"] < MOST_MEBIBYTES

"""Digests of the prompts in the rows of a `raw_preferences`, to find prompts that were seen before."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from training.contract.identity.fingerprint import value_digest

PREFERENCES_FILE = "preferences.parquet"


def prompt_digest(prompt: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the digest of roles and contents alone, because these decide the split of a prompt."""
    return value_digest([[turn["role"], turn["content"]] for turn in prompt])


def prompt_digests(folder: Path, split: str | None = None) -> Iterator[bytes]:
    """Yield the digest of each row's prompt, in the order of the rows; with `split`, of its rows alone."""
    with pq.ParquetFile(folder / PREFERENCES_FILE) as file:
        for batch in file.iter_batches(columns=["prompt", "split"]):
            rows = batch if split is None else batch.filter(pc.equal(batch["split"], split))
            yield from map(prompt_digest, rows["prompt"].to_pylist())


def fresh_prompts(new: Path, seen: Sequence[Path], split: str | None = None) -> dict[int, bytes]:
    """Return the rows of `new` whose prompts are in none of the folders `seen`, with the digests of their prompts.

    With `split`, return only rows of that split.
    """
    known = frozenset[bytes]().union(*map(_all_digests, seen))
    fresh = {row: digest for row, digest in enumerate(prompt_digests(new)) if digest not in known}
    if split is None:
        return fresh
    splits = pq.read_table(new / PREFERENCES_FILE, columns=["split"])["split"].to_pylist()
    return {row: digest for row, digest in fresh.items() if splits[row] == split}


@lru_cache(maxsize=32)
def _all_digests(folder: Path) -> frozenset[bytes]:
    """Return the digests of all prompts of an artifact, which never changes. Several policies have seen the same one."""
    return frozenset(prompt_digests(folder))

"""A shard of the log-prob cache: the log-probs of some sequences under one rule, written once.

    index.safetensors     keys    uint8[S, 32]    sha256 of the token ids and mask of a sequence
                          sums    float64[S]      summed log-prob of its response tokens, in nats
                          counts  int32[S]        number of its response tokens
    tokens.safetensors    tokens  float32[N]      log-probs of the response tokens, sequence after sequence

Rows are sorted by the first 8 bytes of their keys, so a lookup of many keys reads a file from front to end.

A lookup needs the index only, 44 bytes per sequence. The tokens, about a hundred times larger, are for inspection and for
losses over single tokens. So opening a shard hashes the index, and the tokens are hashed when they are read.

Legend: S sequences, N tokens of all sequences, K bytes of a key.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import save_file

from training.contract.errors import CorruptArtifact
from training.contract.identity.fingerprint import KEY_BYTES, fingerprint_of_stream
from training.contract.store.artifact import Artifact
from training.contract.store.manifest import verify_contents
from training.contract.store.shard_cache import Keys, ShardDetails, key_prefixes, read_arrays
from training.contract.system.atomic_io import write_error

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int32]
TokenLogProbs = npt.NDArray[np.float32]

_INDEX, _TOKENS = "index.safetensors", "tokens.safetensors"


@dataclass(frozen=True)
class LogprobShard:
    """An open shard; the arrays are memory-mapped."""

    artifact: Artifact[ShardDetails]
    keys_SK: Keys
    sums_S: Floats
    counts_S: Counts

    def __len__(self) -> int:
        return len(self.counts_S)

    def token_logprobs(self, row: int) -> TokenLogProbs:
        """Return float32[count], the log-probs of the response tokens of one row. Raises CorruptArtifact."""
        begin = int(self.counts_S[:row].sum(dtype=np.int64))
        return self._tokens()[begin : begin + int(self.counts_S[row])].copy()

    def tail_sums(self, rows: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> Floats:
        """Return for each row the sum of its log-probs from token `starts[i]` on. Raises CorruptArtifact."""
        tokens_N, ends_S = self._tokens(), np.cumsum(self.counts_S, dtype=np.int64)
        begins = ends_S[rows] - self.counts_S[rows] + starts
        bounds = zip(begins.tolist(), ends_S[rows].tolist(), strict=True)
        return np.array([tokens_N[begin:end].sum(dtype=np.float64) for begin, end in bounds], dtype=np.float64)

    def _tokens(self) -> TokenLogProbs:
        verify_contents(self.artifact.folder, self.artifact.manifest, [_TOKENS])
        tokens_N: TokenLogProbs = read_arrays(self.artifact.folder / _TOKENS, {"tokens": np.float32})["tokens"]
        return tokens_N


def write_shard(folder: Path, kind: str, keys_SK: Keys, counts_S: Counts, tokens_N: TokenLogProbs) -> str:
    """Write a shard into `folder` and return its fingerprint. The sums are in float64. Raises StoreError if a write fails."""
    keys_SK, counts_S, tokens_N = _sort_by_prefix(keys_SK, counts_S, tokens_N)
    owners_N = np.repeat(np.arange(len(counts_S)), counts_S)
    sums_S = np.bincount(owners_N, weights=tokens_N.astype(np.float64), minlength=len(counts_S)).astype(np.float64)
    index: dict[str, npt.NDArray[Any]] = {
        "keys": np.ascontiguousarray(keys_SK, dtype=np.uint8),
        "sums": sums_S,
        "counts": np.ascontiguousarray(counts_S, dtype=np.int32),
    }
    tokens: dict[str, npt.NDArray[Any]] = {"tokens": np.ascontiguousarray(tokens_N, dtype=np.float32)}
    try:
        save_file(index, folder / _INDEX)
        save_file(tokens, folder / _TOKENS)
    except SafetensorError as error:
        raise write_error("write a shard", folder, error) from error
    return fingerprint_of_stream(kind, (array.tobytes() for array in (*index.values(), *tokens.values())))


def _sort_by_prefix(keys_SK: Keys, counts_S: Counts, tokens_N: TokenLogProbs) -> tuple[Keys, Counts, TokenLogProbs]:
    order_S = np.argsort(key_prefixes(keys_SK), kind="stable")
    begins_S = np.cumsum(counts_S, dtype=np.int64) - counts_S
    counts_in_order_S = counts_S[order_S]
    new_begins_S = np.cumsum(counts_in_order_S, dtype=np.int64) - counts_in_order_S
    from_N = np.arange(len(tokens_N)) + np.repeat(begins_S[order_S] - new_begins_S, counts_in_order_S)
    return keys_SK[order_S], counts_in_order_S, tokens_N[from_N]


def open_shard(artifact: Artifact[ShardDetails]) -> LogprobShard:
    """Open the shard in `artifact` and verify its index. Raises CorruptArtifact if it is corrupt or not a shard."""
    verify_contents(artifact.folder, artifact.manifest, [_INDEX])
    path = artifact.folder / _INDEX
    arrays = read_arrays(path, {"keys": np.uint8, "sums": np.float64, "counts": np.int32})
    rows = len(arrays["counts"])
    shapes = {"keys": (rows, KEY_BYTES), "sums": (rows,), "counts": (rows,)}
    if (actual := {name: array.shape for name, array in arrays.items()}) != shapes:
        raise CorruptArtifact(f"{path} has arrays of shapes {actual}, expected {shapes}", "corrupt-shard")
    return LogprobShard(artifact, keys_SK=arrays["keys"], sums_S=arrays["sums"], counts_S=arrays["counts"])

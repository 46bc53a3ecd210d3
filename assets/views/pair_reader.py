"""Reader of pairs for display: each token as text, its mask, and its log-prob under the reference.

Everything is read from the store, without torch: tokens from `tokenized_pairs`, sums from the reference log-probs, and
log-probs of single tokens from the log-prob cache.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from training.contract.config.json_object import JsonObject
from training.contract.store.artifact import Artifact
from training.contract.store.logprob_cache import LogprobCache
from training.contract.store.logprob_table import LogProbTable
from training.contract.store.store import Store

SIDES = ("chosen", "rejected")
HELD_OUT = "validation"  # the split


@dataclass(frozen=True)
class TokenizedSide:
    """A sequence of prompt and response: tokens as ids and texts, the mask of trained tokens, log-probs in nats.

    `reference_token_logprobs` has one entry per token, None for untrained ones. All entries and the sum are None if the
    reference has not scored the pair. `policy_logprob` is None unless it was computed.
    """

    token_ids: list[int]
    texts: list[str]
    mask: list[bool]
    reference_logprob: float | None
    reference_token_logprobs: list[float | None]
    policy_logprob: float | None = None


@dataclass(frozen=True)
class TokenizedRow:
    row: int
    split: str
    chosen: TokenizedSide
    rejected: TokenizedSide


class PairReader:
    """Reads pairs of one `tokenized_pairs`, with reference log-probs from `table` if given."""

    def __init__(self, store: Store, pairs: Artifact, table: Artifact | None) -> None:
        self._pairs = read_pairs(pairs)
        self._tokenizer = Tokenizer.from_file(str(pairs.file("tokenizer/tokenizer.json")))
        self._table = None if table is None else LogProbTable.read(table.folder, len(self._pairs))
        self._cache = None if self._table is None else LogprobCache(store, self._table.rule)

    def spread(self, count: int, with_held_out: bool = True) -> list[int]:
        """Return at most `count` row numbers, evenly spaced. Without held-out rows if `with_held_out` is false."""
        pairs = self._pairs if with_held_out else self._pairs.filter(pc.not_equal(self._pairs["split"], HELD_OUT))
        rows = pairs["row"]
        indices = np.linspace(0, len(rows) - 1, min(count, len(rows))).round()
        return [rows[int(index)].as_py() for index in indices]  # the column's `to_numpy` would import pandas

    def read(self, row: int) -> TokenizedRow | None:
        """Return the pair made from row `row` of `raw_preferences`; None if it was dropped."""
        index = find_row(self._pairs, row)
        if index is None:
            return None
        pair = self._pairs.slice(index, 1).to_pylist()[0]
        chosen, rejected = (self._read_side(pair, index, side) for side in SIDES)
        return TokenizedRow(row, pair["split"], chosen, rejected)

    def keys(self, row: int) -> tuple[str, str] | None:
        """Return the keys of the pair's two sequences in hexadecimal; None if it was dropped."""
        index = find_row(self._pairs, row)
        if index is None:
            return None
        return self._pairs["chosen_key"][index].as_py().hex(), self._pairs["rejected_key"][index].as_py().hex()

    def _read_side(self, pair: JsonObject, index: int, side: str) -> TokenizedSide:
        ids, mask = pair[f"{side}_ids"], pair[f"{side}_mask"]
        return TokenizedSide(
            token_ids=ids,
            texts=[self._tokenizer.decode([token], skip_special_tokens=False) for token in ids],
            mask=mask,
            reference_logprob=None if self._table is None else float(self._table.logprobs_P2[index, SIDES.index(side)]),
            reference_token_logprobs=self._token_logprobs(mask, pair[f"{side}_key"]),
        )

    def _token_logprobs(self, mask: list[bool], key: bytes) -> list[float | None]:
        """Return cached log-probs of trained tokens, None elsewhere. The first token of a sequence is never scored."""
        cached = None if self._cache is None else self._cache.token_logprobs(key)
        scored = [index for index, trained in enumerate(mask) if trained and index > 0]
        values: list[float | None] = [None] * len(mask)
        if cached is not None and len(cached) == len(scored):
            for index, value in zip(scored, cached, strict=True):
                values[index] = float(value)
        return values


def read_pairs(pairs: Artifact) -> pa.Table:
    """Return the table of `tokenized_pairs`, memory-mapped."""
    with pa.memory_map(str(pairs.file("pairs.arrow"))) as source, pa.ipc.open_stream(source) as stream:
        return stream.read_all()


def find_row(table: pa.Table, row: int) -> int | None:
    """Return the index of `row` in the column `row` of the table; None if it is missing."""
    index = pc.index(table["row"], row).as_py() if row < 2**63 else -1  # the limit of Arrow's integers
    return None if index < 0 else int(index)

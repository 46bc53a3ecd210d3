"""Pairs for people to look at: each token as text, whether it is trained, and its log-prob under the reference.

Everything is read from the store, without torch: tokens from `tokenized_pairs`, sums from the table of reference
log-probs, and the log-probs of single tokens from the memo behind that table.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from training.contract.store.logprob_cache import LogprobCache
from training.contract.store.logprob_table import LogProbTable
from training.contract.store.store import Artifact, Store

SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class TokenizedSide:
    """A sequence: tokens of prompt and response as ids and as text; `mask` says which are trained; log-probs in nats.

    `reference_token_logprobs` has one entry a token, None for those that are not trained. Where the reference has not
    scored the pair, all entries and the sum are None. `policy_logprob` is None where nobody has asked for it.
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
    """Reads pairs of one `tokenized_pairs`, with the log-probs of the `reference_logprobs` made from it, if there are any."""

    def __init__(self, store: Store, pairs: Artifact, table: Artifact | None) -> None:
        self._pairs = read_pairs(pairs)
        self._tokenizer = Tokenizer.from_file(str(pairs.file("tokenizer/tokenizer.json")))
        self._table = None if table is None else LogProbTable.read(table.folder, len(self._pairs))
        self._memo = None if self._table is None else LogprobCache(store, self._table.rule)

    def spread(self, count: int) -> list[int]:
        """At most `count` rows, evenly spaced."""
        rows = self._pairs["row"].to_numpy()
        return [int(row) for row in rows[np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(int)]]

    def read(self, row: int) -> TokenizedRow | None:
        """The pair made from row `row` of `raw_preferences`; None if it was dropped."""
        at = find_row(self._pairs, row)
        if at is None:
            return None
        pair = self._pairs.slice(at, 1).to_pylist()[0]
        chosen, rejected = (self._side(pair, at, side) for side in SIDES)
        return TokenizedRow(row, pair["split"], chosen, rejected)

    def keys(self, row: int) -> tuple[str, str] | None:
        """The identities of the pair's two token sequences, in hexadecimal; None if it was dropped."""
        at = find_row(self._pairs, row)
        if at is None:
            return None
        return self._pairs["chosen_key"][at].as_py().hex(), self._pairs["rejected_key"][at].as_py().hex()

    def _side(self, pair: dict[str, Any], at: int, side: str) -> TokenizedSide:
        ids, mask = pair[f"{side}_ids"], pair[f"{side}_mask"]
        return TokenizedSide(
            token_ids=ids,
            texts=[self._tokenizer.decode([token], skip_special_tokens=False) for token in ids],
            mask=mask,
            reference_logprob=None if self._table is None else float(self._table.logprobs_P2[at, SIDES.index(side)]),
            reference_token_logprobs=self._token_logprobs(mask, pair[f"{side}_key"]),
        )

    def _token_logprobs(self, mask: list[bool], key: bytes) -> list[float | None]:
        """The memo's values at the trained tokens, None elsewhere; the first token of a sequence is never scored."""
        known = None if self._memo is None else self._memo.token_logprobs(key)
        scored = [at for at, trained in enumerate(mask) if trained and at > 0]
        values: list[float | None] = [None] * len(mask)
        if known is not None and len(known) == len(scored):
            for at, value in zip(scored, known, strict=True):
                values[at] = float(value)
        return values


def read_pairs(pairs: Artifact) -> pa.Table:
    """The table of `tokenized_pairs`, memory-mapped."""
    with pa.memory_map(str(pairs.file("pairs.arrow"))) as source, pa.ipc.open_stream(source) as stream:
        return stream.read_all()


def find_row(table: pa.Table, row: int) -> int | None:
    """The position of `row` in a table with that column."""
    found = pc.index(table["row"], row).as_py() if row < 2**63 else -1  # Arrow's integers end there
    return None if found < 0 else int(found)

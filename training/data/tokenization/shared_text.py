"""Cut texts at special tokens, to tokenize each piece only once.

A tokenizer first cuts a text at its special tokens, and tokenizes the pieces on their own. So the tokens of a text are those of
its pieces, one after the other. The three texts of a pair begin with its prompt, and many prompts with the same system message:
without repeated pieces, half of the work is left.

Source: the order of steps in https://github.com/huggingface/tokenizers/blob/main/tokenizers/src/tokenizer/added_vocabulary.rs
"""

import json
import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from training.contract.config.json_object import JsonObject

_JOINED = 32
# These treat each piece of a text alike. Others, such as Metaspace with `prepend_scheme: first`, look at its place in the text.
_PER_PIECE = (
    *("ByteLevel", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "BertPreTokenizer"),
    *("UnicodeScripts", "FixedLength"),
)


def cutting_tokens(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the special tokens at which a text can be cut; nothing if the tokenizer looks at the place of a piece."""
    backend: Tokenizer = tokenizer.backend_tokenizer
    if tokenizer.split_special_tokens or not _works_per_piece(json.loads(backend.to_str())["pre_tokenizer"]):
        return []
    tokens = [token for token in backend.get_added_tokens_decoder().values() if not token.normalized]
    plain = [t.content for t in tokens if t.content and not (t.lstrip or t.rstrip or t.single_word)]
    contents = [token.content for token in tokens]
    return [text for text in plain if not any(_may_overlap(other, text) for other in contents)]


def _works_per_piece(step: JsonObject | None) -> bool:
    if step is None or step["type"] in _PER_PIECE:
        return True
    if step["type"] == "Sequence":
        return all(_works_per_piece(inner) for inner in step["pretokenizers"])
    return step["type"] == "Metaspace" and step.get("prepend_scheme") in ("always", "never")


def _may_overlap(other: str, token: str) -> bool:
    """Return whether an occurrence of `other` could cover a part of an occurrence of `token`, before or around it."""
    if other != token and token in other:
        return True
    return any(other.endswith(token[:length]) for length in range(1, min(len(token), len(other) + 1)))


class Splitter:
    """Splits texts before each of the `tokens`, and tokenizes the pieces. `ids` are the ids of these tokens."""

    def __init__(self, tokens: Sequence[str], ids: Sequence[int]) -> None:
        longest_first = sorted(tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if tokens else None
        self._ids = np.array(ids, np.int64)

    def pieces(self, text: str) -> list[str]:
        """Return the pieces of a text, none of them empty; the text itself without tokens."""
        if self._pattern is None:
            return [text]
        bounds = [0, *(found.start() for found in self._pattern.finditer(text)), len(text)]
        return [text[begin:end] for begin, end in pairwise(bounds) if end > begin]

    def encode(self, tokenizer: Tokenizer, pieces: Sequence[str]) -> dict[str, list[int]]:
        """Return the ids of each piece. Pieces that begin with a token are joined: fewer, longer texts take less time."""
        joinable = [piece for piece in pieces if self._pattern is not None and self._pattern.match(piece)]
        groups = [joinable[i : i + _JOINED] for i in range(0, len(joinable), _JOINED)]
        ids_of: dict[str, list[int]] = {}
        for group, encoding in zip(
            groups,
            tokenizer.encode_batch_fast(["".join(group) for group in groups], add_special_tokens=False),
            strict=True,
        ):
            ids = encoding.ids
            starts = np.flatnonzero(np.isin(np.array(ids, np.int64), self._ids)).tolist()
            if len(starts) == len(group) and starts[0] == 0:
                ids_of.update(zip(group, (ids[a:b] for a, b in pairwise([*starts, len(ids)])), strict=True))
        rest = [piece for piece in pieces if piece not in ids_of]
        encodings = tokenizer.encode_batch_fast(rest, add_special_tokens=False)
        return ids_of | dict(zip(rest, (encoding.ids for encoding in encodings), strict=True))

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
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

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


def _works_per_piece(step: dict[str, Any] | None) -> bool:
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
    """Splits texts before each of the `tokens`."""

    def __init__(self, tokens: Sequence[str]) -> None:
        longest_first = sorted(tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if tokens else None

    def pieces(self, text: str) -> list[str]:
        """Return the pieces of a text, none of them empty; the text itself without tokens."""
        if self._pattern is None:
            return [text]
        bounds = [0, *(found.start() for found in self._pattern.finditer(text)), len(text)]
        return [text[begin:end] for begin, end in pairwise(bounds) if end > begin]

"""A pair as token ids and masks, or the reason why it is dropped."""

from dataclasses import dataclass
from enum import StrEnum


class DropReason(StrEnum):
    TEMPLATE = "rejected by the template"
    LEFT_OUT = "left out by the template"
    EMPTY_PROMPT = "prompt has no tokens"
    PREFIX = "prompt is not a prefix"
    DOUBLED_END = "doubled end of turn"
    SEVERAL = "answer of several messages"
    TOO_LONG = "over max_length"
    EMPTY_MASK = "no trained token"
    SAME_TOKENS = "responses have the same tokens"


class Dropped(Exception):
    def __init__(self, reason: DropReason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class OverLength(StrEnum):
    DROP = "drop"
    TRUNCATE_PROMPT = "truncate_prompt"
    TRUNCATE_RESPONSE = "truncate_response"
    ERROR = "error"


@dataclass(frozen=True)
class ResponseTokens:
    """The tokens after the prompt, and which of them are trained."""

    ids: list[int]
    mask: list[bool]

    @property
    def trained(self) -> tuple[list[int], list[bool]]:
        """Ids and mask up to the last trained token. Later tokens change no log-prob."""
        end = len(self.mask) - self.mask[::-1].index(True) if True in self.mask else 0
        return self.ids[:end], self.mask[:end]


@dataclass(frozen=True)
class EncodedPair:
    prompt: list[int]
    chosen: ResponseTokens
    rejected: ResponseTokens

    def ids(self, response: ResponseTokens) -> list[int]:
        return self.prompt + response.ids

    def mask(self, response: ResponseTokens) -> list[bool]:
        return [False] * len(self.prompt) + response.mask

    @property
    def longest(self) -> int:
        return len(self.prompt) + max(len(self.chosen.ids), len(self.rejected.ids))


def fit(pair: EncodedPair, max_length: int, over_length: OverLength, bos: int | None) -> EncodedPair:
    """Truncate the sequences to `max_length` tokens, with the same prompt in both.

    A prompt loses tokens on the left, after the BOS; a response on the right. Raise Dropped if the truncated part would be
    empty, or if `over_length` does not allow truncation.
    """
    if pair.longest <= max_length:
        return pair
    detail = f"{pair.longest} tokens ({len(pair.prompt)} of the prompt), max_length is {max_length}"
    prompt, chosen, rejected = pair.prompt, pair.chosen, pair.rejected
    if over_length is OverLength.TRUNCATE_PROMPT:
        room = max_length - (pair.longest - len(prompt))
        kept = prompt[:1] if prompt[0] == bos else []
        if room > len(kept):
            return EncodedPair(kept + prompt[len(prompt) - room + len(kept) :], chosen, rejected)
    if over_length is OverLength.TRUNCATE_RESPONSE and (room := max_length - len(prompt)) > 0:
        return EncodedPair(prompt, _cut(chosen, room), _cut(rejected, room))
    raise Dropped(DropReason.TOO_LONG, detail)


def _cut(response: ResponseTokens, room: int) -> ResponseTokens:
    return ResponseTokens(response.ids[:room], response.mask[:room])

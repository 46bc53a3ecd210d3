"""From a pair of conversations to token ids and masks.

The prompt is rendered with the generation prompt, each whole conversation without; all three texts are tokenized without
adding special tokens, so there is one BOS if the template writes it, else none: exactly what a chat server feeds the
model. The prompt's tokens must be a prefix of both conversations' tokens. This is checked for every pair, because some
templates rewrite earlier turns. Every pair is also checked for text that the template drops (templates/template_coverage.py).
The response is everything after the prefix:

    last_response    all of its tokens are trained, with the end of turn and what the template writes after it
    assistant_turns  its tokens inside {% generation %} are trained, so it may have several messages, with results of tools

A pair that cannot be used is `Dropped`, with a reason that is counted and a detail that shows why.
"""

import bisect
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from transformers import PreTrainedTokenizerFast

from training.contract.config.fields import Role
from training.data.formats.messages import Message
from training.data.templates.chat_template import ChatTemplate, ConversationRejected, Rendered
from training.data.templates.template_coverage import TemplateCoverage
from training.data.templates.template_probe import spelled_out

Offsets = Sequence[tuple[int, int]]

_SWITCHES = ("enable_thinking", "thinking")
_DEVELOPER: Role = "developer"  # which most templates do not know, and many would write like any other word


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
        """Up to the last token that is trained; those that follow change no log-prob."""
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


@dataclass(frozen=True)
class _Tokens:
    ids: list[int]
    offsets: Offsets
    spans: Offsets


class PairEncoder:
    """Encodes pairs in batches: the template a conversation at a time, the tokenizer many texts at once."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, template: ChatTemplate, spec: Mapping[str, Any]) -> None:
        self._tokenizer, self._template, self._spec = tokenizer, template, spec
        self._by_spans = spec["train_on"] == "assistant_turns"
        self._max_length, self._over_length = spec["max_length"], OverLength(spec["over_length"])
        self._end_of_turn = {tokenizer.convert_tokens_to_ids(token): n for token, n in spec["end_of_turn"].items()}
        self._completeness = TemplateCoverage(template, self._by_spans)

    def encode(self, pairs: Sequence[Mapping[str, Any]]) -> Iterator[EncodedPair | Dropped]:
        """For each of `pairs` (rows of `raw_preferences`), in order: its tokens, or why it is dropped."""
        rendered = [self._render(pair) for pair in pairs]
        texts = [text for found in rendered if not isinstance(found, Dropped) for text in found]
        tokens = self._tokenize(texts)
        for pair, found in zip(pairs, rendered, strict=True):
            try:
                yield found if isinstance(found, Dropped) else self._assemble(pair, *itertools.islice(tokens, 3))
            except Dropped as dropped:
                yield dropped

    def remedy(self, pair: Mapping[str, Any]) -> str | None:
        """The switch of the template for reasoning with which `pair`, which is dropped, can be used; or None.

        A template that begins every answer with reasoning takes answers without any only if that is switched off, and one that
        says there is none takes answers with it only if it is switched on.
        """
        template = self._template
        value, of_rejected = (_reasons(pair[side][0]) for side in ("chosen", "rejected"))
        if value is not of_rejected:
            return None
        for name in _SWITCHES:
            if name in template.text:
                other = ChatTemplate(self._tokenizer, {**template.template_kwargs, name: value}, template.date)
                [outcome] = PairEncoder(self._tokenizer, other, self._spec).encode([pair])
                if isinstance(outcome, EncodedPair):
                    return f"{name}: {str(value).lower()}"
        return None

    def _render(self, pair: Mapping[str, Any]) -> list[Rendered] | Dropped:
        """The texts of the prompt and of both conversations."""
        try:
            self._check_roles(pair["prompt"])
            for side in ("chosen", "rejected"):
                self._check_answer(pair[side], side)
            return [self._text(pair, side) for side in (None, "chosen", "rejected")]
        except Dropped as dropped:
            return dropped

    def _check_roles(self, prompt: Sequence[Message]) -> None:
        """Raise Dropped for a message of a role that the template's text does not have."""
        if _DEVELOPER not in self._template.text and any(turn["role"] == _DEVELOPER for turn in prompt):
            raise Dropped(
                DropReason.TEMPLATE,
                f"the template does not know the role `{_DEVELOPER}`, which the prompt has; use a template that does, or map "
                f"the role on the source: `roles: {{{_DEVELOPER}: system}}`",
            )

    def _check_answer(self, turns: Sequence[Message], side: str) -> None:
        """Raise Dropped for an answer of several messages of which more would be trained than the assistant says."""
        if len(turns) == 1:
            return
        if not self._by_spans:
            detail = f"`{side}` has {len(turns)} messages, not all of the assistant; "
            raise Dropped(DropReason.SEVERAL, detail + "set `tokenization.train_on: assistant_turns`")
        said = [text for turn in turns for name, text in turn.items() if text and name != "role"]
        for ids in self._tokenizer(said, add_special_tokens=False)["input_ids"]:
            if ends := [id_ for id_ in ids if id_ in self._end_of_turn]:
                token = self._tokenizer.convert_ids_to_tokens(ends[0])
                raise Dropped(
                    DropReason.DOUBLED_END, f"a message in `{side}` holds {token!r}, which the template writes after it"
                )

    def _text(self, pair: Mapping[str, Any], side: str | None) -> Rendered:
        """Raises Dropped where the template refuses the conversation, or does not write all of it."""
        try:
            given = spelled_out(pair, side)
            rendered = self._completeness.render(given)
            fault = self._completeness.fault(given, rendered["text"])
        except ConversationRejected as error:
            raise Dropped(DropReason.TEMPLATE, str(error)) from error
        except RecursionError as error:
            raise Dropped(DropReason.TEMPLATE, "what it is given beside the messages is nested too deeply") from error
        if fault is not None:
            raise Dropped(DropReason.LEFT_OUT, f"the template {fault}")
        return rendered

    def _tokenize(self, texts: Sequence[Rendered]) -> Iterator[_Tokens]:
        if not texts:
            return
        encoded = self._tokenizer(
            [text["text"] for text in texts],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=self._by_spans,
            verbose=False,
        )
        offsets = encoded["offset_mapping"] if self._by_spans else [()] * len(texts)
        for text, ids, places in zip(texts, encoded["input_ids"], offsets, strict=True):
            yield _Tokens(ids, places, text["spans"])

    def _assemble(self, pair: Mapping[str, Any], prompt: _Tokens, *whole: _Tokens) -> EncodedPair:
        if not prompt.ids:
            raise Dropped(
                DropReason.EMPTY_PROMPT, "the template writes nothing of it, and nothing predicts a first token"
            )
        chosen, rejected = (
            self._response(prompt.ids, tokens, side, is_one=len(pair[side]) == 1)
            for tokens, side in zip(whole, ("chosen", "rejected"), strict=True)
        )
        fitting = fit(
            EncodedPair(prompt.ids, chosen, rejected), self._max_length, self._over_length, self._tokenizer.bos_token_id
        )
        for side, response in (("chosen", fitting.chosen), ("rejected", fitting.rejected)):
            if not any(response.mask):
                raise Dropped(DropReason.EMPTY_MASK, f"none of the {len(response.ids)} tokens of `{side}` is trained")
        if fitting.chosen.trained == fitting.rejected.trained:
            same = len(fitting.chosen.trained[0])
            raise Dropped(
                DropReason.SAME_TOKENS, f"chosen and rejected are the same {same} tokens as far as they are trained"
            )
        return fitting

    def _response(self, prompt: list[int], whole: _Tokens, side: str, is_one: bool) -> ResponseTokens:
        start = len(prompt)
        if whole.ids[:start] != prompt:
            raise Dropped(DropReason.PREFIX, self._difference(prompt, whole.ids, side))
        ids = whole.ids[start:]
        if is_one:
            self._check_end(ids, side)
        return ResponseTokens(ids, inside(whole.offsets[start:], whole.spans) if self._by_spans else [True] * len(ids))

    def _check_end(self, ids: list[int], side: str) -> None:
        """Raise Dropped for a second end of turn: it comes from the data, and would teach a model to go on after the first."""
        counts = Counter(id_ for id_ in ids if id_ in self._end_of_turn)
        for id_, expected in self._end_of_turn.items():
            if counts[id_] > expected:
                token = self._tokenizer.convert_ids_to_tokens(id_)
                detail = f"`{side}` holds {token!r} {counts[id_]} times, the template writes it {expected} times"
                raise Dropped(DropReason.DOUBLED_END, detail)

    def _difference(self, prompt: list[int], whole: list[int], side: str) -> str:
        """Where the prompt and the conversation part, with the tokens on both sides."""
        same = zip(prompt, whole, strict=False)
        place = next((i for i, (a, b) in enumerate(same) if a != b), min(len(prompt), len(whole)))
        alone, within = (self._shown(ids[place : place + 3]) for ids in (prompt, whole))
        return (
            f"at token {place} of {len(prompt)} the prompt with its generation prompt has {alone}, "
            f"the conversation with `{side}` has {within}"
        )

    def _shown(self, ids: list[int]) -> str:
        if not ids:
            return "nothing more"
        return " ".join(f"{id_} {self._tokenizer.convert_ids_to_tokens(id_)!r}" for id_ in ids)


def _reasons(turn: Message) -> bool:
    return bool(turn.get("reasoning_content")) or "</think>" in turn["content"]


def fit(pair: EncodedPair, max_length: int, over_length: OverLength, bos: int | None) -> EncodedPair:
    """`pair` cut to `max_length` tokens a sequence, with the same prompt for both.

    A prompt loses tokens on the left, after the BOS; a response on the right. Raises Dropped where nothing would be left of
    the part that is cut, or where nothing may be cut.
    """
    if pair.longest <= max_length:
        return pair
    found = f"{pair.longest} tokens ({len(pair.prompt)} of the prompt), max_length is {max_length}"
    prompt, chosen, rejected = pair.prompt, pair.chosen, pair.rejected
    if over_length is OverLength.TRUNCATE_PROMPT:
        room = max_length - (pair.longest - len(prompt))
        kept = prompt[:1] if prompt[0] == bos else []
        if room > len(kept):
            return EncodedPair(kept + prompt[len(prompt) - room + len(kept) :], chosen, rejected)
    if over_length is OverLength.TRUNCATE_RESPONSE and (room := max_length - len(prompt)) > 0:
        return EncodedPair(prompt, _cut(chosen, room), _cut(rejected, room))
    raise Dropped(DropReason.TOO_LONG, found)


def inside(offsets: Offsets, spans: Offsets) -> list[bool]:
    """For each token, given by its characters [start, end): whether it overlaps one of the spans."""
    begun = sorted(spans)
    starts = [start for start, _ in begun]
    reach = [0, *itertools.accumulate((end for _, end in begun), max)]  # where the first n of them end at the latest
    return [reach[bisect.bisect_left(starts, end)] > start for start, end in offsets]


def _cut(response: ResponseTokens, room: int) -> ResponseTokens:
    return ResponseTokens(response.ids[:room], response.mask[:room])

"""Convert a pair to token ids and masks.

1. Render the prompt with the generation prompt, and both conversations without it.
2. Tokenize the three texts without adding special tokens. So there is a BOS only if the template writes it, as in chat servers.
3. Check that the prompt's tokens begin both conversations. Some templates rewrite earlier turns.
4. Check each pair for text that the template drops (templates/template_coverage.py).
5. The tokens after the prompt are the response. `train_on` selects the trained ones:

    last_response    all tokens of the response, with the end of turn and the template's text after it
    assistant_turns  the tokens inside {% generation %}; the response may have several messages, with tool results

A pair that cannot be used is `Dropped`, with a counted reason and a detail.
"""

import bisect
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from training.contract.config.fields import Role
from training.contract.errors import TemplateError
from training.contract.protocol.spec_files import TokenizationSpec
from training.data.formats.messages import Message
from training.data.templates.chat_template import ChatTemplate, ConversationRejected, Rendered
from training.data.templates.template_coverage import TemplateCoverage
from training.data.templates.template_probe import Conversation, conversations_of
from training.data.tokenization.encoded_pair import Dropped, DropReason, EncodedPair, OverLength, ResponseTokens, fit
from training.data.tokenization.shared_text import Splitter, cutting_tokens

Offsets = Sequence[tuple[int, int]]

_SWITCHES = ("enable_thinking", "thinking")
_DEVELOPER: Role = "developer"  # most templates do not know it, and many would write it like any other word


@dataclass(frozen=True)
class _Tokens:
    ids: list[int]
    offsets: Offsets
    spans: Offsets


class PairEncoder:
    """Encodes pairs in batches. The template renders one conversation at a time; the tokenizer gets many texts at once."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, template: ChatTemplate, spec: TokenizationSpec) -> None:
        self._tokenizer, self._template, self._spec = tokenizer, template, spec
        self._by_spans = spec.train_on == "assistant_turns"
        self._max_length, self._over_length = spec.max_length, OverLength(spec.over_length)
        self._end_of_turn = {tokenizer.convert_tokens_to_ids(token): n for token, n in spec.end_of_turn.items()}
        self._coverage = TemplateCoverage(template, self._by_spans)
        written = _texts_of(tokenizer, template)
        tokens = [token for token in cutting_tokens(tokenizer) if token in written]
        self._splitter = Splitter(tokens, tokenizer.convert_tokens_to_ids(tokens))
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = tokenizer.split_special_tokens

    def encode(self, pairs: Sequence[Mapping[str, Any]]) -> Iterator[EncodedPair | Dropped]:
        """Yield the tokens of each pair (a row of `raw_preferences`), or the reason why it is dropped, in order."""
        renderings = [self._render(pair) for pair in pairs]
        texts = [text for rendering in renderings if not isinstance(rendering, Dropped) for text in rendering]
        tokens = self._tokenize(texts)
        for pair, rendering in zip(pairs, renderings, strict=True):
            try:
                if isinstance(rendering, Dropped):
                    yield rendering
                else:
                    yield self._assemble(pair, *itertools.islice(tokens, 3))
            except Dropped as dropped:
                yield dropped

    def remedy(self, pair: Mapping[str, Any]) -> str | None:
        """Return the template's switch for reasoning that would make the dropped `pair` usable; or None.

        A template that begins all responses with reasoning needs the switch off for responses without reasoning. A template
        that writes an empty block of reasoning needs it on for responses with reasoning.
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
        """Return the texts of the prompt and of both conversations."""
        try:
            self._check_roles(pair["prompt"])
            for side in ("chosen", "rejected"):
                self._check_response(pair[side], side)
            return [self._text(conversation) for conversation in conversations_of(pair)]
        except Dropped as dropped:
            return dropped
        except RecursionError:
            return Dropped(DropReason.TEMPLATE, "its tools or template arguments are nested too deeply")

    def _check_roles(self, prompt: Sequence[Message]) -> None:
        """Raise Dropped if the prompt has a role that the template's text lacks."""
        if _DEVELOPER not in self._template.text and any(turn["role"] == _DEVELOPER for turn in prompt):
            raise Dropped(
                DropReason.TEMPLATE,
                f"the prompt has the role `{_DEVELOPER}`, which the template does not know; use another template, or map "
                f"the role on the source: `roles: {{{_DEVELOPER}: system}}`",
            )

    def _check_response(self, turns: Sequence[Message], side: str) -> None:
        """Raise Dropped for a response of several messages if more than the assistant's text would be trained."""
        if len(turns) == 1:
            return
        if not self._by_spans:
            detail = f"`{side}` has {len(turns)} messages, not all of the assistant; "
            raise Dropped(DropReason.SEVERAL, detail + "set `tokenization.train_on: assistant_turns`")
        texts = [text for turn in turns for name, text in turn.items() if text and name != "role"]
        for ids in self._tokenizer(texts, add_special_tokens=False)["input_ids"]:
            if ends := [id_ for id_ in ids if id_ in self._end_of_turn]:
                token = self._tokenizer.convert_ids_to_tokens(ends[0])
                raise Dropped(
                    DropReason.DOUBLED_END, f"a message in `{side}` holds {token!r}, which the template writes after it"
                )

    def _text(self, conversation: Conversation) -> Rendered:
        """Return the rendered text. Raise Dropped if the template rejects the conversation or omits a part of it."""
        try:
            rendered = self._coverage.render(conversation)
            problem = self._coverage.problem(conversation, rendered["text"])
        except (ConversationRejected, TemplateError) as error:
            raise Dropped(DropReason.TEMPLATE, str(error)) from error
        if problem is not None:
            raise Dropped(DropReason.LEFT_OUT, f"the template {problem}")
        return rendered

    def _tokenize(self, texts: Sequence[Rendered]) -> Iterator[_Tokens]:
        """Yield the tokens of each text. Each distinct piece is tokenized once."""
        if not texts:
            return
        pieces_of = [self._splitter.pieces(rendered["text"]) for rendered in texts]
        pieces = list(dict.fromkeys(itertools.chain.from_iterable(pieces_of)))
        offsets_of: dict[str, Offsets] = {}
        if self._by_spans:
            encodings = self._backend.encode_batch(pieces, add_special_tokens=False)
            ids_of = {piece: encoding.ids for piece, encoding in zip(pieces, encodings, strict=True)}
            offsets_of = {piece: encoding.offsets for piece, encoding in zip(pieces, encodings, strict=True)}
        else:
            ids_of = self._splitter.encode(self._backend, pieces)
        for rendered, own in zip(texts, pieces_of, strict=True):
            ids = list(itertools.chain.from_iterable([ids_of[piece] for piece in own]))
            yield _Tokens(ids, _join_offsets(own, offsets_of) if self._by_spans else (), rendered["spans"])

    def _assemble(self, pair: Mapping[str, Any], prompt: _Tokens, *conversations: _Tokens) -> EncodedPair:
        if not prompt.ids:
            raise Dropped(
                DropReason.EMPTY_PROMPT,
                "the template writes 0 tokens of it, so the first token of the response would lack a log-prob",
            )
        chosen, rejected = (
            self._response(prompt.ids, tokens, side, is_single=len(pair[side]) == 1)
            for tokens, side in zip(conversations, ("chosen", "rejected"), strict=True)
        )
        encoded = fit(
            EncodedPair(prompt.ids, chosen, rejected), self._max_length, self._over_length, self._tokenizer.bos_token_id
        )
        for side, response in (("chosen", encoded.chosen), ("rejected", encoded.rejected)):
            if not any(response.mask):
                raise Dropped(DropReason.EMPTY_MASK, f"none of the {len(response.ids)} tokens of `{side}` is trained")
        if encoded.chosen.trained == encoded.rejected.trained:
            count = len(encoded.chosen.trained[0])
            raise Dropped(DropReason.SAME_TOKENS, f"chosen and rejected have the same {count} tokens to train on")
        return encoded

    def _response(self, prompt: list[int], conversation: _Tokens, side: str, is_single: bool) -> ResponseTokens:
        start = len(prompt)
        if conversation.ids[:start] != prompt:
            raise Dropped(DropReason.PREFIX, self._describe_difference(prompt, conversation.ids, side))
        ids = conversation.ids[start:]
        if is_single:
            self._check_end(ids, side)
        trained = inside(conversation.offsets[start:], conversation.spans) if self._by_spans else [True] * len(ids)
        return ResponseTokens(ids, trained)

    def _check_end(self, ids: list[int], side: str) -> None:
        """Raise Dropped if the data has an end of turn. It would teach the model to go on after the first one."""
        counts = Counter(id_ for id_ in ids if id_ in self._end_of_turn)
        for id_, expected in self._end_of_turn.items():
            if counts[id_] > expected:
                token = self._tokenizer.convert_ids_to_tokens(id_)
                detail = f"`{side}` holds {token!r} {counts[id_]} times, the template writes it {expected} times"
                raise Dropped(DropReason.DOUBLED_END, detail)

    def _describe_difference(self, prompt: list[int], conversation: list[int], side: str) -> str:
        """Return the first token at which prompt and conversation differ, with the tokens of both."""
        pairs = zip(prompt, conversation, strict=False)
        position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(conversation)))
        in_prompt, in_conversation = (self._show(ids[position : position + 3]) for ids in (prompt, conversation))
        return (
            f"at token {position} of {len(prompt)} the prompt with its generation prompt has {in_prompt}, "
            f"the conversation with `{side}` has {in_conversation}"
        )

    def _show(self, ids: list[int]) -> str:
        if not ids:
            return "no more tokens"
        return " ".join(f"{id_} {self._tokenizer.convert_ids_to_tokens(id_)!r}" for id_ in ids)


def _reasons(turn: Message) -> bool:
    return bool(turn.get("reasoning_content")) or "</think>" in turn["content"]


def inside(offsets: Offsets, spans: Offsets) -> list[bool]:
    """Return for each token, by its characters [start, end), whether it overlaps one of the spans."""
    ordered = sorted(spans)
    starts = [start for start, _ in ordered]
    reach = [0, *itertools.accumulate((end for _, end in ordered), max)]  # the last end among the first n spans
    return [reach[bisect.bisect_left(starts, end)] > start for start, end in offsets]


def _join_offsets(pieces: Sequence[str], offsets_of: Mapping[str, Offsets]) -> Offsets:
    """Return the offsets of all tokens in the text of the pieces."""
    begins = itertools.accumulate(map(len, pieces), initial=0)
    return [
        (start + begin, end + begin)
        for piece, begin in zip(pieces, begins, strict=False)
        for start, end in offsets_of[piece]
    ]


def _texts_of(tokenizer: PreTrainedTokenizerFast, template: ChatTemplate) -> str:
    """Return the texts in which a template may write special tokens: its own text and its variables."""
    return "\n".join([template.text, *map(str, tokenizer.special_tokens_map.values()), str(template.template_kwargs)])

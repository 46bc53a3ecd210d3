"""Explain why no format fits rows: they are not pairs, or they lack a field of the closest format."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.data.formats.quarantine import Row
from training.data.formats.ranked_responses import LABELS, LAYOUTS, SIGNED_LABELS
from training.data.formats.transcripts import is_transcript

# Names of one response, or of a conversation that ends with one, in data of other kinds, such as KTO's.
_RESPONSES = ("completion", "response", "answer", "output", "generation", "messages", "conversations")
_RESPONSE_LISTS = {f"{name}s" for name in _RESPONSES[:5]} | {"candidates", "chosen", "rejected"}
_LABEL = re.compile(r"label|kto_tag|desirable|thumb|good|accepted|feedback", re.IGNORECASE)
_RATING = re.compile(r"score|rating|reward|rank|stars|grade|quality|helpfulness|correctness", re.IGNORECASE)
# A column with such a name may hold the second response of a pair.
_PAIR_COLUMN = re.compile(r"chosen|reject|prefer|better|worse|winner|loser", re.IGNORECASE)
_YES_OR_NO = ("true", "false", "0", "1", "-1")


def kind_of(value: Any) -> str:
    """Return the kind of a field's value, for messages."""
    if value is None or isinstance(value, str):
        return "text" if value else "empty"
    return "a list" if isinstance(value, list | tuple) else type(value).__name__


def why_not_pairs(rows: Sequence[Row]) -> str:
    """Describe the rows if most of them are not pairs. Return an empty text if they may be pairs under other names."""
    [(description, count)] = Counter(map(_describe_non_pair, rows)).most_common(1)
    return description if 2 * count > len(rows) else ""


def _describe_non_pair(row: Row) -> str:
    if ranked := next((name for name in row if _holds_responses(row, name)), None):
        return f"a list of responses in `{ranked}`"
    responses = [name for name in _RESPONSES if row.get(name)]
    if len(responses) != 1 or any(_PAIR_COLUMN.search(name) for name in row):
        return ""
    if label := next((name for name in row if _LABEL.search(name) and _is_yes_or_no(row[name])), None):
        return f"one response in `{responses[0]}` and its label in `{label}`"
    if rating := next((name for name in row if _RATING.search(name) and _is_number(row[name])), None):
        return f"one response in `{responses[0]}` and its rating in `{rating}`"
    return ""


def _holds_responses(row: Row, name: str) -> bool:
    """Return whether a field is a list of responses: by its name, by as many numbers beside it, or by ratings in the items."""
    items = row[name]
    if not isinstance(items, list | tuple) or not items or not all(map(_may_be_response, items)):
        return False
    if name in _RESPONSE_LISTS or any(_are_numbers(value, len(items)) for value in row.values()):
        return True
    return all(isinstance(item, Mapping) and any(_is_rating(*field) for field in item.items()) for item in items)


def _may_be_response(item: Any) -> bool:
    """Return whether `item` is text, a list or an object, but not a message: a list of messages is one response."""
    return isinstance(item, str | list) or (isinstance(item, Mapping) and item.keys().isdisjoint(("role", "from")))


def _are_numbers(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count and all(map(_is_number, value))


def _is_rating(name: str, value: Any) -> bool:
    return _RATING.search(name) is not None and _is_number(value)


def _is_number(value: Any) -> bool:
    """Return whether `value` is a number, or the text of one, as in CSV."""
    if isinstance(value, str):
        return re.fullmatch(r"\s*[-+]?\d+(\.\d+)?\s*", value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_yes_or_no(value: Any) -> bool:
    """Return whether `value` is a boolean, or 0, 1 or -1. Numbers from tables with gaps end with `.0`."""
    return str(value).strip().lower().removesuffix(".0") in _YES_OR_NO


@dataclass(frozen=True)
class _Need:
    """A field that a format needs: its possible names, the kind of its value, and a test of that kind."""

    names: tuple[str, ...]
    kind: str
    fits: Callable[[Any], bool]

    def is_met(self, row: Row) -> bool:
        return any(row.get(name) is not None and self.fits(row[name]) for name in self.names)

    def name_in(self, row: Row) -> str | None:
        """Return the name under which a row has the field."""
        return next((name for name in self.names if row.get(name) is not None), None)


def _text(*names: str) -> _Need:
    return _Need(names, "text", lambda value: isinstance(value, str))


def _messages(*names: str) -> _Need:
    return _Need(names, "messages", lambda value: isinstance(value, list | tuple | dict))


def _either(*names: str) -> _Need:
    return _Need(names, "text or messages", lambda value: isinstance(value, str | list | tuple | dict))


_ASKED, _SIDES = _either("prompt", "question"), ("chosen", "rejected")
_LABELLED = _Need((*LABELS, *SIGNED_LABELS, "annotator1"), "a label", lambda value: not isinstance(value, list | dict))
# If formats are equally close, the first is named.
_NEEDS: list[tuple[str, list[_Need]]] = [
    ("strings", [_ASKED, *map(_text, _SIDES)]),
    ("conversational", [_either("prompt"), *map(_messages, _SIDES)]),
    ("alpaca", [_text("instruction"), *map(_text, _SIDES)]),
    ("implicit_prompt", [*map(_messages, _SIDES)]),
    ("messages", [_messages("messages"), *map(_either, _SIDES)]),
    ("ms_swift", [_messages("messages"), _either("rejected_response", "rejected_messages")]),
    ("sharegpt", [_messages("conversations"), *map(_messages, _SIDES)]),
    ("openai", [_messages("input"), _messages("preferred_output"), _messages("non_preferred_output")]),
    ("hh", [_Need((side,), "a transcript", is_transcript) for side in _SIDES]),
    *(
        (
            "comparison",
            [_either("prompt", "question", "instruction"), _either(layout.first), _either(layout.second), _LABELLED],
        )
        for layout in LAYOUTS
    ),
]


@dataclass(frozen=True)
class ClosestFormat:
    """The format that rows come closest to, the first field that they lack, and a description of all such fields."""

    format: str
    lack: str
    description: str


def closest_format(rows: Sequence[Row]) -> ClosestFormat | None:
    """Return the format with the fewest fields that most of `rows` lack; None if they have no field of any format."""
    candidates = [(name, needs, [need for need in needs if not _is_met(need, rows)]) for name, needs in _NEEDS]
    near = [(name, needs, unmet) for name, needs, unmet in candidates if 0 < len(unmet) < len(needs)]
    if not near:
        return None
    name, _, unmet = min(near, key=lambda candidate: (len(candidate[2]), -len(candidate[1])))
    return ClosestFormat(name, unmet[0].names[0], ", and ".join(_describe_lack(need, rows[0]) for need in unmet))


def _is_met(need: _Need, rows: Sequence[Row]) -> bool:
    return 2 * sum(map(need.is_met, rows)) > len(rows)


def _describe_lack(need: _Need, row: Row) -> str:
    if (name := need.name_in(row)) is None or need.is_met(row):
        return f"lack {' or '.join(f'`{name}`' for name in need.names)}"
    return f"have {kind_of(row[name])} in `{name}`, expected {need.kind}"

"""Why no format fits rows: they are not pairs, or they lack a field of the closest format."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.data.formats.quarantine import Row
from training.data.formats.ranked_responses import LABELS, LAYOUTS, SIGNED_LABELS
from training.data.formats.transcripts import is_transcript

# The names that one answer, or a conversation that ends with one, has in data of other kinds.
_ANSWERS = ("completion", "response", "answer", "output", "generation", "messages", "conversations")
_LISTS_OF_ANSWERS = {f"{name}s" for name in _ANSWERS[:5]} | {"candidates", "chosen", "rejected"}
_LABEL = re.compile(r"label|kto_tag|desirable|thumb|good|accepted|feedback", re.IGNORECASE)
_RATING = re.compile(r"score|rating|reward|rank|stars|grade|quality|helpfulness|correctness", re.IGNORECASE)
# A column with such a name may hold the second answer of a pair.
_OF_A_PAIR = re.compile(r"chosen|reject|prefer|better|worse|winner|loser", re.IGNORECASE)
_YES_OR_NO = ("true", "false", "0", "1", "-1")


def kind_of(value: Any) -> str:
    """Return the kind of a field's value, as a person calls it."""
    if value is None or isinstance(value, str):
        return "text" if value else "empty"
    return "a list" if isinstance(value, list | tuple) else type(value).__name__


def why_not_pairs(rows: Sequence[Row]) -> str:
    """Describe the rows if most of them are not pairs; return the empty string if they may be pairs under other names."""
    [(why, count)] = Counter(map(_why_not_a_pair, rows)).most_common(1)
    return why if 2 * count > len(rows) else ""


def _why_not_a_pair(row: Row) -> str:
    if ranked := next((name for name in row if _holds_answers(row, name)), None):
        return f"a list of answers, in `{ranked}`"
    answers = [name for name in _ANSWERS if row.get(name)]
    if len(answers) != 1 or any(_OF_A_PAIR.search(name) for name in row):
        return ""
    if label := next((name for name in row if _LABEL.search(name) and _is_yes_or_no(row[name])), None):
        return f"one answer, in `{answers[0]}`, and a label that says whether it is good, in `{label}`"
    if rating := next((name for name in row if _RATING.search(name) and _is_number(row[name])), None):
        return f"one answer, in `{answers[0]}`, and a rating of it, in `{rating}`"
    return ""


def _holds_answers(row: Row, name: str) -> bool:
    """Whether a field is a list of answers, by its name, or since as many numbers are beside it, or a rating in each."""
    items = row[name]
    if not isinstance(items, list | tuple) or not items or not all(map(_may_be_an_answer, items)):
        return False
    if name in _LISTS_OF_ANSWERS or any(_are_numbers(value, len(items)) for value in row.values()):
        return True
    return all(isinstance(item, Mapping) and any(_is_rating(*field) for field in item.items()) for item in items)


def _may_be_an_answer(item: Any) -> bool:
    """Whether `item` is text, a list or an object, but not a message: a list of messages is one answer."""
    return isinstance(item, str | list) or (isinstance(item, Mapping) and item.keys().isdisjoint(("role", "from")))


def _are_numbers(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count and all(map(_is_number, value))


def _is_rating(name: str, value: Any) -> bool:
    return _RATING.search(name) is not None and _is_number(value)


def _is_number(value: Any) -> bool:
    """Whether `value` is a number, or text that is one, as in CSV."""
    if isinstance(value, str):
        return re.fullmatch(r"\s*[-+]?\d+(\.\d+)?\s*", value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_yes_or_no(value: Any) -> bool:
    """Whether `value` is a boolean or the number of one; a number has `.0` if it comes from a table with gaps."""
    return str(value).strip().lower().removesuffix(".0") in _YES_OR_NO


@dataclass(frozen=True)
class _Need:
    """A field that a format needs: the names it may have, the kind of its value in words, and a test of that kind."""

    names: tuple[str, ...]
    kind: str
    fits: Callable[[Any], bool]

    def is_met(self, row: Row) -> bool:
        return any(row.get(name) is not None and self.fits(row[name]) for name in self.names)

    def found(self, row: Row) -> str | None:
        """The name under which a row has the field."""
        return next((name for name in self.names if row.get(name) is not None), None)


def _text(*names: str) -> _Need:
    return _Need(names, "text", lambda value: isinstance(value, str))


def _messages(*names: str) -> _Need:
    return _Need(names, "messages", lambda value: isinstance(value, list | tuple | dict))


def _either(*names: str) -> _Need:
    return _Need(names, "text or messages", lambda value: isinstance(value, str | list | tuple | dict))


_ASKED, _SIDES = _either("prompt", "question"), ("chosen", "rejected")
_LABELLED = _Need((*LABELS, *SIGNED_LABELS, "annotator1"), "a label", lambda value: not isinstance(value, list | dict))
# Of formats that are equally close, the first is named.
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
            [_either("prompt", "question", "instruction"), _either(each.first), _either(each.second), _LABELLED],
        )
        for each in LAYOUTS
    ),
]


@dataclass(frozen=True)
class ClosestFormat:
    """The format that rows come closest to, the name of the first field that they lack, and a clause about all such fields."""

    format: str
    lack: str
    words: str


def closest_format(rows: Sequence[Row]) -> ClosestFormat | None:
    """Return the format of which most of `rows` lack the fewest fields; None if they have none of any format."""
    unmet = [(name, needs, [need for need in needs if not _is_met(need, rows)]) for name, needs in _NEEDS]
    near = [each for each in unmet if 0 < len(each[2]) < len(each[1])]
    if not near:
        return None
    name, _, lacking = min(near, key=lambda each: (len(each[2]), -len(each[1])))
    return ClosestFormat(name, lacking[0].names[0], ", and ".join(_lack(need, rows[0]) for need in lacking))


def _is_met(need: _Need, rows: Sequence[Row]) -> bool:
    return 2 * sum(map(need.is_met, rows)) > len(rows)


def _lack(need: _Need, row: Row) -> str:
    if (name := need.found(row)) is None or need.is_met(row):
        return f"lack {' or '.join(f'`{name}`' for name in need.names)}"
    return f"have {kind_of(row[name])} in `{name}`, expected {need.kind}"

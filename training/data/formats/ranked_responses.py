"""Comparisons: two responses side by side and labels that say which is better.

    response1,  response2    annotator1.. | label | winner | preference | preferred: 1, 2 or 0 (tie), or a name
    response_1, response_2   the same
    response_a, response_b   a, b or tie
    response_0, response_1   better_response_id | label | winner ...: 0 or 1
    conversation_a, conversation_b   the same as response_a and response_b, with the prompt in both

In `overall_preference` and `preference_strength`, of HelpSteer 3 and 2 (Wang et al. 2025, 2024), a number below 0 is for the
first response, 0 a tie, and one above for the second.

Responses are text or messages. The answer named by more than half of the labels wins. A tie, or no majority, gives no pair:
training on it would be training on noise.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.contract.errors import DataError
from training.data.formats.quarantine import Quarantined, QuarantineReason, Row

_ANNOTATOR = re.compile(r"annotator_?\d+")
LABELS = ("label", "winner", "preference", "preferred", "better_response_id")
SIGNED_LABELS = ("overall_preference", "preference_strength")
_TIES = dict.fromkeys(("tie", "tie (bothbad)", "both", "both_bad", "none", "-1"), 0)
_BY_NAME = {"a": 1, "b": 2, "model_a": 1, "model_b": 2, **_TIES}


@dataclass(frozen=True)
class ResponseFields:
    """The fields of two responses, and what each spelling of a label means: 1 first, 2 second, 0 tie."""

    first: str
    second: str
    verdicts: Mapping[str, int]


def _layout(first: str, second: str, numbers: Mapping[str, int]) -> ResponseFields:
    return ResponseFields(first, second, {**_BY_NAME, first: 1, second: 2, **numbers})


_COUNTED_FROM_1 = {"1": 1, "2": 2, "0": 0}
LAYOUTS = (
    _layout("response1", "response2", _COUNTED_FROM_1),
    _layout("response_0", "response_1", {"0": 1, "1": 2}),
    _layout("response_1", "response_2", _COUNTED_FROM_1),
    _layout("response_a", "response_b", _COUNTED_FROM_1),
    _layout("conversation_a", "conversation_b", _COUNTED_FROM_1),
)


RESPONSES = {name for layout in LAYOUTS for name in (layout.first, layout.second)}
_TELLING_LABELS = 16  # where a tenth are ties, and the others 1 or 2 as often, so many lack a 2 once in 14,000 times


def response_layout(row: Row) -> ResponseFields | None:
    """The layout whose two responses the row has."""
    has = {name for name, value in row.items() if value is not None}
    return next((layout for layout in LAYOUTS if layout.first in has and layout.second in has), None)


def names_a_verdict(value: Any, layout: ResponseFields) -> bool:
    """Whether `value` is no answer, but says which of the two responses is one."""
    return _spelled(value) in layout.verdicts


def check_labels_from_1(rows: Sequence[Row], place: str) -> None:
    """Raises DataError where responses are counted from 1 and their labels are 0 and 1 alone: 0 is hardly a tie then."""
    counted = [row for row in rows if (layout := response_layout(row)) and layout.verdicts["0"] == 0]
    labels = [_spelled(row[name]) for row in counted for name in row if _is_label(name) and name not in SIGNED_LABELS]
    numbers = [label for label in labels if label.isdecimal()]
    if set(numbers) == {"0", "1"} and len(numbers) >= _TELLING_LABELS:
        raise DataError(
            f"{place}: the labels of the first rows are 0 and 1 and never 2, but responses of these names are counted from 1, "
            "and 0 is a tie. Say in `columns` of the source which response 0 and 1 are, as in `columns: {response_0: "
            "response_a, response_1: response_b}`, or write ties as `tie`"
        )


def winner_first(row: Row) -> tuple[str, str]:
    """The names of the fields with the better and with the worse response."""
    layout = response_layout(row)
    if layout is None:
        expected = " or ".join(f"`{layout.first}` and `{layout.second}`" for layout in LAYOUTS)
        raise Quarantined(QuarantineReason.MISSING_FIELD, f"two responses are missing, expected {expected}")
    return (layout.first, layout.second) if _verdict(row, layout) == 1 else (layout.second, layout.first)


def _verdict(row: Row, layout: ResponseFields) -> int:
    """1 or 2, whichever response more than half of the labels name."""
    labels = {name: row[name] for name in row if _is_label(name) and row[name] is not None}
    if not labels:
        raise Quarantined(
            QuarantineReason.MISSING_FIELD,
            f"there is no label: none of annotator1.., {', '.join(LABELS + SIGNED_LABELS)}",
        )
    votes = Counter(_vote(name, value, layout) for name, value in labels.items())
    verdict, count = votes.most_common(1)[0]
    if verdict == 0 or count * 2 <= len(labels):
        shown = ", ".join(f"{name}={value}" for name, value in labels.items())
        raise Quarantined(QuarantineReason.TIE, f"no response has more than half of the labels: {shown}")
    return verdict


def _vote(name: str, value: Any, layout: ResponseFields) -> int:
    if name in SIGNED_LABELS:
        return _sign(name, value)
    spelled = _spelled(value)
    if spelled not in layout.verdicts:
        expected = ", ".join(layout.verdicts)
        raise Quarantined(
            QuarantineReason.UNKNOWN_LABEL, f"`{name}` is {str(value)[:40]!r}, expected one of {expected}"
        )
    return layout.verdicts[spelled]


def _spelled(value: Any) -> str:
    """A label as text, a number without `.0`, which it has from a table with gaps."""
    return str(value).strip().lower().removesuffix(".0")


def _sign(name: str, value: Any) -> int:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or math.isnan(number):
        raise Quarantined(
            QuarantineReason.UNKNOWN_LABEL, f"`{name}` is {str(value)[:40]!r}, expected a number such as -2 or 3"
        )
    return 0 if number == 0 else 1 if number < 0 else 2


def _is_label(name: str) -> bool:
    return name in LABELS + SIGNED_LABELS or _ANNOTATOR.fullmatch(name) is not None

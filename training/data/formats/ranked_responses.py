"""Choose the better of two responses by their labels.

    response1,  response2    annotator1.. | label | winner | preference | preferred: 1, 2 or 0 (tie), or a name
    response_1, response_2   the same
    response_a, response_b   a, b or tie
    response_0, response_1   better_response_id | label | winner ...: 0 or 1
    conversation_a, conversation_b   the same as response_a and response_b, with the prompt in both

`overall_preference` of HelpSteer3 (Wang et al. 2025) and `preference_strength` of HelpSteer2 (Wang et al. 2024) are numbers:
below 0 for the first response, 0 for a tie, above 0 for the second.

Responses are text or messages. More than half of the labels must name the better response. Else the row gives no pair, since
a tie is noise to training.
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
    """The fields of two responses, and the verdict of each label: 1 first, 2 second, 0 tie."""

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
# With a tenth of ties, and 1 and 2 equally often, this many labels lack a 2 with a probability of 1 in 14,000.
_FEWEST_CHECKED_LABELS = 16


def response_layout(row: Row) -> ResponseFields | None:
    """Return the layout whose two responses the row has."""
    present = {name for name, value in row.items() if value is not None}
    return next((layout for layout in LAYOUTS if layout.first in present and layout.second in present), None)


def names_a_verdict(value: Any, layout: ResponseFields) -> bool:
    """Return whether `value` is a label for one of the two responses instead of a response."""
    return _normalize(value) in layout.verdicts


def check_labels_from_1(rows: Sequence[Row], file: str) -> None:
    """Raise DataError if the labels are only 0 and 1, but responses are numbered from 1: then 0 is hardly a tie."""
    numbered = [row for row in rows if (layout := response_layout(row)) and layout.verdicts["0"] == 0]
    labels = [
        _normalize(row[name]) for row in numbered for name in row if _is_label(name) and name not in SIGNED_LABELS
    ]
    numbers = [label for label in labels if label.isdecimal()]
    if set(numbers) == {"0", "1"} and len(numbers) >= _FEWEST_CHECKED_LABELS:
        raise DataError(
            f"{file}: the labels of the first rows are 0 and 1, never 2; these columns expect 1 and 2, and 0 for a tie. "
            "If 0 is the first response, rename the responses in `columns` of the source, as in `columns: "
            "{response_0: response_a, response_1: response_b}`. If 0 is a tie, write it as `tie`",
            "labels-from-0",
        )


def winner_first(row: Row) -> tuple[str, str]:
    """Return the fields of the better and the worse response. Raise Quarantined for a tie or a wrong label."""
    layout = response_layout(row)
    if layout is None:
        expected = " or ".join(f"`{layout.first}` and `{layout.second}`" for layout in LAYOUTS)
        raise Quarantined(QuarantineReason.MISSING_FIELD, f"the responses are missing, expected {expected}")
    return (layout.first, layout.second) if _verdict(row, layout) == 1 else (layout.second, layout.first)


def _verdict(row: Row, layout: ResponseFields) -> int:
    """Return 1 or 2, the response that more than half of the labels name."""
    labels = {name: row[name] for name in row if _is_label(name) and row[name] is not None}
    if not labels:
        raise Quarantined(
            QuarantineReason.MISSING_FIELD,
            f"the label is missing, expected one of annotator1.., {', '.join(LABELS + SIGNED_LABELS)}",
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
    label = _normalize(value)
    if label not in layout.verdicts:
        expected = ", ".join(layout.verdicts)
        raise Quarantined(
            QuarantineReason.UNKNOWN_LABEL, f"`{name}` is {str(value)[:40]!r}, expected one of {expected}"
        )
    return layout.verdicts[label]


def _normalize(value: Any) -> str:
    """Return a label in lower case. Remove `.0` from numbers, which tables with gaps add."""
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

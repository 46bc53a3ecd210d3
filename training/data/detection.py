"""Which format rows are in, where a recipe does not say: that which fits the fields of most of the first rows."""

import re
from collections.abc import Sequence
from typing import Any

from training.contract.errors import DataError
from training.data.comparison import RESPONSES
from training.data.file_faults import check_rows_outside
from training.data.formats import FORMATS
from training.data.quarantine import Row

# The fields that are what somebody said.
_SPOKEN = RESPONSES | {"prompt", "question", "conversations", "chosen", "rejected"}
_SPOKEN |= {"preferred_output", "non_preferred_output"}
# How a list of messages, or of texts, begins where a file that has no lists holds it as JSON or as Python writes it.
_LIST = re.compile(r"""\s*\[\s*(\{\s*['"](role|from|content|value)['"]\s*:|".*"\s*\]\s*$)""", re.DOTALL)


def detect(rows: Sequence[Row], place: str) -> str:
    """The first of the formats that fits more than half of `rows`; else that which fits most of them, one at least.

    They are listed with those first that ask for more: where one row lacks what tells its format, a later one may fit all rows.

    Raises DataError, naming what was considered, if none fits any, and where most of the rows hold lists as text.
    """
    _refuse_lists_as_text(rows, place)
    votes = {name: sum(map(form.fits, rows)) for name, form in FORMATS.items()}
    common = (name for name, count in votes.items() if 2 * count > len(rows))
    best = next(common, max(votes, key=lambda name: votes[name]))
    if votes[best]:
        return best
    if len(rows) == 1:
        check_rows_outside(place, rows[0])
    considered = "; ".join(f"{name} ({form.fields})" for name, form in FORMATS.items())
    found = ", ".join(f"{name} ({_kind(value)})" for name, value in rows[0].items())
    raise DataError(
        f"{place}: none of the preference formats fits the first rows, whose fields are: {found}. Considered: {considered}. "
        "A row needs a prompt and two answers: say which columns hold them in `columns` of the source, as in "
        "`columns: {prompt: my_question}`"
    )


def _refuse_lists_as_text(rows: Sequence[Row], place: str) -> None:
    for name in rows[0]:
        found = [text for row in rows if isinstance(text := row.get(name), str) and _LIST.match(text)]
        if name in _SPOKEN and len(found) * 2 > len(rows):
            raise DataError(
                f"{place}: `{name}` holds lists written as text, such as {found[0][:60]!r}; save the data as JSON lines or "
                "Parquet, which have lists, or name the `format` of the source if this is what was said"
            )


def _kind(value: Any) -> str:
    if value is None or isinstance(value, str):
        return "text" if value else "empty"
    return "a list" if isinstance(value, list | tuple) else type(value).__name__

"""Detect the format of rows: the format that fits the fields of most of the first rows."""

import re
from collections.abc import Collection, Sequence

from training.contract.errors import DataError
from training.data.formats.format_mismatch import closest_format, kind_of, why_not_pairs
from training.data.formats.formats import FORMATS
from training.data.formats.quarantine import Row
from training.data.formats.ranked_responses import RESPONSES
from training.data.reading.file_errors import check_rows_outside

# The fields of prompts and responses.
_TURN_FIELDS = RESPONSES | {"prompt", "question", "conversations", "chosen", "rejected"}
_TURN_FIELDS |= {"preferred_output", "non_preferred_output"}
# Most formats ignore these fields, so a list as text in them is an error only if no format fits.
_MESSAGES_FIELDS = ("messages", "rejected_messages")
# The start of a list of messages or texts that was written as JSON or as Python's repr, into a file without lists (CSV).
_LIST = re.compile(r"""\s*\[\s*(\{\s*['"](role|from|content|value)['"]\s*:|".*"\s*\]\s*$)""", re.DOTALL)


def detect(rows: Sequence[Row], file: str) -> str:
    """Return the first format that fits more than half of `rows`, else the format that fits most of them.

    Formats that need more fields come first. A row that lacks the distinctive field of its format may fit a later format.

    Raises DataError if no format fits any row, or if most rows hold lists as text. The message explains why rows are not
    pairs, or it names the closest format and the fields that they lack.
    """
    _check_no_lists_as_text(rows, file, _TURN_FIELDS)
    votes = {name: sum(map(form.fits, rows)) for name, form in FORMATS.items()}
    common = (name for name, count in votes.items() if 2 * count > len(rows))
    best = next(common, max(votes, key=lambda name: votes[name]))
    if votes[best]:
        return best
    _check_no_lists_as_text(rows, file, _MESSAGES_FIELDS)
    if len(rows) == 1:
        check_rows_outside(file, rows[0])
    raise _no_format_error(rows, file)


def _no_format_error(rows: Sequence[Row], file: str) -> DataError:
    if description := why_not_pairs(rows):
        return DataError(
            f"{file}: these rows are not pairs: each has {description}. Make pairs of a better and a worse response to the "
            "same prompt, and write each pair as one row with `prompt`, `chosen` and `rejected`",
            "not-pairs",
        )
    closest = closest_format(rows)
    if closest is None:
        start, example = "the first rows fit no preference format", "prompt: my_question"
    else:
        start = f"the first rows fit no preference format; they are closest to `{closest.format}`, but {closest.description}"
        example = f"{closest.lack}: my_column"
    fields = ", ".join(f"{name} ({kind_of(value)})" for name, value in rows[0].items())
    formats = "; ".join(f"{name} ({format_.fields})" for name, format_ in FORMATS.items())
    return DataError(
        f"{file}: {start}. Their fields are: {fields}. The formats are: {formats}. A row needs a prompt and two responses: "
        f"map them to their columns in `columns` of the source, as in `columns: {{{example}}}`",
        "unknown-format",
    )


def _check_no_lists_as_text(rows: Sequence[Row], file: str, names: Collection[str]) -> None:
    for name in rows[0]:
        lists = [text for row in rows if isinstance(text := row.get(name), str) and _LIST.match(text)]
        if name in names and len(lists) * 2 > len(rows):
            raise DataError(
                f"{file}: `{name}` holds lists written as text, such as {lists[0][:60]!r}; save the data as JSON lines or "
                "Parquet, which have lists, or set the `format` of the source if these texts are meant as they are",
                "list-as-text",
            )

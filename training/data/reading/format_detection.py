"""Which format rows are in, where a recipe does not say: that which fits the fields of most of the first rows."""

import re
from collections.abc import Collection, Sequence

from training.contract.errors import DataError
from training.data.formats.format_mismatch import closest_format, kind_of, why_not_pairs
from training.data.formats.formats import FORMATS
from training.data.formats.quarantine import Row
from training.data.formats.ranked_responses import RESPONSES
from training.data.reading.file_errors import check_rows_outside

# The fields that are what somebody said.
_SPOKEN = RESPONSES | {"prompt", "question", "conversations", "chosen", "rejected"}
_SPOKEN |= {"preferred_output", "non_preferred_output"}
# Most formats ignore these fields, so a list as text in them is an error only if no format fits.
_MESSAGES = ("messages", "rejected_messages")
# How a list of messages, or of texts, begins where a file that has no lists holds it as JSON or as Python writes it.
_LIST = re.compile(r"""\s*\[\s*(\{\s*['"](role|from|content|value)['"]\s*:|".*"\s*\]\s*$)""", re.DOTALL)


def detect(rows: Sequence[Row], place: str) -> str:
    """The first of the formats that fits more than half of `rows`; else that which fits most of them, one at least.

    The formats that ask for more fields come first. If a row lacks the field that tells its format, a later format may fit it.

    Raises DataError if no format fits any row, or if most rows hold lists as text. The message says that rows are not pairs,
    or it names the closest format and the fields that they lack.
    """
    _check_no_lists_as_text(rows, place, _SPOKEN)
    votes = {name: sum(map(form.fits, rows)) for name, form in FORMATS.items()}
    common = (name for name, count in votes.items() if 2 * count > len(rows))
    best = next(common, max(votes, key=lambda name: votes[name]))
    if votes[best]:
        return best
    _check_no_lists_as_text(rows, place, _MESSAGES)
    if len(rows) == 1:
        check_rows_outside(place, rows[0])
    raise DataError(f"{place}: {_why_none_fits(rows)}")


def _why_none_fits(rows: Sequence[Row]) -> str:
    if found := why_not_pairs(rows):
        return (
            f"these rows are not pairs, since each has {found}: make pairs of a better and a worse answer to the same prompt, "
            "and write each pair as one row of `prompt`, `chosen` and `rejected`"
        )
    none_fits, closest = "none of the preference formats fits", closest_format(rows)
    if closest is None:
        start, example = f"{none_fits} the first rows", "prompt: my_question"
    else:
        start = f"the first rows are closest to `{closest.format}`, but {closest.words}; {none_fits} them"
        example = f"{closest.lack}: my_column"
    fields = ", ".join(f"{name} ({kind_of(value)})" for name, value in rows[0].items())
    considered = "; ".join(f"{name} ({form.fields})" for name, form in FORMATS.items())
    return (
        f"{start}. Their fields are: {fields}. Considered: {considered}. A row needs a prompt and two answers: say which "
        f"columns hold them in `columns` of the source, as in `columns: {{{example}}}`"
    )


def _check_no_lists_as_text(rows: Sequence[Row], place: str, names: Collection[str]) -> None:
    for name in rows[0]:
        found = [text for row in rows if isinstance(text := row.get(name), str) and _LIST.match(text)]
        if name in names and len(found) * 2 > len(rows):
            raise DataError(
                f"{place}: `{name}` holds lists written as text, such as {found[0][:60]!r}; save the data as JSON lines or "
                "Parquet, which have lists, or name the `format` of the source if this is what was said"
            )

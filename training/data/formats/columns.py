"""The names that a source has for fields and roles, as its recipe maps them to ours.

`data.sources[].columns` maps fields to the columns that hold them. `data.sources[].roles` maps the roles of its messages to
ours.
"""

from collections.abc import Mapping
from typing import Any

from training.contract.errors import DataError
from training.data.formats.messages import with_roles
from training.data.formats.quarantine import Row


class ColumnMapping:
    """Gives fields and roles the names that formats know.

    Remembers which columns were there, and which fields a format asked for.
    """

    def __init__(self, source: int, columns: Mapping[str, str | None], roles: Mapping[str, str] | None = None) -> None:
        self._place = f"`data.sources.{source}.columns`"
        self._column_of = {field: column for field, column in columns.items() if column is not None}
        self._roles = roles or {}
        self._replaced = {*columns, *self._column_of.values()}
        self._unseen = set(self._column_of.values())
        self._first: list[str] = []
        self._asked: set[str] = set()

    def renamed(self, row: Row) -> Row:
        """Return `row` with our names for fields and roles, without the fields that are in no column."""
        named = self._with_fields(row) if self._replaced else row
        return with_roles(named, self._roles) if self._roles else named

    def _with_fields(self, row: Row) -> Row:
        self._first = self._first or list(row)
        self._unseen -= row.keys()
        others = {name: value for name, value in row.items() if name not in self._replaced}
        return others | {field: row[column] for field, column in self._column_of.items() if column in row}

    def watched(self, row: Row) -> Row:
        """`row` renamed, for the format that reads it."""
        renamed = self.renamed(row)
        return _FieldAccessRecorder(renamed, self._asked) if self._replaced else renamed

    def check_columns_seen(self, rows: str) -> None:
        """Raises DataError for a column that no row had so far; `rows` says which rows these are."""
        for field, column in self._column_of.items():
            if column in self._unseen and self._first:
                raise DataError(
                    f"{self._place} says that `{field}` is in the column {column!r}, and none of {rows} has one; the columns "
                    f"of the first are {', '.join(map(repr, self._first))}"
                )

    def check_columns_read(self) -> None:
        """Raises DataError for a column whose field no row was asked for, since the format reads others."""
        for field, column in self._column_of.items():
            if field not in self._asked:
                raise DataError(
                    f"{self._place} says that `{field}` is in the column {column!r}, but the rows were read without it, from "
                    f"{', '.join(sorted(self._asked))}: set what stands in its way to null, as in `instruction: null`, or name "
                    "the `format` of the source"
                )


class _FieldAccessRecorder(dict[str, Any]):
    """A row that notes which of its fields are asked for by name."""

    def __init__(self, row: Row, asked: set[str]) -> None:
        super().__init__(row)
        self._asked = asked

    def __getitem__(self, name: str) -> Any:
        self._asked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        if name in self:
            self._asked.add(name)
        return super().get(name, default)

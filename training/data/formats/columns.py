"""Map the columns and roles of a source to the fields and roles that the formats know.

`data.sources[].columns` maps fields to the columns that hold them. `data.sources[].roles` maps the roles of messages.
"""

from collections.abc import Mapping
from typing import Any

from training.contract.errors import DataError
from training.data.formats.messages import with_roles
from training.data.formats.quarantine import Row


class ColumnMapping:
    """Renames the columns and roles of rows. It records the columns that rows have, and the fields that a format reads."""

    def __init__(self, source: int, columns: Mapping[str, str | None], roles: Mapping[str, str] | None = None) -> None:
        self._setting = f"`data.sources.{source}.columns`"
        self._column_of = {field: column for field, column in columns.items() if column is not None}
        self._roles = roles or {}
        self._replaced = {*columns, *self._column_of.values()}
        self._unseen = set(self._column_of.values())
        self._first_columns: list[str] = []
        self._read: set[str] = set()

    @property
    def is_checked(self) -> bool:
        """Whether rows had all mapped columns, and a format read all mapped fields. Further rows change no check."""
        return not self._unseen and self._column_of.keys() <= self._read

    @property
    def roles(self) -> Mapping[str, str]:
        return self._roles

    @property
    def names(self) -> dict[str, str | None]:
        """The column of each mapped field; None for fields that are hidden."""
        return {name: self._column_of.get(name) for name in sorted(self._replaced)}

    def renamed(self, row: Row) -> Row:
        """Return `row` with mapped fields and roles, without the fields that are mapped to null."""
        mapped = self._map_fields(row) if self._replaced else row
        return with_roles(mapped, self._roles) if self._roles else mapped

    def _map_fields(self, row: Row) -> Row:
        self._first_columns = self._first_columns or list(row)
        self._unseen -= row.keys()
        unmapped = {name: value for name, value in row.items() if name not in self._replaced}
        return unmapped | {field: row[column] for field, column in self._column_of.items() if column in row}

    def watched(self, row: Row) -> Row:
        """Return `row` renamed, as a mapping that records the fields that a format reads."""
        renamed = self.renamed(row)
        return _FieldAccessRecorder(renamed, self._read) if self._replaced else renamed

    def check_columns_seen(self, rows: str) -> None:
        """Raise DataError if no row so far has a mapped column. `rows` names the rows in the message."""
        for field, column in self._column_of.items():
            if column in self._unseen and self._first_columns:
                raise DataError(
                    f"{self._setting} maps `{field}` to the column {column!r}, but {rows} lack it; the columns of the first "
                    f"row are {', '.join(map(repr, self._first_columns))}",
                    "unknown-column",
                )

    def check_columns_read(self) -> None:
        """Raise DataError if the format read no mapped field, because other fields came first."""
        for field, column in self._column_of.items():
            if field not in self._read:
                raise DataError(
                    f"{self._setting} maps `{field}` to the column {column!r}, but the format reads only "
                    f"{', '.join(sorted(self._read))}: set the field that it reads instead to null, as in "
                    "`instruction: null`, or set the `format` of the source",
                    "unread-column",
                )


class _FieldAccessRecorder(dict[str, Any]):
    """A row that records the fields that are read by name."""

    def __init__(self, row: Row, read: set[str]) -> None:
        super().__init__(row)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        if name in self:
            self._read.add(name)
        return super().get(name, default)

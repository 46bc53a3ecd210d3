"""The columns of a source, where a recipe says that they stand for fields of other names (`data.sources[].columns`)."""

from collections.abc import Mapping

from training.contract.errors import DataError
from training.data.quarantine import Row


class Columns:
    """Gives rows the names that formats know, and remembers which of the columns it has seen."""

    def __init__(self, source: int, columns: Mapping[str, str | None]) -> None:
        self._source, self._columns = source, columns
        self._unseen = {column for column in columns.values() if column is not None}
        self._known_otherwise = self._unseen | columns.keys()

    def named(self, row: Row) -> Row:
        """`row`, in which each field is what its column holds; without fields that are in no column."""
        if not self._columns:
            return row
        self._unseen -= row.keys()
        others = {name: value for name, value in row.items() if name not in self._known_otherwise}
        found = {field: row[column] for field, column in self._columns.items() if column is not None and column in row}
        return others | found

    def refuse_unseen(self) -> None:
        """Raises DataError for a column that no row had so far."""
        for field, column in self._columns.items():
            if column in self._unseen:
                raise DataError(
                    f"`data.sources.{self._source}.columns` says that `{field}` is in the column `{column}`, and none of the "
                    "source's rows has one; correct its name"
                )

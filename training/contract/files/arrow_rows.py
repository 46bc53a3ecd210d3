"""Restore the original rows of Parquet and Arrow tables.

There every struct of a column has the fields of all structs, and every row has all columns: a missing field becomes null. A
map becomes a list of pairs.
"""

from typing import Any


def without_nulls(value: Any) -> Any:
    """Return a row, or a part of one, without null fields and with maps as objects."""
    if isinstance(value, list) and value and all(isinstance(part, tuple) for part in value):
        value = dict(value)
    if isinstance(value, dict):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value

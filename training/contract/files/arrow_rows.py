"""Rows of tables as the rows that they were made from.

In Parquet and Arrow every struct of a column has the fields of all of them, and every row all columns: what one of them did
not have is null in it. A map comes as a list of pairs.
"""

from typing import Any


def without_nulls(value: Any) -> Any:
    """`value`, a row or a part of one, without the fields that are null in it, and with maps as objects."""
    if isinstance(value, list) and value and all(isinstance(part, tuple) for part in value):
        value = dict(value)
    if isinstance(value, dict):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value

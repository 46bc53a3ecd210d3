"""The columns of an asset's table, for Dagster's UI: read from the file itself, with a description of each."""

from collections.abc import Mapping
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

COLUMN_SCHEMA = "dagster/column_schema"  # Dagster's own name for it

_TOKENS = {
    "ids": "Token ids of prompt and response.",
    "mask": "Whether each token is trained.",
    "key": "Hash of the ids and the mask. Equal sequences are scored once.",
}
_DESCRIPTIONS = {
    "row": "Number of the pair in `raw_preferences`.",
    "split": "`train` or `validation` (held out).",
    "prompt": "Messages before the response.",
    "chosen": "Messages of the preferred response.",
    "rejected": "Messages of the other response.",
    "tools": "Tools of the conversation, as JSON.",
    "chat_template_kwargs": "Arguments of the chat template for this pair, as JSON.",
    "source": "File of the pair.",
    "line": "Its line or record in the file, from 1.",
    "source_name": "Name of the source in the recipe.",
    "identity": "Hash of the pair's content.",
    "prompt_length": "Number of tokens of the prompt.",
    **{f"{side}_{name}": text for side in ("chosen", "rejected") for name, text in _TOKENS.items()},
}


def parquet_columns(file: Path) -> dict[str, dg.TableSchema]:
    """Return the metadata with the columns of a Parquet file."""
    return {COLUMN_SCHEMA: _table_schema(pq.read_schema(file))}


def arrow_columns(file: Path) -> dict[str, dg.TableSchema]:
    """Return the metadata with the columns of an Arrow stream."""
    with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
        return {COLUMN_SCHEMA: _table_schema(stream.schema)}


def _table_schema(schema: pa.Schema, descriptions: Mapping[str, str] = _DESCRIPTIONS) -> dg.TableSchema:
    return dg.TableSchema(
        [dg.TableColumn(field.name, str(field.type), descriptions.get(field.name)) for field in schema]
    )

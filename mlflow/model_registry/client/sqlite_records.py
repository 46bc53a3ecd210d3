"""MLflow's records in a SQLite file, read without MLflow: its import takes twice as much CPU time as Dagster's.

Only reads of a known schema happen here. MLflow's client reads and makes everything else: a missing or damaged file, tables
of another version of MLflow, workspaces. So an upgrade of MLflow costs time until its schema is known here, nothing else.
"""

import contextlib
import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, NullPool, create_engine, make_url
from sqlalchemy.exc import SQLAlchemyError

from model_registry.client.records import RecordedRun
from model_registry.model_version import Version

SCHEMAS = frozenset({"dc11669786a5"})  # the revisions of MLflow's tables whose columns are as below
_SQLITE = "sqlite:///"
_WAIT = "PRAGMA busy_timeout = 20000"  # MLflow's
_WORKSPACES_VARIABLE = "MLFLOW_ENABLE_WORKSPACES"
_RUN = "SELECT experiment_id, status FROM runs WHERE run_uuid = ?"
_RUN_TAGS = "SELECT key, value FROM tags WHERE run_uuid = ?"
_RUNS = """
SELECT runs.run_uuid FROM runs
JOIN experiments ON experiments.experiment_id = runs.experiment_id
JOIN tags ON tags.run_uuid = runs.run_uuid
WHERE experiments.workspace = 'default' AND experiments.name = ? AND tags.key = ? AND tags.value = ?
AND runs.lifecycle_stage = 'active'
ORDER BY runs.start_time, runs.run_uuid
"""
# MLflow's registry has prompts too, marked by a tag.
_VERSIONS = """
SELECT versions.name, versions.version, versions.source, tags.key, tags.value FROM model_versions AS versions
LEFT JOIN model_version_tags AS tags USING (workspace, name, version)
WHERE versions.workspace = 'default' AND versions.current_stage != 'Deleted_Internal'
"""
_NO_PROMPTS = """
AND NOT EXISTS (
    SELECT 1 FROM model_version_tags AS prompt WHERE prompt.workspace = versions.workspace
    AND prompt.name = versions.name AND prompt.key = 'mlflow.prompt.is_prompt' AND prompt.value = 'true'
)
"""
_LATEST_FIRST = " ORDER BY versions.version DESC, versions.name"
_MODEL = """
SELECT 1 FROM registered_models AS models WHERE workspace = 'default' AND name = ? AND NOT EXISTS (
    SELECT 1 FROM registered_model_tags AS prompt WHERE prompt.workspace = models.workspace
    AND prompt.name = models.name AND prompt.key = 'mlflow.prompt.is_prompt' AND prompt.value = 'true'
)
"""
_ALIASES = "SELECT alias, version FROM registered_model_aliases WHERE workspace = 'default' AND name = ? ORDER BY alias"
_MODEL_TAGS = "SELECT key, value FROM registered_model_tags WHERE workspace = 'default' AND name = ?"

Row = tuple[Any, ...]


class SqliteRecords:
    """The records in an open database."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, run_id: str) -> RecordedRun:
        found = self._rows(_RUN, run_id)
        if not found:
            raise LookupError(f"Run with id={run_id} not found")
        experiment, status = found[0]
        return RecordedRun(run_id, str(experiment), status, dict(self._rows(_RUN_TAGS, run_id)))

    def runs(self, experiment: str, tag: str, value: str) -> list[RecordedRun]:
        return [self.run(run_id) for (run_id,) in self._rows(_RUNS, experiment, tag, value)]

    def version(self, name: str, number: str) -> Version:
        query = f"{_VERSIONS} AND versions.name = ? AND versions.version = ?"
        if found := _versions_in(self._rows(query, name, int(number))):
            return found[0]
        raise LookupError(f"Model Version (name={name}, version={number}) not found")

    def versions(self, name: str | None) -> list[Version]:
        if name is None:
            return _versions_in(self._rows(f"{_VERSIONS} {_NO_PROMPTS} {_LATEST_FIRST}"))
        return _versions_in(self._rows(f"{_VERSIONS} AND versions.name = ? {_NO_PROMPTS} {_LATEST_FIRST}", name))

    def aliases(self, name: str) -> dict[str, str] | None:
        if not self._rows(_MODEL, name):
            return None
        return {alias: str(number) for alias, number in self._rows(_ALIASES, name)}

    def model_tags(self, name: str) -> dict[str, str]:
        return dict(self._rows(_MODEL_TAGS, name))

    def _rows(self, query: str, *values: str | int) -> list[Row]:
        return [tuple(row) for row in self._connection.exec_driver_sql(query, values)]


@contextlib.contextmanager
def sqlite_records(uri: str) -> Iterator[SqliteRecords | None]:
    """Yield the records at the address `uri`, or None if they must be read by MLflow's client."""
    with contextlib.ExitStack() as stack:
        connection = _connected(uri, stack)
        yield None if connection is None else SqliteRecords(connection)


def sqlite_file(uri: str) -> Path | None:
    """Return the file of a SQLite database, else None. The address may end in options such as `?timeout=60`."""
    return Path(make_url(uri).database or "") if uri.startswith(_SQLITE) else None


def _connected(uri: str, stack: contextlib.ExitStack) -> Connection | None:
    """Return a connection to a database whose schema is known, else None. `stack` closes it."""
    if (file := sqlite_file(uri)) is None or os.environ.get(_WORKSPACES_VARIABLE):
        return None
    try:
        if not file.is_file():  # it would be made
            return None
        connection = stack.enter_context(create_engine(uri, poolclass=NullPool).connect())
        connection.exec_driver_sql(_WAIT)
        revisions = {revision for (revision,) in connection.exec_driver_sql("SELECT version_num FROM alembic_version")}
    except (SQLAlchemyError, OSError):
        return None
    return connection if revisions and revisions <= SCHEMAS else None


def _versions_in(rows: list[Row]) -> list[Version]:
    """Return the versions in rows of name, number, source and one tag each, with the rows of a version side by side."""
    return [
        Version(name, number, source, {tag: value for *_, tag, value in group if tag is not None})
        for (name, number, source), group in groupby(rows, key=lambda row: row[:3])
    ]

"""Ids of the Dagster instances that recorded runs in a home. Garbage collection must use the same instance.

With another DAGSTER_HOME or other tables, all artifacts recorded elsewhere would count as garbage. So each run notes the id of
Dagster's run storage in the home. The id moves with the tables.
"""

from pathlib import Path

import dagster as dg
from dagster._core.storage.runs import SqlRunStorage

from training.contract.errors import StoreError
from training.contract.system.atomic_io import write_durably


def note_records(instance: dg.DagsterInstance, home: Path) -> None:
    """Note the id of `instance` in `home`."""
    if (storage_id := _storage_id(instance)) is not None and not (note := _notes_folder(home) / storage_id).exists():
        write_durably(note, f"{instance.root_directory}\n".encode())


def check_same_instance(instance: dg.DagsterInstance, home: Path) -> None:
    """Raise StoreError if runs in `home` were recorded by another Dagster instance."""
    storage_id = _storage_id(instance)
    for note in sorted(_notes_folder(home).glob("[!.]*")):
        if note.name != storage_id:
            raise StoreError(
                f"runs in {home} were recorded by Dagster in {note.read_text().strip()}, not only in "
                f"{instance.root_directory}, so nothing is removed: set DAGSTER_HOME to the former if it has all runs, or "
                f"remove {note} if its runs no longer count",
                "several-instances",
            )


def _storage_id(instance: dg.DagsterInstance) -> str | None:
    storage = instance.run_storage
    return storage.get_run_storage_id() if isinstance(storage, SqlRunStorage) else None


def _notes_folder(home: Path) -> Path:
    return home / "records"

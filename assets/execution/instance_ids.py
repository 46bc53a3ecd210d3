"""Which Dagster recorded what is in a home: whoever removes what is not current asks the same one.

With another DAGSTER_HOME, or other tables, everything that was not made under that would be garbage. So each run notes the id
that Dagster gives its tables of runs, which moves with them.
"""

from pathlib import Path

import dagster as dg
from dagster._core.storage.runs import SqlRunStorage

from training.contract.errors import StoreError
from training.contract.system.atomic_io import write_durably


def note_records(instance: dg.DagsterInstance, home: Path) -> None:
    """Note that runs in `home` are recorded by `instance`."""
    if (own := _identity(instance)) is not None and not (note := _notes(home) / own).exists():
        write_durably(note, f"{instance.root_directory}\n".encode())


def check_same_instance(instance: dg.DagsterInstance, home: Path) -> None:
    """Raises StoreError where runs in `home` were recorded by another Dagster than `instance`."""
    own = _identity(instance)
    for note in sorted(_notes(home).glob("[!.]*")):
        if note.name != own:
            raise StoreError(
                f"what is current in {home} is not known to Dagster in {instance.root_directory} alone: runs were recorded in "
                f"{note.read_text().strip()} too; set DAGSTER_HOME to that if all of them were, or remove {note} if those "
                "records no longer count. As long as both count, nothing is removed"
            )


def _identity(instance: dg.DagsterInstance) -> str | None:
    storage = instance.run_storage
    return storage.get_run_storage_id() if isinstance(storage, SqlRunStorage) else None


def _notes(home: Path) -> Path:
    return home / "records"

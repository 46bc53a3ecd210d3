"""The store: immutable artifacts, stored by their contents (fingerprint) and found by how they are made (key).

    store/<kind>/<fingerprint>/...        the files of an artifact and its manifest.json
    store/keys/<kind>/<key>.json          the derivation of that key, the fingerprint it gave, and details of that way;
                                          one key leaves out which versions of libraries made it
    store/locks/<kind>-<key>.lock         held by the process that is making that key
    store/locks/<kind>-<fingerprint>.lock held while contents are published, or removed
    store/staging/<name>/, <name>.lock    an artifact that is being written; its process holds the lock as long as it lives
    store/corrupt/<kind>/...              artifacts that were set aside

A derivation (code version, inputs, settings) has a key; making it gives an artifact whose fingerprint identifies its
contents. So two derivations with the same outcome, say a template before and after a comment was added to it, share one
artifact, and nothing downstream changes.

Publishing is: write in staging, fsync every file and folder, write the manifest last, rename into place, fsync the
parent, then record the key. A reader that finds the key finds everything. A process that is killed meanwhile leaves a
staging folder whose lock nobody holds; the next process that stages something removes it.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import Field

from training.contract.errors import CorruptArtifact, CorruptRecord, StoreError
from training.contract.identity.fingerprint import short
from training.contract.identity.hash_cache import HashCache
from training.contract.store.checksummed_json import ChecksummedModel
from training.contract.store.manifest import (
    MANIFEST,
    Derivation,
    Manifest,
    list_files,
    read_manifest,
    verified_manifest,
)
from training.contract.store.staging import claimed
from training.contract.system.atomic_io import (
    apply_umask,
    is_disk_full,
    new_folder,
    sync_folder,
    sync_tree,
    write_durably,
    write_error,
)
from training.contract.system.locks import locked


@dataclass(frozen=True)
class Artifact:
    """`derivation` and `details` are those of the key it was found by; other keys may have led to the same contents."""

    folder: Path
    manifest: Manifest
    derivation: Derivation
    details: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    def file(self, name: str) -> Path:
        assert name in self.manifest.files, f"{name} is not a file of {self.folder}"
        return self.folder / name

    def json(self, name: str) -> Any:
        return json.loads(self.file(name).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class JobResult:
    """What a job returns about the files it left in its staging folder: their fingerprint, and small facts about them.

    `is_known`: it left none, since these contents were published before.
    """

    fingerprint: str
    details: dict[str, Any] = field(default_factory=dict)
    is_known: bool = False


def write_json(file: Path, content: Any) -> None:
    """Write a file of an artifact, which people read as well; `Artifact.json` gives its content."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


class DerivationRecord(ChecksummedModel):
    """What `keys/<kind>/<key>.json` holds: one way an artifact was made."""

    fingerprint: str = Field(pattern="^[0-9a-f]{64}$")
    derivation: Derivation
    details: dict[str, Any]


class Store:
    def __init__(self, root: Path):
        self.root = Path(root)

    def folder(self, kind: str, fingerprint: str) -> Path:
        return self.root / kind / fingerprint

    @property
    def locks(self) -> Path:
        return self.root / "locks"

    def lock_file(self, kind: str, key: str) -> Path:
        return self.locks / f"{kind.replace('/', '-')}-{key}.lock"

    def record_file(self, kind: str, key: str) -> Path:
        return self.root / "keys" / kind / f"{key}.json"

    def fingerprints(self, kind: str) -> list[str]:
        """Every artifact that was published under `kind`, in order of fingerprint."""
        folder = self.root / kind
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def open(self, kind: str, fingerprint: str, hashes: bool = True, cache: HashCache | None = None) -> Artifact:
        """The artifact, verified. Raises StoreError if there is none, CorruptArtifact if it is not what was published.

        To look at many artifacts, give a `cache`: files unchanged since they were hashed are not read again.
        """
        folder = self.folder(kind, fingerprint)
        if not (folder / MANIFEST).is_file():
            raise StoreError(f"there is no {kind} {short(fingerprint)} in {self.root}; materialize it again")
        manifest = verified_manifest(folder, kind, fingerprint, hashes, cache)
        return Artifact(folder, manifest, manifest.made_from, manifest.details)

    def find(self, kind: str, key: str, hashes: bool = True, cache: HashCache | None = None) -> Artifact | None:
        """What the derivation `key` gave, verified; None if it was never made. Raises CorruptArtifact."""
        record = self.record(kind, key)
        if record is None or not (self.folder(kind, record.fingerprint) / MANIFEST).is_file():
            return None
        artifact = self.open(kind, record.fingerprint, hashes, cache)
        return replace(artifact, derivation=record.derivation, details=record.details)

    def reuse(self, kind: str, key: str) -> Artifact | None:
        """`find` for whoever goes on from what is found, and holds the lock of `key`; `used` is then this moment."""
        if (found := self.find(kind, key)) is not None:
            self._mark_used(kind, found.fingerprint)
        return found

    def used(self, kind: str, fingerprint: str) -> int | None:
        """When the artifact was last published or found for use, in nanoseconds; None where there is none."""
        try:
            return self.folder(kind, fingerprint).stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def record(self, kind: str, key: str) -> DerivationRecord | None:
        """What was recorded when `key` was made, even if the artifact is gone. Raises CorruptRecord."""
        path = self.record_file(kind, key)
        try:
            record = DerivationRecord.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise CorruptRecord(
                f"{path} is not the record of a derivation ({error}); a run of its recipe mends it"
            ) from error
        if record.derivation.key != key:
            raise CorruptRecord(
                f"{path} is the record of {short(record.derivation.key)}, not of its name; a run of its recipe mends it"
            )
        return record

    def derivation(self, kind: str, key: str) -> Derivation | None:
        """How the artifact of `key` was made; None if it never was. Raises CorruptRecord."""
        record = self.record(kind, key)
        return None if record is None else record.derivation

    def set_aside(self, kind: str, fingerprint: str) -> Path:
        """Move a corrupt artifact out of the way, kept for inspection; returns its new path."""
        place = new_folder(self.root / "corrupt" / kind, f"{short(fingerprint)}-")
        os.rename(self.folder(kind, fingerprint), place / fingerprint)
        return place / fingerprint

    def repair_record(self, kind: str, key: str) -> Path:
        """Replace the corrupt record of `key` by what the manifest of its artifact says; returns where the corrupt one is now.

        Afterwards there is no record if no manifest names `key`: a manifest names only the first way its contents were made.
        """
        place = new_folder(self.root / "corrupt" / kind, f"{short(key)}-") / f"{key}.json"
        shutil.copyfile(self.record_file(kind, key), place)
        made_so = [manifest for manifest in self._manifests(kind) if manifest.made_from.key == key]
        if made_so:
            known = max(made_so, key=lambda manifest: manifest.created)
            self._write_record(known.made_from, JobResult(known.fingerprint, known.details))
        else:
            self.record_file(kind, key).unlink()
        return place

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """An empty folder on the store's filesystem, removed at the end unless it was published.

        What dead processes left is removed first. Raises StoreError if the disk refuses to hold more.
        """
        with contextlib.ExitStack() as held:
            with self._refused("stage anything"):
                folder = held.enter_context(claimed(self.root / "staging"))
            try:
                yield folder
            except OSError as error:
                if is_disk_full(str(error)):
                    raise write_error("write an artifact", self.root, error) from error
                raise

    @contextlib.contextmanager
    def lock(self, kind: str, key: str) -> Iterator[BinaryIO]:
        """Hold the lock of `key`, after waiting for its holder. A process that inherits the open file holds it too."""
        with contextlib.ExitStack() as held:
            with self._refused(f"lock {kind}"):
                file = held.enter_context(locked(self.lock_file(kind, key)))
            yield file

    def publish(self, staging: Path, derivation: Derivation, made: JobResult) -> Artifact:
        """Make what `staging` holds the artifact of `derivation`.

        If the same contents were published before and are whole, they stay and only the key is recorded. Raises
        StoreError with the path and the free bytes if the disk refuses it; what was there is untouched.
        """
        kind = derivation.kind
        with self._refused(f"publish {kind}"), self.lock(kind, made.fingerprint):
            if not self._has_intact(kind, made.fingerprint):
                if made.is_known:
                    raise StoreError(f"{kind} {short(made.fingerprint)} was lost while it was compared; run again")
                manifest = Manifest.of_now(derivation, made.fingerprint, list_files(staging), made.details)
                apply_umask(staging)
                sync_tree(staging)
                write_durably(staging / MANIFEST, manifest.dumps())
                _move_in(staging, self.folder(kind, made.fingerprint))
            self._write_record(derivation, made)
            found = self.open(kind, made.fingerprint, hashes=False)
        return replace(found, derivation=derivation, details=made.details)

    def adopt(self, staging: Path, kind: str, fingerprint: str) -> Artifact:
        """Make an artifact that another store published, manifest and all, one of this store's; no key leads to it.

        Raises CorruptArtifact if it is another one or broken, StoreError if the disk refuses it.
        """
        verified_manifest(staging, kind, fingerprint)
        with self._refused(f"adopt {kind}"):
            apply_umask(staging)
            sync_tree(staging)
            _move_in(staging, self.folder(kind, fingerprint))
        return self.open(kind, fingerprint, hashes=False)

    @contextlib.contextmanager
    def _refused(self, doing: str) -> Iterator[None]:
        """Turn an OSError into a StoreError with the path and the free bytes."""
        try:
            yield
        except OSError as error:
            raise write_error(doing, self.root, error) from error

    def _has_intact(self, kind: str, fingerprint: str) -> bool:
        """Whether these contents are there and whole; broken ones are set aside, to be replaced."""
        if not os.path.lexists(self.folder(kind, fingerprint)):
            return False
        try:
            self.open(kind, fingerprint)
        except StoreError:
            with contextlib.suppress(FileNotFoundError):  # another publisher was first
                self.set_aside(kind, fingerprint)
            return False
        self._mark_used(kind, fingerprint)
        return True

    def _mark_used(self, kind: str, fingerprint: str) -> None:
        # Refused for a folder of another user, from a backup say, and who may not touch it may not remove it either.
        with contextlib.suppress(PermissionError):
            os.utime(self.folder(kind, fingerprint))

    def _write_record(self, derivation: Derivation, made: JobResult) -> None:
        """Record what `derivation` gave, also as the latest that these inputs and settings gave under any software."""
        for how in {found.key: found for found in (derivation, derivation.of_any_software)}.values():
            record = DerivationRecord(fingerprint=made.fingerprint, derivation=how, details=made.details)
            with self.staging() as scratch:
                write_durably(self.record_file(how.kind, how.key), record.dumps(), scratch)

    def _manifests(self, kind: str) -> Iterator[Manifest]:
        """Every manifest of `kind` that can be read."""
        for fingerprint in self.fingerprints(kind):
            with contextlib.suppress(CorruptArtifact):
                yield read_manifest(self.folder(kind, fingerprint))


def _move_in(staging: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.rename(staging, target)
    except OSError:
        if not target.is_dir():  # else another process has put the same contents there meanwhile
            raise
    sync_folder(target.parent)

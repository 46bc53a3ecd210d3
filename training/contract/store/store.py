"""The store: immutable artifacts, named by their contents (fingerprint) and found by their derivation (key).

    store/<kind>/<fingerprint>/...        the files of an artifact and its manifest.json
    store/keys/<kind>/<key>.json          a derivation, its fingerprint and its details; each derivation has a second key,
                                          without the versions of libraries
    store/locks/<kind>-<key>.lock         held while a process makes the artifact of this key
    store/locks/<kind>-<fingerprint>.lock held while contents are published or removed
    store/staging/<name>/, <name>.lock    an artifact in the making; its process holds the lock as long as it lives
    store/corrupt/<kind>/...              artifacts that were set aside

Two derivations may give the same contents, for example before and after a comment is added to a template. They share one
artifact, and nothing downstream changes.

To publish: write in staging, fsync every file and folder, write the manifest last, rename into place, fsync the parent, then
record the key. A reader that finds the key finds everything. A killed process leaves a staging folder with a free lock. The
next process with a staging folder removes it.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, overload

from training.contract.config.json_object import JsonObject
from training.contract.errors import CorruptArtifact, CorruptRecord, StoreError
from training.contract.identity.fingerprint import short
from training.contract.identity.hash_cache import HashCache
from training.contract.store.artifact import Artifact, DerivationRecord, JobResult, as_kind
from training.contract.store.artifact_kind import ArtifactKind, DetailsT
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
        """Return the fingerprints of all artifacts of `kind`, sorted."""
        folder = self.root / kind
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    @overload
    def open(
        self, kind: ArtifactKind[DetailsT], fingerprint: str, hashes: bool = True, cache: HashCache | None = None
    ) -> Artifact[DetailsT]: ...
    @overload
    def open(self, kind: str, fingerprint: str, hashes: bool = True, cache: HashCache | None = None) -> Artifact: ...
    def open(
        self, kind: ArtifactKind | str, fingerprint: str, hashes: bool = True, cache: HashCache | None = None
    ) -> Artifact:
        """Return the artifact, verified. Raises StoreError if it is missing, CorruptArtifact if it is corrupt.

        With a `cache`, unchanged files are not read again. An artifact opened by the name of its kind has no typed details.
        """
        kind = as_kind(kind)
        folder = self.folder(kind.name, fingerprint)
        if not (folder / MANIFEST).is_file():
            raise StoreError(
                f"there is no {kind.name} {short(fingerprint)} in {self.root}; materialize it again", "no-artifact"
            )
        manifest = verified_manifest(folder, kind.name, fingerprint, hashes, cache)
        return Artifact(kind, folder, manifest, manifest.made_from, manifest.details)

    @overload
    def find(
        self, kind: ArtifactKind[DetailsT], key: str, hashes: bool = True, cache: HashCache | None = None
    ) -> Artifact[DetailsT] | None: ...
    @overload
    def find(self, kind: str, key: str, hashes: bool = True, cache: HashCache | None = None) -> Artifact | None: ...
    def find(
        self, kind: ArtifactKind | str, key: str, hashes: bool = True, cache: HashCache | None = None
    ) -> Artifact | None:
        """Return the artifact of `key`, verified; None if it was never made. Raises CorruptArtifact."""
        kind = as_kind(kind)
        record = self.record(kind.name, key)
        if record is None or not (self.folder(kind.name, record.fingerprint) / MANIFEST).is_file():
            return None
        artifact = self.open(kind, record.fingerprint, hashes, cache)
        return replace(artifact, derivation=record.derivation, stored_details=record.details)

    def reuse(self, kind: ArtifactKind[DetailsT], key: str) -> Artifact[DetailsT] | None:
        """Find the artifact and mark it as used. The caller holds the lock of `key`."""
        if (artifact := self.find(kind, key)) is not None:
            self._mark_used(kind.name, artifact.fingerprint)
        return artifact

    def used(self, kind: str, fingerprint: str) -> int | None:
        """Return the time of the artifact's last publication or use, in nanoseconds; None if it is missing."""
        try:
            return self.folder(kind, fingerprint).stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def record(self, kind: str, key: str) -> DerivationRecord | None:
        """Return the record of `key`, even if the artifact is missing. Raises CorruptRecord."""
        path = self.record_file(kind, key)
        try:
            record = DerivationRecord.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise CorruptRecord(
                f"{path} is not the record of a derivation ({error}); run its recipe to repair it"
            ) from error
        if record.derivation.key != key:
            raise CorruptRecord(
                f"{path} is the record of {short(record.derivation.key)}, expected {short(key)}; run its recipe to repair it"
            )
        return record

    def derivation(self, kind: str, key: str) -> Derivation | None:
        """Return the derivation with this `key`; None if its record is missing. Raises CorruptRecord."""
        record = self.record(kind, key)
        return None if record is None else record.derivation

    def set_aside(self, kind: str, fingerprint: str) -> Path:
        """Move a corrupt artifact to `corrupt/`, for inspection. Return its new path."""
        target = new_folder(self.root / "corrupt" / kind, f"{short(fingerprint)}-") / fingerprint
        os.rename(self.folder(kind, fingerprint), target)
        return target

    def repair_record(self, kind: str, key: str) -> Path:
        """Write the corrupt record of `key` again, from the latest manifest with this key. Return the corrupt copy's path.

        If no manifest has this key, remove the record: a manifest holds only the first derivation of its contents.
        """
        corrupt = new_folder(self.root / "corrupt" / kind, f"{short(key)}-") / f"{key}.json"
        shutil.copyfile(self.record_file(kind, key), corrupt)
        manifests = [manifest for manifest in self._manifests(kind) if manifest.made_from.key == key]
        if manifests:
            latest = max(manifests, key=lambda manifest: manifest.created)
            self._write_record(latest.made_from, latest.fingerprint, latest.details)
        else:
            self.record_file(kind, key).unlink()
        return corrupt

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield an empty folder on the store's filesystem; remove it at the end unless it was published.

        Folders of dead processes are removed first. Raises StoreError if the disk is full.
        """
        with contextlib.ExitStack() as stack:
            with self._explain_os_error("stage anything"):
                folder = stack.enter_context(claimed(self.root / "staging"))
            try:
                yield folder
            except OSError as error:
                if is_disk_full(str(error)):
                    raise write_error("write an artifact", self.root, error) from error
                raise

    @contextlib.contextmanager
    def lock(self, kind: str, key: str) -> Iterator[BinaryIO]:
        """Wait for the lock of `key`, then hold it. A process that inherits the open file holds it too."""
        with contextlib.ExitStack() as stack:
            with self._explain_os_error(f"lock {kind}"):
                file = stack.enter_context(locked(self.lock_file(kind, key)))
            yield file

    def publish(self, staging: Path, derivation: Derivation, result: JobResult) -> Artifact:
        """Publish the files in `staging` as the artifact of `derivation`.

        If the same contents were published before and are intact, only the key is recorded. Raises StoreError with the path
        and the free bytes if a write fails; the store is then unchanged.
        """
        kind = derivation.kind
        with self._explain_os_error(f"publish {kind}"), self.lock(kind, result.fingerprint):
            if not self._has_intact(kind, result.fingerprint):
                if result.is_known:
                    raise StoreError(
                        f"{kind} {short(result.fingerprint)} disappeared from {self.root} while a job compared it; run again",
                        "artifact-lost",
                    )
                manifest = Manifest.of_now(derivation, result.fingerprint, list_files(staging), result.stored_details)
                apply_umask(staging)
                sync_tree(staging)
                write_durably(staging / MANIFEST, manifest.dumps())
                _move_in(staging, self.folder(kind, result.fingerprint))
            self._write_record(derivation, result.fingerprint, result.stored_details)
            artifact = self.open(kind, result.fingerprint, hashes=False)
        return replace(artifact, derivation=derivation, stored_details=result.stored_details)

    def adopt(self, staging: Path, kind: str, fingerprint: str) -> Artifact:
        """Move an artifact of another store, with its manifest, into this one. It gets no key.

        Raises CorruptArtifact if it is corrupt or another artifact, StoreError if a write fails.
        """
        verified_manifest(staging, kind, fingerprint)
        with self._explain_os_error(f"adopt {kind}"):
            apply_umask(staging)
            sync_tree(staging)
            _move_in(staging, self.folder(kind, fingerprint))
        return self.open(kind, fingerprint, hashes=False)

    @contextlib.contextmanager
    def _explain_os_error(self, action: str) -> Iterator[None]:
        """Turn an OSError into a StoreError with the path and the free bytes."""
        try:
            yield
        except OSError as error:
            raise write_error(action, self.root, error) from error

    def _has_intact(self, kind: str, fingerprint: str) -> bool:
        """Return whether these contents are in the store and intact. Set corrupt ones aside."""
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
        # A folder of another user, such as one from a backup, needs no mark: this user cannot remove it either.
        with contextlib.suppress(PermissionError):
            os.utime(self.folder(kind, fingerprint))

    def _write_record(self, derivation: Derivation, fingerprint: str, details: JsonObject) -> None:
        """Record the result of `derivation`, also as the latest result of these inputs and settings under any software."""
        for recorded in {each.key: each for each in (derivation, derivation.of_any_software)}.values():
            record = DerivationRecord(fingerprint=fingerprint, derivation=recorded, details=details)
            with self.staging() as scratch:
                write_durably(self.record_file(recorded.kind, recorded.key), record.dumps(), scratch)

    def _manifests(self, kind: str) -> Iterator[Manifest]:
        """Yield all readable manifests of `kind`."""
        for fingerprint in self.fingerprints(kind):
            with contextlib.suppress(CorruptArtifact):
                yield read_manifest(self.folder(kind, fingerprint))


def _move_in(staging: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.rename(staging, target)
    except OSError:
        if not target.is_dir():  # if it is one, another process has published the same contents
            raise
    sync_folder(target.parent)

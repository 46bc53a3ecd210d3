"""The manifest of an artifact: what it is, what it was made from, and the size and sha256 of every file it holds.

A manifest could be made to point out of its folder. So names are checked before anything is opened, links are never
followed, and only regular files are read: reading a pipe could block for ever.

A sound artifact may be unreadable for a moment, behind a file server that is away, say. All that reads here raises
UnreadableArtifact then, and nobody moves it aside as they do a corrupt one.
"""

import errno
import stat
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, Self

from pydantic import field_validator

from training.contract.config.fields import StrictModel
from training.contract.errors import CorruptArtifact, UnreadableArtifact
from training.contract.identity.file_hashing import hash_files
from training.contract.identity.fingerprint import SCHEMA_VERSION, fingerprint, short
from training.contract.identity.hash_cache import HashCache, file_hashes
from training.contract.identity.software import SOFTWARE, library_versions
from training.contract.store.checksummed_json import ChecksummedModel

MANIFEST = "manifest.json"
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)


class FileEntry(StrictModel):
    bytes: int
    sha256: str


class Source(StrictModel):
    """One input of a derivation."""

    kind: str
    fingerprint: str


class Derivation(StrictModel):
    """How an artifact is made. Equal derivations give equal artifacts, so `key` tells whether it was made already."""

    kind: str
    code_version: str
    inputs: dict[str, Source]
    settings: dict[str, Any]

    @property
    def key(self) -> str:
        return fingerprint("derivation", self.model_dump(mode="json"))

    @property
    def of_any_software(self) -> "Derivation":
        """The same, whatever versions of libraries it is made by: those are a setting of tokens and log-probs."""
        settings = {name: value for name, value in self.settings.items() if name != SOFTWARE}
        return self.model_copy(update={"settings": settings})


class Manifest(ChecksummedModel):
    """`fingerprint` identifies the contents; `details` are small facts for people and for checks."""

    schema_version: int = SCHEMA_VERSION
    kind: str
    fingerprint: str
    made_from: Derivation
    libraries: dict[str, str]
    created: str
    files: dict[str, FileEntry]
    details: dict[str, Any]

    @classmethod
    def of_now(
        cls, made_from: Derivation, fingerprint: str, files: dict[str, FileEntry], details: dict[str, Any]
    ) -> Self:
        """The manifest of what was made just now, with the libraries that are installed."""
        return cls(
            kind=made_from.kind,
            fingerprint=fingerprint,
            made_from=made_from,
            libraries=library_versions(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            files=files,
            details=details,
        )

    @field_validator("files")
    @classmethod
    def _inside(cls, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or path.as_posix() != name or name in ("", ".", MANIFEST):
                raise ValueError(f"{name!r} does not name a file inside the artifact's folder")
        return files


def list_files(folder: Path) -> dict[str, FileEntry]:
    """Every regular file under `folder` but the manifest, by its relative POSIX name.

    Raises CorruptArtifact for a link or anything else that is neither a file nor a folder.
    """
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    for path in found.values():
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CorruptArtifact(f"{path} is not a plain file; an artifact holds only files and folders")
    files = {name: path for name, path in found.items() if path.is_file() and name != MANIFEST}
    hashes = hash_files(list(files.values()))
    return {
        name: FileEntry(bytes=path.stat().st_size, sha256=sha256)
        for (name, path), sha256 in zip(files.items(), hashes, strict=True)
    }


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`. Raises CorruptArtifact where there is none, a link, or not what was written."""
    path = folder / MANIFEST
    if path.is_symlink():
        raise CorruptArtifact(f"{path} is a symbolic link to {path.readlink()}; a plain file was published")
    try:
        return Manifest.loads(path.read_bytes())
    except OSError as error:
        raise read_error(path, error) from error
    except ValueError as error:
        raise CorruptArtifact(f"{path} is not a readable manifest: {error}") from error


def verified_manifest(
    folder: Path, kind: str, fingerprint: str, hashes: bool = True, cache: HashCache | None = None
) -> Manifest:
    """The manifest of that artifact in `folder`, after `verify_files`. Raises CorruptArtifact, also for another artifact's."""
    manifest = read_manifest(folder)
    if (manifest.kind, manifest.fingerprint) != (kind, fingerprint):
        raise CorruptArtifact(
            f"{folder / MANIFEST} is of {manifest.kind} {short(manifest.fingerprint)}, "
            f"expected {kind} {short(fingerprint)}"
        )
    verify_files(folder, manifest, hashes, cache)
    return manifest


def verify_files(folder: Path, manifest: Manifest, hashes: bool = True, cache: HashCache | None = None) -> None:
    """Compare the files of `folder` with `manifest`: names, kinds and sizes always, contents when `hashes`.

    Raises CorruptArtifact that names the first file that is missing, foreign, not a plain file, or changed. With a
    `cache`, files unchanged since they were hashed are not read: enough to look at them, not to compute with them.
    """
    _verify_sizes(folder, manifest)
    if hashes:
        verify_contents(folder, manifest, manifest.files, cache)


def verify_contents(folder: Path, manifest: Manifest, names: Collection[str], cache: HashCache | None = None) -> None:
    """Compare the bytes of `names` with `manifest`. Raises CorruptArtifact that names the first that differs."""
    paths = [folder / name for name in names]
    try:
        found = file_hashes(paths, cache)
    except OSError as error:
        raise read_error(folder, error) from error
    for name, sha256 in zip(names, found, strict=True):
        if sha256 != (promised := manifest.files[name].sha256):
            raise CorruptArtifact(
                f"{folder / name} has sha256 {short(sha256)}; the manifest promises {short(promised)}"
            )


def read_error(place: Path, error: OSError) -> CorruptArtifact | UnreadableArtifact:
    """The error to raise where the operating system refuses to read `place`: corrupt is only what is not there."""
    message = f"{place} cannot be read: {error}"
    if error.errno in _NO_SUCH_FILE:
        return CorruptArtifact(message)
    return UnreadableArtifact(
        f"{message}; it may be whole: look at its disk, its permissions and the memory left, and run again"
    )


def _verify_sizes(folder: Path, manifest: Manifest) -> None:
    if folder.is_symlink():
        raise CorruptArtifact(f"{folder} is a symbolic link to {folder.readlink()}; a folder was published")
    present = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()}
    if foreign := sorted(present - {MANIFEST} - manifest.files.keys()):
        raise CorruptArtifact(f"{folder / foreign[0]} is not in the manifest; remove it or the artifact's folder")
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            found = path.lstat()
        except FileNotFoundError:
            raise CorruptArtifact(f"{path} is missing; the manifest promises {entry.bytes} bytes") from None
        except OSError as error:
            raise read_error(path, error) from error
        if stat.S_ISLNK(found.st_mode):
            raise CorruptArtifact(f"{path} is a symbolic link to {path.readlink()}; a plain file was published")
        if not stat.S_ISREG(found.st_mode):
            raise CorruptArtifact(f"{path} is not a plain file; a plain file was published")
        if found.st_size != entry.bytes:
            raise CorruptArtifact(f"{path} has {found.st_size} bytes; the manifest promises {entry.bytes}")

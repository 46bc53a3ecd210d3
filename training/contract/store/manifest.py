"""The manifest of an artifact: its kind, its derivation, and the size and sha256 of every file.

A forged manifest could name files outside its folder. So names are checked before files are opened, links are never followed,
and only regular files are read: reading a pipe could block forever.

An intact artifact may be unreadable for a while, for example while a file server is down. Functions here then raise
UnreadableArtifact, and callers do not set it aside.
"""

import errno
import stat
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Self

from pydantic import field_validator

from training.contract.config.fields import StrictModel
from training.contract.config.json_object import JsonObject
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
    """How an artifact is made. Equal derivations give equal artifacts, so the store finds them by `key`."""

    kind: str
    code_version: str
    inputs: dict[str, Source]
    settings: JsonObject

    @property
    def key(self) -> str:
        return fingerprint("derivation", self.model_dump(mode="json"))

    @property
    def of_any_software(self) -> "Derivation":
        """This derivation without the versions of libraries, a setting of tokens and log-probs."""
        settings = {name: value for name, value in self.settings.items() if name != SOFTWARE}
        return self.model_copy(update={"settings": settings})


class Manifest(ChecksummedModel):
    """A manifest: `fingerprint` identifies the contents; `details` are small facts for users and for checks."""

    schema_version: int = SCHEMA_VERSION
    kind: str
    fingerprint: str
    made_from: Derivation
    libraries: dict[str, str]
    created: str
    files: dict[str, FileEntry]
    details: JsonObject

    @classmethod
    def of_now(cls, made_from: Derivation, fingerprint: str, files: dict[str, FileEntry], details: JsonObject) -> Self:
        """Return a manifest with the current time and the installed libraries."""
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
    """Return all regular files under `folder`, except the manifest, by relative POSIX name.

    Raises CorruptArtifact for links, pipes and the like.
    """
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    for path in paths.values():
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CorruptArtifact(
                f"{path} is not a plain file; an artifact holds only files and folders", "not-a-plain-file"
            )
    files = {name: path for name, path in paths.items() if path.is_file() and name != MANIFEST}
    hashes = hash_files(list(files.values()))
    return {
        name: FileEntry(bytes=path.stat().st_size, sha256=sha256)
        for (name, path), sha256 in zip(files.items(), hashes, strict=True)
    }


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest in `folder`. Raises CorruptArtifact if it is missing, a link, or damaged."""
    path = folder / MANIFEST
    if path.is_symlink():
        raise CorruptArtifact(
            f"{path} is a symbolic link to {path.readlink()}; a plain file was published", "symbolic-link"
        )
    try:
        return Manifest.loads(path.read_bytes())
    except OSError as error:
        raise read_error(path, error) from error
    except ValueError as error:
        raise CorruptArtifact(f"{path} is not a readable manifest: {error}", "corrupt-manifest") from error


def verified_manifest(
    folder: Path, kind: str, fingerprint: str, hashes: bool = True, cache: HashCache | None = None
) -> Manifest:
    """Return the manifest in `folder` after `verify_files`. Raises CorruptArtifact, also if it is of another artifact."""
    manifest = read_manifest(folder)
    if (manifest.kind, manifest.fingerprint) != (kind, fingerprint):
        raise CorruptArtifact(
            f"{folder / MANIFEST} is of {manifest.kind} {short(manifest.fingerprint)}, "
            f"expected {kind} {short(fingerprint)}",
            "wrong-artifact",
        )
    verify_files(folder, manifest, hashes, cache)
    return manifest


def verify_files(folder: Path, manifest: Manifest, hashes: bool = True, cache: HashCache | None = None) -> None:
    """Compare the files of `folder` with `manifest`: names, kinds and sizes always, contents if `hashes`.

    Raises CorruptArtifact with the first file that is missing, foreign, not a plain file, or changed. With a `cache`,
    unchanged files are not read: good enough for display, not for computing.
    """
    _verify_sizes(folder, manifest)
    if hashes:
        verify_contents(folder, manifest, manifest.files, cache)


def verify_contents(folder: Path, manifest: Manifest, names: Collection[str], cache: HashCache | None = None) -> None:
    """Compare the bytes of `names` with `manifest`. Raises CorruptArtifact with the first name whose bytes differ."""
    paths = [folder / name for name in names]
    try:
        hashes = file_hashes(paths, cache)
    except OSError as error:
        raise read_error(folder, error) from error
    for name, sha256 in zip(names, hashes, strict=True):
        if sha256 != (promised := manifest.files[name].sha256):
            raise CorruptArtifact(
                f"{folder / name} has sha256 {short(sha256)}; the manifest promises {short(promised)}", "wrong-hash"
            )


def read_error(path: Path, error: OSError) -> CorruptArtifact | UnreadableArtifact:
    """Return the error for a failed read of `path`: CorruptArtifact if it is missing, else UnreadableArtifact."""
    message = f"{path} cannot be read: {error}"
    if error.errno in _NO_SUCH_FILE:
        return CorruptArtifact(message, "missing-file")
    return UnreadableArtifact(
        f"{message}; it may be intact: check its disk, its permissions and the free memory, and run again"
    )


def _verify_sizes(folder: Path, manifest: Manifest) -> None:
    if folder.is_symlink():
        raise CorruptArtifact(
            f"{folder} is a symbolic link to {folder.readlink()}; a folder was published", "symbolic-link"
        )
    present = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()}
    if foreign := sorted(present - {MANIFEST} - manifest.files.keys()):
        raise CorruptArtifact(
            f"{folder / foreign[0]} is not in the manifest; remove it or the artifact's folder", "foreign-file"
        )
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            status = path.lstat()
        except FileNotFoundError:
            raise CorruptArtifact(
                f"{path} is missing; the manifest promises {entry.bytes} bytes", "missing-file"
            ) from None
        except OSError as error:
            raise read_error(path, error) from error
        if stat.S_ISLNK(status.st_mode):
            raise CorruptArtifact(
                f"{path} is a symbolic link to {path.readlink()}; a plain file was published", "symbolic-link"
            )
        if not stat.S_ISREG(status.st_mode):
            raise CorruptArtifact(f"{path} is not a plain file; a plain file was published", "not-a-plain-file")
        if status.st_size != entry.bytes:
            raise CorruptArtifact(
                f"{path} has {status.st_size} bytes; the manifest promises {entry.bytes}", "wrong-size"
            )

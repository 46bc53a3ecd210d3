"""The manifest of an artifact: what it is, what it was made from, and the size and sha256 of every file it holds."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from training.contract.errors import CorruptArtifact
from training.contract.fingerprint import SCHEMA_VERSION, fingerprint, hash_file

MANIFEST = "manifest.json"


class FileEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    bytes: int
    sha256: str


class Source(BaseModel):
    """One input of a derivation."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: str
    fingerprint: str


class Derivation(BaseModel):
    """How an artifact is made. Equal derivations give equal artifacts, so `key` answers "has this been done?"."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: str
    code_version: str
    inputs: dict[str, Source]
    settings: dict[str, Any]

    @property
    def key(self) -> str:
        return fingerprint("derivation", self.model_dump(mode="json"))


class Manifest(BaseModel):
    """`fingerprint` identifies what the artifact holds; `details` are the small facts people and checks look at."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: int = SCHEMA_VERSION
    kind: str
    fingerprint: str
    made_from: Derivation
    libraries: dict[str, str]
    created: str
    files: dict[str, FileEntry]
    details: dict[str, Any]


def list_files(folder: Path) -> dict[str, FileEntry]:
    """Every regular file under `folder` but the manifest, by its relative POSIX name.

    Raises CorruptArtifact for a link or anything else that is neither a file nor a folder.
    """
    entries: dict[str, FileEntry] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CorruptArtifact(f"{path} is not a plain file; an artifact holds only files and folders")
        if path.is_file() and name != MANIFEST:
            entries[name] = FileEntry(bytes=path.stat().st_size, sha256=hash_file(path))
    return entries


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`. Raises CorruptArtifact where it is unreadable or does not have a manifest's form."""
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise CorruptArtifact(f"{path} is not a readable manifest: {error}") from error


def verify_files(folder: Path, manifest: Manifest, hashes: bool = True) -> None:
    """Compare the files of `folder` with `manifest`: names and sizes always, contents when `hashes`.

    Raises CorruptArtifact that names the first file that is missing, foreign, changed in size or changed in content.
    """
    present = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()}
    present.pop(MANIFEST, None)
    if foreign := sorted(set(present) - set(manifest.files)):
        raise CorruptArtifact(f"{folder / foreign[0]} is not in the manifest; remove it or the artifact's folder")
    for name, entry in manifest.files.items():
        if name not in present:
            raise CorruptArtifact(f"{folder / name} is missing; the manifest promises {entry.bytes} bytes")
        path = present[name]
        size = path.lstat().st_size
        if path.is_symlink():
            raise CorruptArtifact(f"{path} is a symbolic link to {path.readlink()}; a plain file was published")
        if size != entry.bytes:
            raise CorruptArtifact(f"{path} has {size} bytes; the manifest promises {entry.bytes}")
        if hashes and (found := hash_file(path)) != entry.sha256:
            raise CorruptArtifact(f"{path} has sha256 {found[:12]}; the manifest promises {entry.sha256[:12]}")

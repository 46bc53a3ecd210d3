"""Artifacts in the store, results of jobs, and records of derivations."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic

from pydantic import Field

from training.contract.config.json_object import JsonObject
from training.contract.store.artifact_kind import ArtifactKind, Details, DetailsT, OtherT
from training.contract.store.checksummed_json import ChecksummedModel
from training.contract.store.manifest import Derivation, Manifest


@dataclass(frozen=True)
class Artifact(Generic[DetailsT]):
    """An artifact. `derivation` and `details` belong to the key it was found by; other keys may lead to the same contents."""

    kind: ArtifactKind[DetailsT]
    folder: Path
    manifest: Manifest
    derivation: Derivation
    stored_details: JsonObject

    @cached_property
    def details(self) -> DetailsT:
        """The details, as the model of the kind. Raises StoreError if another version wrote them in an unknown form."""
        return self.kind.parse(self.stored_details, self.folder)

    def of_kind(self, kind: ArtifactKind[OtherT]) -> "Artifact[OtherT]":
        """Return the artifact with the details of `kind`, the kind of its manifest."""
        assert kind.name == self.manifest.kind, f"{self.folder} is a {self.manifest.kind}, not a {kind.name}"
        return Artifact(kind, self.folder, self.manifest, self.derivation, self.stored_details)

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    def file(self, name: str) -> Path:
        assert name in self.manifest.files, f"{name} is not a file of {self.folder}"
        return self.folder / name

    def json(self, name: str) -> Any:
        return json.loads(self.file(name).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class JobResult(Generic[DetailsT]):
    """The fingerprint and details of the files in a job's staging folder. Ranks other than the first have none.

    `is_known`: the folder is empty, because these contents were published before.
    """

    fingerprint: str = ""
    details: DetailsT | None = None
    is_known: bool = False

    @property
    def stored_details(self) -> JsonObject:
        return {} if self.details is None else self.details.to_json()


def as_kind(kind: ArtifactKind | str) -> ArtifactKind:
    """Return the kind, or for a name the kind with the details that all artifacts may have."""
    return ArtifactKind(kind, Details) if isinstance(kind, str) else kind


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file of an artifact, indented for human readers."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


class DerivationRecord(ChecksummedModel):
    """The content of `keys/<kind>/<key>.json`: one derivation of an artifact."""

    fingerprint: str = Field(pattern="^[0-9a-f]{64}$")
    derivation: Derivation
    details: JsonObject

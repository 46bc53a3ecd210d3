"""A version of a registered model: what Pedigree knows of it, and the tags in which it is written."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from mlflow.entities.model_registry import ModelVersion

from training.contract.identity.fingerprint import fingerprint, short

PREVIOUS_TAG = "pedigree.previous_champion"
ROLLED_BACK_TAG = "pedigree.rolled_back"
MERGED = "merged_policy"  # the kind of a policy that was trained as an adapter, merged into its base


@dataclass(frozen=True)
class Version:
    """One version of a registered model; `source` is where its files lie, in the terms of MLflow."""

    name: str
    number: int
    source: str
    tags: Mapping[str, str]

    @classmethod
    def of(cls, found: ModelVersion) -> Self:
        return cls(found.name, int(found.version), found.source, dict(found.tags))

    def fingerprint_of(self, kind: str) -> str | None:
        """That of the artifact of `kind` in its lineage; None where there was none."""
        return self.tags.get(_lineage_tag(kind))

    @property
    def weights(self) -> str | None:
        """The fingerprint of the weights it was released with: those of its policy, or of that merged into its base."""
        return self.fingerprint_of(MERGED) or self.fingerprint_of("policy")

    @property
    def download_name(self) -> str:
        """The folder it is downloaded to, below that of all downloads.

        The number alone names no version: it is that of another one on another server, and once the model was deleted.
        """
        return f"{self.name}/{self.number}-{short(fingerprint('downloaded_version', self.source))}"


def lineage_tags(lineage: Mapping[str, str]) -> dict[str, str]:
    """The tags by which a version knows the fingerprints, by kind, of all that it was made from."""
    return {_lineage_tag(kind): found for kind, found in lineage.items()}


def _lineage_tag(kind: str) -> str:
    return f"pedigree.{kind}"

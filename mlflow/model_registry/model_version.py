"""A version of a registered model, and the tags that hold its record."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from training.contract.identity.fingerprint import fingerprint, short

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

PREVIOUS_TAG = "pedigree.previous_champion"
ROLLED_BACK_TAG = "pedigree.rolled_back"
MERGED = "merged_policy"  # the kind of a policy trained as an adapter and merged into its base


@dataclass(frozen=True)
class Version:
    """One version of a registered model; `source` is MLflow's address of its files."""

    name: str
    number: int
    source: str
    tags: Mapping[str, str]

    @classmethod
    def of(cls, version: "ModelVersion") -> Self:
        return cls(version.name, int(version.version), version.source, dict(version.tags))

    def fingerprint_of(self, kind: str) -> str | None:
        """Return the fingerprint of the artifact of `kind` in its lineage, or None."""
        return self.tags.get(_lineage_tag(kind))

    @property
    def weights(self) -> str | None:
        """Return the fingerprint of the released weights: of its policy, or of the policy merged into its base."""
        return self.fingerprint_of(MERGED) or self.fingerprint_of("policy")

    @property
    def download_name(self) -> str:
        """Return its folder, below the one for all downloads.

        The number alone is ambiguous: another server has the same numbers, and so has a model that was deleted and registered
        again.
        """
        return f"{self.name}/{self.number}-{short(fingerprint('downloaded_version', self.source))}"


def lineage_tags(lineage: Mapping[str, str]) -> dict[str, str]:
    """Return the tags for the fingerprints, by kind, of a version's lineage."""
    return {_lineage_tag(kind): fingerprint for kind, fingerprint in lineage.items()}


def _lineage_tag(kind: str) -> str:
    return f"pedigree.{kind}"

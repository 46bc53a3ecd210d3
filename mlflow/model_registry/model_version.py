"""A version of a registered model, and the tags that hold its record."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from training.contract.identity.fingerprint import fingerprint, short
from training.contract.protocol.artifacts import AssetName

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

PREVIOUS_TAG = "pedigree.previous_champion"
ROLLED_BACK_TAG = "pedigree.rolled_back"
DECISION_TAG = "pedigree.champion"  # yes, if the gate promoted it
REASONS_TAG = "pedigree.reasons"
LINEAGE_TAG = "pedigree.lineage"
MERGED = "merged_policy"  # the kind of a policy trained as an adapter and merged into its base
LINEAGE_FILE = "lineage.json"
_PREFIX = "pedigree."
_WEIGHTS = (AssetName.POLICY, MERGED)
_NEEDED = (AssetName.EVALUATION, AssetName.RELEASE_SPEC, AssetName.TOKENIZATION_SPEC, AssetName.RAW_PREFERENCES)
_TAGGED = (*_WEIGHTS, *_NEEDED)


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

    @property
    def known_lineage(self) -> dict[str, str]:
        """The fingerprints by kind in its tags. Versions released before LINEAGE_TAG have a tag for each kind."""
        return {kind: known for kind in _TAGGED if (known := self.fingerprint_of(kind)) is not None}

    def fingerprint_of(self, kind: str) -> str | None:
        """Return the fingerprint of the artifact of `kind` in its lineage; None if its tags do not have it."""
        needed: dict[str, str] = json.loads(self.tags.get(LINEAGE_TAG, "{}"))
        return needed.get(kind) or self.tags.get(_PREFIX + kind)

    @property
    def weights(self) -> str | None:
        """Return the fingerprint of the released weights: of its policy, or of the policy merged into its base."""
        return self.fingerprint_of(MERGED) or self.fingerprint_of(AssetName.POLICY)

    @property
    def download_name(self) -> str:
        """Return its folder, below the one for all downloads.

        The number alone is ambiguous: another server has the same numbers, and so has a model that was deleted and registered
        again.
        """
        return f"{self.name}/{self.number}-{short(fingerprint('downloaded_version', self.source))}"


def tagged_lineage(lineage: Mapping[str, str]) -> dict[str, str]:
    """Return the part of a lineage that the tags of its version have."""
    return {kind: lineage[kind] for kind in _TAGGED if kind in lineage}


def lineage_tags(lineage: Mapping[str, str]) -> dict[str, str]:
    """Return the tags for a version's lineage, given as fingerprints by kind.

    The released weights have tags of their own, for a search in MLflow. One tag has the fingerprints
    that a restore of the files and a comparison with a candidate need. The file LINEAGE_FILE has the whole lineage.
    """
    weights = {f"{_PREFIX}{kind}": lineage[kind] for kind in _WEIGHTS if kind in lineage}
    needed = {kind: lineage[kind] for kind in _NEEDED if kind in lineage}
    return {**weights, LINEAGE_TAG: json.dumps(needed)}

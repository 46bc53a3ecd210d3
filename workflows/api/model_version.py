"""A version of the released model, for users."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from model_registry.model_version import REASONS_TAG, Version
from model_registry.registry import Registry


@dataclass(frozen=True)
class ModelVersion:
    """One version of the registered model `name`.

    `number`: from 1, in the order of registration. `weights`: the fingerprint of its policy, or of the policy merged into its
    base; None if no recipe released it. `tags`: its tags in MLflow, among them the fingerprint of each artifact of its lineage,
    such as `pedigree.raw_preferences`. `reasons`: the gate's reasons for its decision; None without a decision.
    """

    name: str
    number: int
    weights: str | None
    tags: Mapping[str, str] = field(repr=False)
    reasons: str | None
    _version: Version = field(repr=False)
    _registry: Registry = field(repr=False, compare=False)

    @classmethod
    def of(cls, version: Version, registry: Registry) -> "ModelVersion":
        reasons = version.tags.get(REASONS_TAG)
        return cls(version.name, version.number, version.weights, version.tags, reasons, version, registry)

    @property
    def uri(self) -> str:
        """The version's address for MLflow, such as `models:/demo/3`."""
        return f"models:/{self.name}/{self.number}"

    def folder(self) -> Path:
        """Return the folder of its Hugging Face model, with tokenizer and chat template, for `from_pretrained`.

        A model on a server is downloaded once, into the home. Raises RegistryError if the version lacks a model or the server
        does not answer.
        """
        return self._registry.folder(self._version)

"""A candidate: the policy that `released_model` registers and passes to the gate."""

from dataclasses import dataclass
from functools import cached_property

from assets.execution.asset_context import AssetContext
from assets.pipeline.graph import derive
from model_registry.registry import Registry
from training.contract.protocol.artifacts import AssetName
from training.contract.protocol.settings import ReleasedModelSettings
from training.contract.store.artifact import Artifact
from training.contract.store.artifact_kind import ArtifactKind, DetailsT
from training.contract.store.manifest import Derivation
from training.contract.store.store import Store


@dataclass(frozen=True)
class Candidate:
    """A policy to release. `inputs`: the fingerprints, by name, of the artifacts that `released_model` is made from."""

    context: AssetContext
    inputs: dict[str, str]

    @property
    def name(self) -> str:
        return self.context.pipeline.recipe.release.model_name

    @property
    def store(self) -> Store:
        return self.context.services.store

    @property
    def registry(self) -> Registry:
        return self.context.services.registry

    @cached_property
    def derivation(self) -> Derivation:
        return derive(AssetName.RELEASED_MODEL, self.inputs, self.context.settings(ReleasedModelSettings))

    def artifact(self, kind: ArtifactKind[DetailsT]) -> Artifact[DetailsT]:
        """Return the verified artifact of one of `inputs`. A version that is registered already needs none of them."""
        return self._artifacts[kind.name].of_kind(kind)

    @cached_property
    def _artifacts(self) -> dict[str, Artifact]:
        return {name: self.store.open(name, fingerprint) for name, fingerprint in self.inputs.items()}

    @cached_property
    def lineage(self) -> dict[str, str]:
        """The fingerprints, by kind, of all direct and indirect inputs."""
        return self.context.history.lineage(self.inputs)

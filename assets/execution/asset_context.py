"""The argument of an asset's body: one asset of one pipeline during its materialization."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import dagster as dg

from assets.lineage.consistency import check_one_lineage
from assets.lineage.history import History, input_version_tag
from assets.pipeline.graph import GRAPH, read_settings, with_upstream
from assets.pipeline.pipeline import Pipeline, Services
from training.contract.protocol.job import SettingsT
from training.contract.protocol.spec_files import SPEC_FILE
from training.contract.store.artifact import Artifact
from training.contract.store.artifact_kind import ArtifactKind, Details


@dataclass(frozen=True)
class AssetContext:
    """An asset during its materialization. `dagster` is Dagster's own context."""

    pipeline: Pipeline
    services: Services
    dagster: dg.AssetExecutionContext

    @property
    def asset(self) -> str:
        return str(self.dagster.asset_key.path[-1])

    def settings(self, model: type[SettingsT]) -> SettingsT:
        """Return the settings of its derivation: the content of its spec, or else the fields of the recipe it reads."""
        node = GRAPH[self.asset]
        if node.spec is None:
            settings = read_settings(self.asset, self.pipeline.recipe, self.pipeline.name)
            assert isinstance(settings, model)
            return settings
        return model.model_validate(self.history.artifact(ArtifactKind(node.spec, Details)).json(SPEC_FILE))

    @cached_property
    def history(self) -> History:
        """The history of the asset and its ancestors. It is read once, so inputs and spec are consistent."""
        assets = with_upstream(self.pipeline.recipe, self.asset)
        return History(self.dagster.instance, self.pipeline, self.services.store, self.dagster.run.run_id, assets)

    def inputs(self) -> dict[str, str]:
        """Return the fingerprints of the asset's inputs by name, without reading the artifacts.

        Raise UsageError if an input was never materialized, StoreError if they are inconsistent.
        """
        fingerprints = {name: self.history.fingerprint(name) for name in self._input_names()}
        check_one_lineage(self.history, self.asset, fingerprints)
        return fingerprints

    def picture(
        self, name: str, artifact: Artifact, draw: Callable[[], dg.MarkdownMetadataValue]
    ) -> dg.MarkdownMetadataValue:
        """Return the picture `name` of the latest materialization if it has the same artifact and key, else call `draw`.

        Drawing takes most of the time for a reused artifact. If you change a drawing, raise the asset's code version.
        """
        latest = self.history.latest(self.asset)
        is_same = (latest.fingerprint, latest.key) == (artifact.fingerprint, artifact.derivation.key)
        picture = latest.metadata.get(name) if is_same else None
        return draw() if picture is None else dg.MetadataValue.md(picture)

    def provenance(self) -> dict[str, str]:
        """Return tags with the data versions of the inputs. They replace Dagster's tags.

        Dagster's tags name the latest materializations, which may come from another run. An asset made from older inputs would
        then count as fresh.
        """
        upstream = GRAPH[self.asset].upstream(self.pipeline.recipe)
        versions = {self.pipeline.key(name): self.history.latest(name).fingerprint for name in upstream}
        return {input_version_tag(key): version for key, version in versions.items() if version is not None}

    def _input_names(self) -> tuple[str, ...]:
        return GRAPH[self.asset].inputs(self.pipeline.recipe)

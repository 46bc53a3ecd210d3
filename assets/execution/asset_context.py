"""One asset of one pipeline while it is materialized: what its body is given."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import dagster as dg

from assets.lineage.consistency import check_one_lineage
from assets.lineage.history import History, input_version_tag
from assets.pipeline.graph import GRAPH, Settings, with_upstream
from assets.pipeline.pipeline import Pipeline, Services
from training.contract.store.store import Artifact


@dataclass(frozen=True)
class AssetContext:
    """`context` is Dagster's; everything else a body uses can be reached from here."""

    pipeline: Pipeline
    services: Services
    context: dg.AssetExecutionContext

    @property
    def asset(self) -> str:
        return str(self.context.asset_key.path[-1])

    @property
    def settings(self) -> Settings:
        """What it is made with, beside its inputs: the content of its spec, or else the fields of the recipe that it reads."""
        node = GRAPH[self.asset]
        if node.spec is None:
            return node.reads(self.pipeline.recipe)
        frozen: Settings = self.history.artifact(node.spec).json("spec.json")
        return frozen

    @cached_property
    def history(self) -> History:
        """Of the asset and what it is made of, as it was when the step first asked: inputs and their spec are of one moment."""
        needed = with_upstream(self.pipeline.recipe, self.asset)
        return History(self.context.instance, self.pipeline, self.services.store, self.context.run.run_id, needed)

    def inputs(self) -> dict[str, str]:
        """The artifacts that the asset is made from in this recipe: fingerprints by name. Nothing of them was read yet.

        Raises UsageError for one that never was made, StoreError where they do not go together.
        """
        found = {name: self.history.fingerprint(name) for name in self._names()}
        check_one_lineage(self.history, self.asset, found)
        return found

    def picture(
        self, name: str, artifact: Artifact, draw: Callable[[], dg.MarkdownMetadataValue]
    ) -> dg.MarkdownMetadataValue:
        """What the latest materialization shows as `name`, if that made `artifact` in the same way; else what `draw` gives.

        Drawing takes longer than all else that is done for an artifact that is reused. Who changes a drawing gives the asset
        another code version.
        """
        latest = self.history.latest(self.asset)
        is_same = (latest.fingerprint, latest.key) == (artifact.fingerprint, artifact.derivation.key)
        shown = latest.metadata.get(name) if is_same else None
        return draw() if shown is None else dg.MetadataValue.md(shown)

    def provenance(self) -> dict[str, str]:
        """Tags with the data versions that it was made from, in the place of Dagster's: those of the latest materializations.

        What another run has recorded would else count as used, and an asset that was made from older inputs as up to date.
        """
        found = {self.pipeline.key(name): self.history.latest(name).fingerprint for name in self._names()}
        return {input_version_tag(key): version for key, version in found.items() if version is not None}

    def _names(self) -> tuple[str, ...]:
        return GRAPH[self.asset].inputs(self.pipeline.recipe)

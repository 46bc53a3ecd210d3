"""One asset of one pipeline while it is materialized: what its body is given."""

from dataclasses import dataclass

import dagster as dg

from assets.graph import GRAPH, Settings
from assets.materialized import Materialization, latest
from assets.pipeline import Pipeline, Services
from training.contract.errors import UsageError
from training.contract.store import Artifact


@dataclass(frozen=True)
class Step:
    """`context` is Dagster's; everything else a body uses can be reached from here."""

    pipeline: Pipeline
    services: Services
    context: dg.AssetExecutionContext

    @property
    def asset(self) -> str:
        return str(self.context.asset_key.path[-1])

    @property
    def settings(self) -> Settings:
        """The fields of the recipe that the asset reads itself."""
        return GRAPH[self.asset].reads(self.pipeline.recipe)

    def latest(self, asset: str) -> Materialization:
        return latest(self.context.instance, self.pipeline.key(asset))

    def upstream(self, asset: str) -> Artifact:
        """The artifact of `asset` as last materialized, verified. Raises UsageError if it never was."""
        found = self.latest(asset).fingerprint
        if found is None:
            raise UsageError(
                f"{self.pipeline.key(asset).to_user_string()} was never materialized; materialize it first"
            )
        return self.services.store.open(asset, found)

    def inputs(self) -> dict[str, Artifact]:
        """The artifacts that the asset is made from in this recipe, verified."""
        return {name: self.upstream(name) for name in GRAPH[self.asset].inputs(self.pipeline.recipe)}

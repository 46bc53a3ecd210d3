"""Dagster's records of materializations, and the derivations of their artifacts.

Records of all assets are read in one query, because a query costs Dagster a dozen connections to its database.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import dagster as dg
from dagster._core.storage.event_log.base import AssetEntry

from assets.pipeline.graph import GRAPH
from assets.pipeline.pipeline import Pipeline
from training.contract.errors import UsageError
from training.contract.protocol.artifacts import AssetName
from training.contract.store.artifact import Artifact
from training.contract.store.artifact_kind import ArtifactKind, DetailsT
from training.contract.store.manifest import Derivation
from training.contract.store.store import Store


@dataclass(frozen=True)
class Materialization:
    """A materialization of an asset. Without one, all fields except `last_run` are empty.

    `fingerprint`: its data version. `metadata`: plain values of its metadata. The run `run` made it at `time`. `last_run`: the
    last run that planned to materialize the asset.
    """

    fingerprint: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    run: str | None = field(default=None, compare=False)
    time: float = field(default=0.0, compare=False)
    last_run: str | None = field(default=None, compare=False)

    @classmethod
    def of(cls, recorded: dg.AssetMaterialization) -> Self:
        tags = recorded.tags or {}
        return cls(tags.get("dagster/data_version"), tags, {name: v.value for name, v in recorded.metadata.items()})

    @property
    def key(self) -> str | None:
        """The key of the artifact's derivation."""
        return self.metadata.get("key")

    @property
    def code_version(self) -> str | None:
        return self.tags.get("dagster/code_version")

    def input_version(self, asset: dg.AssetKey) -> str | None:
        """Return the data version of its input `asset`."""
        return self.tags.get(input_version_tag(asset))


def input_version_tag(asset: dg.AssetKey) -> str:
    """Return the name of a materialization's tag for the data version of its input `asset`."""
    return f"dagster/input_data_version/{asset.to_user_string()}"


def latest_of(instance: dg.DagsterInstance, keys: Sequence[dg.AssetKey]) -> dict[dg.AssetKey, Materialization]:
    """Return the latest materialization of each asset."""
    entries = [record.asset_entry for record in instance.get_asset_records(keys)] if keys else []
    return {key: Materialization() for key in keys} | {entry.asset_key: _latest(entry) for entry in entries}


def _latest(entry: AssetEntry) -> Materialization:
    event = entry.last_materialization
    if event is None or event.asset_materialization is None:
        return Materialization(last_run=entry.last_run_id)
    latest = Materialization.of(event.asset_materialization)
    return replace(latest, run=event.run_id, time=event.timestamp, last_run=entry.last_run_id)


def made_in(instance: dg.DagsterInstance, run_id: str) -> dict[dg.AssetKey, Materialization]:
    """Return the materializations of a run so far."""
    records = instance.get_records_for_run(run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION).records
    events = [recorded for record in records if (recorded := record.event_log_entry.asset_materialization) is not None]
    return {event.asset_key: Materialization.of(event) for event in events}


@dataclass(frozen=True)
class Ancestor:
    """A direct or indirect input of an artifact, with the derivation of its latest materialization."""

    fingerprint: str
    derivation: Derivation


@dataclass(frozen=True)
class History:
    """The latest materializations of a pipeline, read once, and their artifacts in the store.

    With `run_id`, materializations of this run come first: another run, perhaps with newer data, may have recorded other inputs
    since, and a run's artifacts must be consistent. `assets` limits the query, because each record takes milliseconds to read.
    """

    instance: dg.DagsterInstance
    pipeline: Pipeline
    store: Store
    run_id: str | None = None
    assets: Collection[str] = tuple(GRAPH)

    @cached_property
    def _latest(self) -> dict[dg.AssetKey, Materialization]:
        made = {} if self.run_id is None else made_in(self.instance, self.run_id)
        others = [key for asset in self.assets if (key := self.pipeline.key(asset)) not in made]
        return made | latest_of(self.instance, others)

    def latest(self, asset: str) -> Materialization:
        return self._latest[self.pipeline.key(asset)]

    def find(self, kind: ArtifactKind[DetailsT]) -> Artifact[DetailsT] | None:
        """Return the latest artifact of `kind`, verified; None without a materialization. Raise StoreError."""
        fingerprint = self.latest(kind.name).fingerprint
        return None if fingerprint is None else self.store.open(kind, fingerprint)

    def fingerprint(self, asset: str) -> str:
        """Return the fingerprint of the latest materialization. Raise UsageError without one."""
        if (fingerprint := self.latest(asset).fingerprint) is None:
            raise UsageError(
                f"{self.pipeline.name}/{asset} was never materialized; run `pedigree run {self.pipeline.argument}` first",
                "never-materialized",
            )
        return fingerprint

    def artifact(self, kind: ArtifactKind[DetailsT]) -> Artifact[DetailsT]:
        """Return the latest artifact of `kind`, verified. Raise UsageError without a materialization, or StoreError."""
        return self.store.open(kind, self.fingerprint(kind.name))

    def made_from(self, asset: str) -> Derivation | None:
        """Return the derivation of the latest materialization; None if it is no longer known. Raise CorruptRecord."""
        latest = self.latest(asset)
        if asset == AssetName.RELEASED_MODEL:  # its artifact is in the registry, so its derivation is in the metadata
            recorded = latest.metadata.get("derivation")
            return None if recorded is None else Derivation.model_validate(recorded)
        return None if latest.key is None else self.store.derivation(asset, latest.key)

    def derivation(self, asset: str, fingerprint: str) -> Derivation:
        """Return the latest derivation of the artifact `fingerprint` of `asset`.

        If it is unknown, return the first derivation, from the manifest: another artifact may have been materialized since, or
        the record may be missing. Raise StoreError without such an artifact.
        """
        latest = self.latest(asset)
        if latest.fingerprint == fingerprint and latest.key is not None:
            derivation = self.store.derivation(asset, latest.key)
            if derivation is not None:
                return derivation
        return self.store.open(asset, fingerprint, hashes=False).manifest.made_from

    def ancestry(self, heads: Mapping[str, str]) -> dict[str, Ancestor]:
        """Return the `heads` (fingerprints by kind) and all their ancestors, by kind. Raise StoreError if one is missing."""
        ancestors: dict[str, Ancestor] = {}
        waiting = list(heads.items())
        while waiting:
            kind, fingerprint = waiting.pop()
            if kind not in ancestors:
                derivation = self.derivation(kind, fingerprint)
                ancestors[kind] = Ancestor(fingerprint, derivation)
                waiting += [(source.kind, source.fingerprint) for source in derivation.inputs.values()]
        return ancestors

    def lineage(self, heads: Mapping[str, str]) -> dict[str, str]:
        """Return the fingerprints of `ancestry`, by kind. Raise StoreError if one is missing."""
        return {kind: ancestor.fingerprint for kind, ancestor in self.ancestry(heads).items()}

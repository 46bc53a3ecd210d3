"""What Dagster recorded when an asset was materialized, and how the artifacts behind that were made.

Dagster is asked for all assets of interest at once: a question costs it a dozen connections to its database.
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
from training.contract.store.manifest import Derivation
from training.contract.store.store import Artifact, Store


@dataclass(frozen=True)
class Materialization:
    """A materialization of an asset; all fields but `last_run` are empty if there is none.

    `fingerprint` is its data version, `metadata` holds the plain values of what it showed. The run `run` made it at `time`.
    `last_run` is the last run that was to make the asset.
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
        """The key of its derivation."""
        return self.metadata.get("key")

    @property
    def code_version(self) -> str | None:
        return self.tags.get("dagster/code_version")

    def input_version(self, asset: dg.AssetKey) -> str | None:
        """The data version of `asset` that it was made from."""
        return self.tags.get(input_version_tag(asset))


def input_version_tag(asset: dg.AssetKey) -> str:
    """The tag of a materialization that tells the data version of `asset` that it was made from."""
    return f"dagster/input_data_version/{asset.to_user_string()}"


def latest_of(instance: dg.DagsterInstance, keys: Sequence[dg.AssetKey]) -> dict[dg.AssetKey, Materialization]:
    """The latest materialization of each of the assets."""
    entries = [record.asset_entry for record in instance.get_asset_records(keys)]
    return {key: Materialization() for key in keys} | {entry.asset_key: _latest(entry) for entry in entries}


def _latest(entry: AssetEntry) -> Materialization:
    event = entry.last_materialization
    if event is None or event.asset_materialization is None:
        return Materialization(last_run=entry.last_run_id)
    found = Materialization.of(event.asset_materialization)
    return replace(found, run=event.run_id, time=event.timestamp, last_run=entry.last_run_id)


def made_in(instance: dg.DagsterInstance, run_id: str) -> dict[dg.AssetKey, Materialization]:
    """What a run has materialized so far."""
    records = instance.get_records_for_run(run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION).records
    events = [recorded for record in records if (recorded := record.event_log_entry.asset_materialization) is not None]
    return {event.asset_key: Materialization.of(event) for event in events}


@dataclass(frozen=True)
class Ancestor:
    """An artifact that another one was made from, directly or not, and how it was made when it was last materialized."""

    fingerprint: str
    derivation: Derivation


@dataclass(frozen=True)
class History:
    """What was materialized of a pipeline when it was first asked, and the artifacts behind that in the store.

    With `run_id`, for an asset that this run has materialized, that is what it materialized: another run, of newer data say,
    may have recorded other inputs since, and what a run makes has to fit together. Who asks of some assets only names them:
    what is recorded of one, with its tables and pictures, takes milliseconds to read.
    """

    instance: dg.DagsterInstance
    pipeline: Pipeline
    store: Store
    run_id: str | None = None
    assets: Collection[str] = tuple(GRAPH)

    @cached_property
    def _latest(self) -> dict[dg.AssetKey, Materialization]:
        found = latest_of(self.instance, [self.pipeline.key(asset) for asset in self.assets])
        return found if self.run_id is None else found | made_in(self.instance, self.run_id)

    def latest(self, asset: str) -> Materialization:
        return self._latest[self.pipeline.key(asset)]

    def find(self, asset: str) -> Artifact | None:
        """The artifact of `asset` as last materialized, verified; None if it never was. Raises StoreError."""
        found = self.latest(asset).fingerprint
        return None if found is None else self.store.open(asset, found)

    def fingerprint(self, asset: str) -> str:
        """That of the latest materialization. Raises UsageError if there is none."""
        if (found := self.latest(asset).fingerprint) is None:
            raise UsageError(
                f"{self.pipeline.name}/{asset} was never materialized; run `pedigree run {self.pipeline.argument}` first"
            )
        return found

    def artifact(self, asset: str) -> Artifact:
        """The artifact of `asset` as last materialized, verified. Raises UsageError if it never was, StoreError."""
        return self.store.open(asset, self.fingerprint(asset))

    def made_from(self, asset: str) -> Derivation | None:
        """How `asset` was made when it was last materialized; None where that is no longer known. Raises CorruptRecord."""
        recorded = self.latest(asset)
        if asset == "released_model":  # its artifact is in the registry, so its derivation is with the materialization
            told = recorded.metadata.get("derivation")
            return None if told is None else Derivation.model_validate(told)
        return None if recorded.key is None else self.store.derivation(asset, recorded.key)

    def derivation(self, asset: str, fingerprint: str) -> Derivation:
        """How the artifact `fingerprint` of `asset` was made when it was last materialized.

        Its manifest names the first way that led to its content. That is the answer where the latest way is unknown: another
        artifact was materialized since, or its record is gone. Raises StoreError if there is no such artifact either.
        """
        found = self.latest(asset)
        if found.fingerprint == fingerprint and found.key is not None:
            derivation = self.store.derivation(asset, found.key)
            if derivation is not None:
                return derivation
        return self.store.open(asset, fingerprint, hashes=False).manifest.made_from

    def ancestry(self, heads: Mapping[str, str]) -> dict[str, Ancestor]:
        """The `heads` (fingerprints by kind) and all their ancestors, by kind. Raises StoreError if one is gone."""
        found: dict[str, Ancestor] = {}
        waiting = list(heads.items())
        while waiting:
            kind, fingerprint = waiting.pop()
            if kind not in found:
                derivation = self.derivation(kind, fingerprint)
                found[kind] = Ancestor(fingerprint, derivation)
                waiting += [(source.kind, source.fingerprint) for source in derivation.inputs.values()]
        return found

    def lineage(self, heads: Mapping[str, str]) -> dict[str, str]:
        """The fingerprints of `ancestry`, by kind. Raises StoreError if one is gone."""
        return {kind: ancestor.fingerprint for kind, ancestor in self.ancestry(heads).items()}

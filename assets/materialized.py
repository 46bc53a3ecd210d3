"""What Dagster recorded when an asset was materialized, and how the artifacts behind that were made."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import dagster as dg

from assets.pipeline import Pipeline
from training.contract.manifest import Derivation
from training.contract.store import Store


@dataclass(frozen=True)
class Materialization:
    """A materialization of an asset; all fields are empty where there is none.

    `fingerprint` is its data version, `metadata` holds the plain values of what it showed.
    """

    fingerprint: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

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
        return self.tags.get(f"dagster/input_data_version/{asset.to_user_string()}")


def latest(instance: dg.DagsterInstance, key: dg.AssetKey) -> Materialization:
    """The latest materialization of the asset `key`."""
    event = instance.get_latest_materialization_event(key)
    if event is None or (recorded := event.asset_materialization) is None:
        return Materialization()
    return Materialization.of(recorded)


def latest_derivation(
    instance: dg.DagsterInstance, pipeline: Pipeline, store: Store, asset: str, fingerprint: str
) -> Derivation:
    """How the artifact `fingerprint` of `asset` was made when it was last materialized.

    Its manifest names the first way that led to its content. That is the answer where the latest way is unknown: another
    artifact was materialized since, or its record is gone. Raises StoreError if there is no such artifact either.
    """
    found = latest(instance, pipeline.key(asset))
    if found.fingerprint == fingerprint and found.key is not None:
        derivation = store.derivation(asset, found.key)
        if derivation is not None:
            return derivation
    return store.open(asset, fingerprint, hashes=False).manifest.made_from


@dataclass(frozen=True)
class Ancestor:
    """An artifact that another one was made from, directly or not, and how it was made when it was last materialized."""

    fingerprint: str
    derivation: Derivation


def ancestry(
    instance: dg.DagsterInstance, pipeline: Pipeline, store: Store, heads: Mapping[str, str]
) -> dict[str, Ancestor]:
    """The `heads` (fingerprints by kind) and all their ancestors, by kind. Raises StoreError if one is gone."""
    found: dict[str, Ancestor] = {}
    waiting = list(heads.items())
    while waiting:
        kind, fingerprint = waiting.pop()
        if kind not in found:
            derivation = latest_derivation(instance, pipeline, store, kind, fingerprint)
            found[kind] = Ancestor(fingerprint, derivation)
            waiting += [(source.kind, source.fingerprint) for source in derivation.inputs.values()]
    return found

"""What Dagster has on record of the latest materialization of an asset: what it gave, and by which versions it was made."""

from collections.abc import Mapping
from dataclasses import dataclass

import dagster as dg


@dataclass(frozen=True)
class Recorded:
    """The tags of a materialization."""

    tags: Mapping[str, str]

    @property
    def data_version(self) -> str | None:
        return self.tags.get("dagster/data_version")

    @property
    def code_version(self) -> str | None:
        return self.tags.get("dagster/code_version")

    def input_version(self, key: dg.AssetKey) -> str | None:
        """The data version of `key` that it was made from."""
        return self.tags.get(f"dagster/input_data_version/{key.to_user_string()}")


def latest(instance: dg.DagsterInstance, key: dg.AssetKey) -> Recorded | None:
    """None if `key` was never materialized."""
    event = instance.get_latest_materialization_event(key)
    return Recorded(event.asset_materialization.tags or {}) if event and event.asset_materialization else None


def data_version(instance: dg.DagsterInstance, key: dg.AssetKey) -> str | None:
    """The fingerprint that the latest materialization of `key` recorded; None if there is none."""
    found = latest(instance, key)
    return None if found is None else found.data_version

"""Which shards of the caches garbage collection keeps."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from training.contract.config.fields import Dtype
from training.contract.config.json_object import JsonObject
from training.contract.errors import CorruptArtifact
from training.contract.protocol.artifacts import REFERENCE_LOGPROBS, AssetName
from training.contract.protocol.details import PairsDetails, RowsDetails
from training.contract.store.logprob_cache import LogprobCache, scoring_rule
from training.contract.store.manifest import read_manifest
from training.contract.store.row_cache import KEY_BYTES, PairCache, RowCache, TokenCache, keys_of
from training.contract.store.shard_cache import Keys
from training.contract.store.store import Store

# The caches of rows: the kind of artifacts made from them, and a function that returns their rules from its details.
_ROW_CACHES: dict[type[RowCache], tuple[str, Callable[[JsonObject], Collection[str]]]] = {
    PairCache: (AssetName.RAW_PREFERENCES, lambda details: RowsDetails.model_validate(details).pair_rules),
    TokenCache: (AssetName.TOKENIZED_PAIRS, lambda details: PairsDetails.model_validate(details).token_rules),
}
CACHES = (LogprobCache.name, *(cache.name for cache in _ROW_CACHES))
Reference = tuple[str, str]  # kind and fingerprint


class KeptCaches:
    """The shards to keep, given all `kept` artifacts. `keys` returns the keys of every artifact of a kind, by fingerprint.

    The log-prob cache of a kept model is kept whole. A shard of the caches of rows is kept if half of its rows or more are in
    kept preferences. So such a cache is at most twice as large as these need.
    """

    def __init__(
        self, store: Store, kept: Collection[Reference], keys: Callable[[str], Mapping[str, list[str]]]
    ) -> None:
        self._store, self._kept, self._keys = store, kept, keys

    def keep(self, kind: str, name: str) -> bool:
        """Return whether the shard `name` of the cache `kind`, such as `memo/<rule>`, is kept."""
        cache, _, rule = kind.partition("/")
        if cache == LogprobCache.name:
            return rule in self._scoring_rules
        return (kind, name) in self._row_shards

    def _of_kind(self, *kinds: str) -> list[Reference]:
        return [reference for reference in self._kept if reference[0] in kinds]

    @cached_property
    def _scoring_rules(self) -> set[str]:
        """The scoring rules of all kept models and of kept tables."""
        models = self._of_kind(AssetName.REFERENCE_MODEL, AssetName.BASE_MODEL, AssetName.POLICY)
        rules = {scoring_rule(model, dtype) for _, model in models for dtype in get_args(Dtype)}
        for table in self._of_kind(AssetName.REFERENCE_LOGPROBS):
            with suppress(CorruptArtifact):
                folder = self._store.folder(*table)
                rules.add(REFERENCE_LOGPROBS.parse(read_manifest(folder).details, folder).rule)
        return rules

    @cached_property
    def _row_shards(self) -> set[Reference]:
        rows = np.concatenate([np.zeros((0, KEY_BYTES), np.uint8), *self._kept_rows()])
        caches = [cache(self._store, rule) for cache in _ROW_CACHES for rule in self._rules_of(cache)]
        return {(cache.kind, shard) for cache in caches for shard in cache.shards_in_use(rows)}

    def _kept_rows(self) -> Iterator[Keys]:
        for preferences in self._of_kind(AssetName.RAW_PREFERENCES):
            with suppress(OSError, pa.ArrowException):  # a run makes it again, and its tokens
                table = pq.read_table(self._store.folder(*preferences) / "preferences.parquet", columns=["identity"])
                yield keys_of(table["identity"].to_pylist())

    def _rules_of(self, cache: type[RowCache]) -> set[str]:
        """Return the rules of all derivations of kept artifacts."""
        kind, rules_in = _ROW_CACHES[cache]
        rules: set[str] = set()
        keys = self._keys(kind)
        for _, fingerprint in self._of_kind(kind):
            with suppress(CorruptArtifact):
                rules.update(rules_in(read_manifest(self._store.folder(kind, fingerprint)).details))
            for key in keys.get(fingerprint, []):
                if (record := self._store.record(kind, key)) is not None:
                    rules.update(rules_in(record.details))
        return rules

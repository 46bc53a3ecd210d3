"""Garbage collection: find and remove unreferenced files under PEDIGREE_HOME.

Four references keep an artifact and all its ancestors.

A version of any model in the registry refers to its lineage by its tags. The gate's ledger refers to the scores of promoted
and waiting candidates, and these to their pairs.

The latest materialization of any asset in this Dagster instance refers to its artifact, fresh or stale.

A job in progress refers to its key, because it holds the lock.

An unfinished run refers to every artifact that was made or used since it began, because Dagster may not have recorded it yet.

The log-prob cache of a kept model is kept whole, as it makes scoring cheap. A shard of the caches of
rows is kept if at least half of its rows are in kept preferences. An interrupted job keeps its folder as long as it
has checkpoints, and an unreadable job keeps it for a day. Downloaded versions stay if an alias points at them, and all stay
while a run is unfinished.

The rest is removed: other artifacts, folders of ended jobs, abandoned staging folders, corrupt artifacts set aside. Each is
removed under the lock of its users, so an item in use again stays. Downloads lack such a lock, and stay if a run has begun.
Folders behind a symbolic link stay too.

Dagster's records of automation conditions, megabytes for each run, are removed after 30 days. Dagster removes them only if its
daemon evaluates the conditions; ours are evaluated in the code of the recipes.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path

import dagster as dg

from assets.bodies.release.released_model import check_releases_exist
from assets.execution.instance_ids import check_same_instance
from assets.execution.run_liveness import BEGUN, fail_orphaned_runs
from assets.lineage.history import Materialization, latest_of, made_in
from assets.pipeline.graph import GRAPH
from assets.pipeline.pipeline import Services
from model_registry.gate.ledger import Hypothesis, Ledger, State
from model_registry.model_version import MERGED
from training.contract.errors import CorruptArtifact, CorruptRecord
from training.contract.protocol.artifacts import AssetName
from training.contract.store.manifest import Manifest, Source, read_manifest
from training.contract.store.removal import freed_bytes, keys_by_fingerprint, remove_artifact
from training.contract.system.locks import holding
from workflows.commands.gc_caches import CACHES, KeptCaches
from workflows.commands.gc_jobs import JobFolders, folders_in

Reference = tuple[str, str]  # kind and fingerprint

_KINDS = (*GRAPH, MERGED, "proof")
_UNFINISHED_RUNS = dg.RunsFilter(statuses=[dg.DagsterRunStatus.QUEUED, *BEGUN])
_EVALUATIONS_SECONDS = 30 * 24 * 3600.0


@dataclass(frozen=True)
class GarbageItem:
    """`kind`: an artifact's kind, `memo/<rule>`, or `job`, `staging`, `corrupt`, `download` with a name as `fingerprint`."""

    kind: str
    fingerprint: str
    bytes: int


@dataclass(frozen=True)
class GcReport:
    """`kept` counts the kept artifacts; `deleted`: whether the garbage was deleted or only listed."""

    garbage: list[GarbageItem]
    bytes: int
    kept: int
    deleted: bool


def collect(services: Services, instance: dg.DagsterInstance, delete: bool = False) -> GcReport:
    """List unreferenced files, and remove them if `delete`.

    Raises RegistryError if the registry does not answer or is another one, and StoreError if Dagster's instance is another
    one. Raises CorruptRecord if the ancestors of a current artifact are unknown: a run repairs that record.
    """
    check_same_instance(instance, services.home)
    fail_orphaned_runs(instance, services.home)
    sweep = GarbageCollector(services, instance)
    garbage = list(sweep.garbage())
    if delete:
        garbage = [item for item in garbage if sweep.remove(item)]
        if (storage := instance.schedule_storage) is not None:
            storage.purge_asset_evaluations(time.time() - _EVALUATIONS_SECONDS)
    return GcReport(garbage, sum(item.bytes for item in garbage), len(sweep.kept), delete)


class GarbageCollector:
    """A snapshot of all files and references, and the removal of garbage."""

    def __init__(self, services: Services, instance: dg.DagsterInstance):
        self._services, self._store, self._instance = services, services.store, instance
        # List files before references: a file made or used later is not garbage.
        self._used = {reference: self._store.used(*reference) for reference in self._artifacts()}
        self._keys = cache(partial(keys_by_fingerprint, self._store))
        self._folders = {name: folders_in(self._store.root / name) for name in ("staging", "corrupt")}
        self._jobs = JobFolders(services)
        self._since = self._oldest_unfinished_run()

    def garbage(self) -> Iterator[GarbageItem]:
        kept = self.kept  # first, as it raises if references are unknown
        for kind, name in self._used:
            if (kind, name) not in kept and not self._caches.keep(kind, name):
                yield _garbage_item(kind, self._store.folder(kind, name))
        yield from (_garbage_item("job", folder) for folder in self._jobs.folders if self._jobs.is_finished(folder))
        yield from (
            _garbage_item("staging", folder) for folder in self._folders["staging"] if self._jobs.is_abandoned(folder)
        )
        yield from (_garbage_item("corrupt", folder) for folder in self._folders["corrupt"])
        if self._since is None:
            for name in self._services.registry.outdated_downloads():
                yield GarbageItem("download", name, freed_bytes(self._services.registry.downloads / name))

    def remove(self, item: GarbageItem) -> bool:
        """Remove the item; return False if it is in use again."""
        match item.kind:
            case "job":
                folder = self._services.home / "jobs" / item.fingerprint
                return _remove(folder, self._jobs.locks_of(folder), lambda: self._jobs.has_ended(folder))
            case "staging":
                folder = self._store.root / "staging" / item.fingerprint
                return self._jobs.is_abandoned(folder) and _remove(folder, [self._jobs.lock_of_staging(folder)])
            case "corrupt":
                return _remove(self._store.root / "corrupt" / item.fingerprint)
            case "download":
                unused = self._oldest_unfinished_run() is None
                return unused and self._services.registry.remove_download(item.fingerprint)
        keys = self._keys(item.kind).get(item.fingerprint, [])
        used = self._used[item.kind, item.fingerprint]
        return remove_artifact(self._store, item.kind, item.fingerprint, keys, used)

    @cached_property
    def kept(self) -> set[Reference]:
        """All referenced artifacts and their ancestors."""
        kept: set[Reference] = set()
        waiting = [
            *self._registered(),
            *self._materialized(),
            *chain.from_iterable(_references(job.inputs) for job in self._jobs.in_progress()),
            *self._recent(),
        ]
        while waiting:
            reference = waiting.pop()
            if reference in kept:
                continue
            kept.add(reference)
            if (manifest := self._manifest(*reference)) is not None:
                waiting += _references(manifest.made_from.inputs)
        return {(kind, fingerprint) for kind, fingerprint in kept if self._store.folder(kind, fingerprint).is_dir()}

    def _artifacts(self) -> Iterator[Reference]:
        rules = [f"{cache}/{rule.name}" for cache in CACHES for rule in folders_in(self._store.root / cache)]
        yield from ((kind, folder.name) for kind in (*_KINDS, *rules) for folder in folders_in(self._store.root / kind))

    def _registered(self) -> Iterator[Reference]:
        versions = self._services.registry.versions()
        check_releases_exist(self._services.registry, versions, self._latest)
        for version in versions:
            yield from (
                (kind, fingerprint) for kind in _KINDS if (fingerprint := version.fingerprint_of(kind)) is not None
            )
        for model in sorted({version.name for version in versions}):
            entries = Ledger.read(self._services.registry.connection, model).entries
            waiting = {entry.policy for entry in entries if entry.state == State.WAITING}
            for entry in entries:
                if entry.state == State.PROMOTED or entry.policy in waiting:  # its earlier pairs do not count again
                    yield from _scores_of(entry)

    @cached_property
    def _latest(self) -> dict[dg.AssetKey, Materialization]:
        return latest_of(self._instance, self._instance.get_asset_keys())

    def _materialized(self) -> Iterator[Reference]:
        """Yield the latest materializations and, for unfinished runs, their own ones: such a run continues from these."""
        maps = [self._latest]
        maps += [made_in(self._instance, run.run_id) for run in self._instance.get_runs(_UNFINISHED_RUNS)]
        for key, recorded in chain.from_iterable(some.items() for some in maps):
            asset = key.path[-1]
            if asset not in GRAPH or recorded.fingerprint is None:
                continue
            yield asset, recorded.fingerprint
            if recorded.key is not None:
                yield from self._inputs(asset, recorded.fingerprint, recorded.key)

    def _inputs(self, kind: str, fingerprint: str, key: str) -> list[Reference]:
        """Return the inputs of the artifact in the derivation `key`. Raises CorruptRecord if they are unknown."""
        try:
            derivation = self._store.derivation(kind, key)
        except CorruptRecord:
            manifest = self._manifest(kind, fingerprint)
            if manifest is None or manifest.made_from.key != key:
                raise
            derivation = manifest.made_from
        return [] if derivation is None else _references(derivation.inputs)

    def _recent(self) -> Iterator[Reference]:
        """Yield artifacts made or used by an unfinished run, perhaps before Dagster recorded them."""
        if self._since is not None:
            begin_ns = int(self._since.timestamp()) * 10**9
            yield from (reference for reference, used in self._used.items() if used is not None and used >= begin_ns)

    @cached_property
    def _caches(self) -> KeptCaches:
        return KeptCaches(self._store, self.kept, self._keys)

    def _manifest(self, kind: str, fingerprint: str) -> Manifest | None:
        try:
            return read_manifest(self._store.folder(kind, fingerprint))
        except CorruptArtifact:
            return None

    def _oldest_unfinished_run(self) -> datetime | None:
        records = self._instance.get_run_records(_UNFINISHED_RUNS)
        return min((record.create_timestamp for record in records), default=None)


def _scores_of(entry: Hypothesis) -> Iterator[Reference]:
    """Yield the artifacts from which the evidence of a hypothesis can be computed again."""
    if entry.held_out is not None:
        yield AssetName.EVALUATION, entry.held_out.evaluation
        yield AssetName.EVALUATION, entry.held_out.champions
    yield AssetName.RAW_PREFERENCES, entry.rows
    yield from ((AssetName.PREQUENTIAL_SCORES, source) for source in entry.arrivals)


def _garbage_item(kind: str, folder: Path) -> GarbageItem:
    return GarbageItem(kind, folder.name, freed_bytes(folder))


def _remove(folder: Path, locks: Sequence[Path] = (), is_garbage: Callable[[], bool] = lambda: True) -> bool:
    """Remove the folder, holding its `locks`. Return False if one is held, or the folder is no longer garbage."""
    with holding(locks) as free:
        removed = free and is_garbage()
        if removed:
            shutil.rmtree(folder, ignore_errors=True)
    return removed


def _references(inputs: Mapping[str, Source]) -> list[Reference]:
    return [(source.kind, source.fingerprint) for source in inputs.values()]

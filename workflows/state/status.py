"""Which assets of a recipe are fresh, stale or missing now, and why.

An asset is fresh if a run would give its latest materialization (expected_state.py). If an input is not made yet, everything
downstream counts as stale, although the run may give the same artifact.

A cause is reported at its asset (`loss.beta 0.1 -> 0.2`) and, after the name of that asset, at every affected asset. So every
stale asset names the user's change, however far upstream, never an asset that is only stale.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import dagster as dg

from assets.bodies.release.released_model import release_problem
from assets.inputs.current import ROOTS
from assets.lineage.causes import Cause, CauseFinder, CurrentDerivation, cause_texts
from assets.lineage.diff import CORRUPT_RECORD, NO_RECORD, changes_since, own_changes
from assets.lineage.history import History, Materialization
from assets.pipeline.graph import GRAPH, read_settings
from assets.pipeline.pipeline import Pipeline, Services
from model_registry.gate.anytime import waiting_sentences
from model_registry.gate.ledger import Ledger
from training.contract.config.key_settings import key_settings
from training.contract.errors import CorruptRecord, RegistryError
from training.contract.identity.fingerprint import short
from training.contract.protocol.artifacts import AssetName
from training.contract.protocol.job import job_folder
from training.contract.store.manifest import Derivation
from training.launch.live_jobs import live_state, submitted_job
from workflows.state.expected_state import ExpectedState, expect_state

State = Literal["fresh", "stale", "missing"]

NEVER = "never materialized"
LOST = "its files are no longer in the store"


@dataclass(frozen=True)
class AssetStatus:
    """`fingerprint` identifies the latest materialization; `causes` are the reasons for a new one.

    A fresh asset has causes only if it is a released model and the registry is unavailable. `job`: the state of its job in the
    queue of an engine; None without one. `notes`: of the released model, the evidence so far of each waiting candidate.
    """

    asset: str
    state: State
    causes: tuple[str, ...]
    fingerprint: str | None
    job: str | None = None
    notes: tuple[str, ...] = ()


def status(pipeline: Pipeline, services: Services, instance: dg.DagsterInstance) -> list[AssetStatus]:
    """Return the state of every asset, in the order of the graph. Raises the errors of reading sources."""
    history, expected = History(instance, pipeline, services.store), expect_state(pipeline, services)
    found = judge(history, services, expected)
    return [replace(asset, job=job_state(services, expected[asset.asset].derivation)) for asset in found]


def job_state(services: Services, derivation: Derivation | None) -> str | None:
    """Return the state of the live job for `derivation`; None without one. No engine is asked without a record of a job."""
    job = None if derivation is None else submitted_job(job_folder(services.home, derivation))
    if job is None or derivation is None or job.derivation.key != derivation.key:
        return None
    state = live_state(services.engine, job)
    return None if state is None else state.text


def judge(history: History, services: Services, expected: ExpectedState) -> Iterator[AssetStatus]:
    """Yield the state of every asset, with `expected` as the result of a run.

    Only the last one, the released model, asks the registry.
    """
    return map(_StatusResolver(history, services, expected).asset, GRAPH)


class _StatusResolver:
    """Resolves the states in the order of the graph: the causes upstream are known before those downstream."""

    def __init__(self, history: History, services: Services, expected: ExpectedState):
        self._history, self._pipeline = history, history.pipeline
        self._services, self._expected = services, expected
        self._causes: dict[str, list[Cause]] = {}
        self._explainer = CauseFinder(services.store, self._current, _made_from, self._causes.__getitem__)

    def asset(self, asset: str) -> AssetStatus:
        found = self._state_of(asset)
        return replace(found, notes=self._waiting()) if asset == AssetName.RELEASED_MODEL else found

    def _waiting(self) -> tuple[str, ...]:
        """Return the evidence of the waiting candidates; nothing if the registry does not answer."""
        release = self._pipeline.recipe.release
        if release.gate.type != "anytime":
            return ()
        try:
            ledger = Ledger.read(self._services.registry.connection, release.model_name)
        except RegistryError:
            return ()
        return tuple(waiting_sentences(ledger, self._pipeline.name))

    def _state_of(self, asset: str) -> AssetStatus:
        recorded = self._history.latest(asset)
        if recorded.fingerprint is None:
            self._causes[asset] = [(asset, NEVER)]
            return AssetStatus(asset, "missing", (NEVER,), None)
        if self._expected[asset].fingerprint == recorded.fingerprint:
            self._causes[asset] = []
            if asset == AssetName.RELEASED_MODEL:
                return self._released_status(recorded.fingerprint)
            return AssetStatus(asset, "fresh", (), recorded.fingerprint)
        self._causes[asset] = list(dict.fromkeys(self._find_causes(asset, recorded)))
        return AssetStatus(asset, "stale", tuple(cause_texts(asset, self._causes[asset])), recorded.fingerprint)

    def _released_status(self, key: str) -> AssetStatus:
        """Return the state of an unchanged release: fresh if the registry has it, or does not answer within seconds."""
        try:
            cause = release_problem(self._services, self._pipeline, key)
        except RegistryError as error:
            return AssetStatus(
                AssetName.RELEASED_MODEL.value, "fresh", (f"its version could not be checked: {error}",), key
            )
        if cause is None:
            return AssetStatus(AssetName.RELEASED_MODEL.value, "fresh", (), key)
        return AssetStatus(AssetName.RELEASED_MODEL.value, "stale", (cause,), key)

    def _find_causes(self, asset: str, recorded: Materialization) -> Iterator[Cause]:
        if (fault := self._expected[asset].fault) is not None:
            yield asset, fault
            return
        try:
            yield from self._find_differences(asset, recorded)
        except CorruptRecord:
            yield asset, CORRUPT_RECORD

    def _find_differences(self, asset: str, recorded: Materialization) -> Iterator[Cause]:
        """Yield the differences between the materialization and the expected artifact. Raises CorruptRecord."""
        found = self._expected[asset].found
        if found is not None and not self._is_lost(asset, recorded.key):
            yield from ((asset, change) for change in changes_since(self._services.store, recorded.key, found))
            return
        derivation = None if asset in ROOTS else self._history.made_from(asset)
        causes = list(self._inputs_alone(asset) if derivation is None else self._derivation_changes(asset, derivation))
        yield from causes
        if not causes:
            yield asset, LOST if derivation is not None or asset in ROOTS else NO_RECORD

    def _is_lost(self, asset: str, key: str | None) -> bool:
        """Return whether a run would repeat the materialized derivation because its artifact is missing."""
        derivation = self._expected[asset].derivation
        return derivation is not None and derivation.key == key and self._expected[asset].fingerprint is None

    def _inputs_alone(self, asset: str) -> Iterator[Cause]:
        for name in GRAPH[asset].inputs(self._pipeline.recipe):
            yield from self._causes[name]

    def _derivation_changes(self, asset: str, before: Derivation) -> Iterator[Cause]:
        current = self._current(asset, None)
        yield from ((asset, change) for change in own_changes(before, current.version, current.settings))
        yield from self._explainer.inherited(asset, before, current)

    def _current(self, asset: str, fingerprint: str | None) -> CurrentDerivation:
        """Return the derivation in a run now."""
        node, recipe = GRAPH[asset], self._pipeline.recipe
        inputs: dict[str, str | None] = {name: self._expected[name].fingerprint for name in node.inputs(recipe)}
        return CurrentDerivation(
            node.version,
            key_settings(read_settings(asset, recipe, self._pipeline.name)),
            inputs,
            self._expected[asset].found,
        )


def _made_from(name: str, old: str, new: str | None) -> str:
    return f"it was made from {name} {short(old)}, now {short(new)}"

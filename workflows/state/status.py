"""Which assets of a recipe are fresh, stale or missing now, and why.

An asset is fresh if a run would give the artifact that was last materialized (expected_state.py). While an input has yet to be
made, everything that depends on it counts as stale, although the run may find that the new artifact equals the old one.

A cause is given where it arises (`loss.beta 0.1 -> 0.2`) and, behind the name of that asset, wherever it has an effect. So
every stale asset names what a person did, however far upstream, and never an asset that is itself only stale.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import dagster as dg

from assets.bodies.release import release_problem
from assets.inputs.current import ROOTS
from assets.lineage.causes import Cause, CauseFinder, CurrentDerivation, in_words
from assets.lineage.diff import CORRUPT_RECORD, NO_RECORD, changes_since, own_changes
from assets.lineage.history import History, Materialization
from assets.pipeline.graph import GRAPH
from assets.pipeline.pipeline import Pipeline, Services
from training.contract.errors import CorruptRecord, RegistryError
from training.contract.identity.fingerprint import short
from training.contract.store.manifest import Derivation
from workflows.state.expected_state import ExpectedState, expect_state

State = Literal["fresh", "stale", "missing"]

NEVER = "never materialized"
LOST = "its files are no longer in the store"


@dataclass(frozen=True)
class AssetStatus:
    """`fingerprint` is that of the latest materialization; `causes` say why a run would give another one now.

    A fresh asset has none, except a released model whose registry does not answer: then a cause says so.
    """

    asset: str
    state: State
    causes: tuple[str, ...]
    fingerprint: str | None


def status(pipeline: Pipeline, services: Services, instance: dg.DagsterInstance) -> list[AssetStatus]:
    """The state of every asset, in the order of the graph. Raises what looking at the sources raises."""
    history = History(instance, pipeline, services.store)
    return list(judge(history, services, expect_state(pipeline, services)))


def judge(history: History, services: Services, expected: ExpectedState) -> Iterator[AssetStatus]:
    """The state of every asset, if a run would give `expected`; the registry is asked last, for the released model."""
    return map(_StatusResolver(history, services, expected).asset, GRAPH)


class _StatusResolver:
    """Judges assets in the order of the graph: the causes of those above are known when those below ask for them."""

    def __init__(self, history: History, services: Services, expected: ExpectedState):
        self._history, self._pipeline = history, history.pipeline
        self._services, self._expected = services, expected
        self._causes: dict[str, list[Cause]] = {}
        self._explainer = CauseFinder(services.store, self._now, _made_from, self._causes.__getitem__)

    def asset(self, asset: str) -> AssetStatus:
        recorded = self._history.latest(asset)
        if recorded.fingerprint is None:
            self._causes[asset] = [(asset, NEVER)]
            return AssetStatus(asset, "missing", (NEVER,), None)
        if self._expected[asset].fingerprint == recorded.fingerprint:
            self._causes[asset] = []
            if asset == "released_model":
                return self._released(recorded.fingerprint)
            return AssetStatus(asset, "fresh", (), recorded.fingerprint)
        self._causes[asset] = list(dict.fromkeys(self._find_causes(asset, recorded)))
        return AssetStatus(asset, "stale", tuple(in_words(asset, self._causes[asset])), recorded.fingerprint)

    def _released(self, key: str) -> AssetStatus:
        """A model that a run would release again: fresh if the registry has it, or does not answer within seconds."""
        try:
            cause = release_problem(self._services, self._pipeline, key)
        except RegistryError as error:
            return AssetStatus("released_model", "fresh", (f"its version is taken to be there: {error}",), key)
        if cause is None:
            return AssetStatus("released_model", "fresh", (), key)
        return AssetStatus("released_model", "stale", (cause,), key)

    def _find_causes(self, asset: str, recorded: Materialization) -> Iterator[Cause]:
        if (fault := self._expected[asset].fault) is not None:
            yield asset, fault
            return
        try:
            yield from self._compared(asset, recorded)
        except CorruptRecord:
            yield asset, CORRUPT_RECORD

    def _compared(self, asset: str, recorded: Materialization) -> Iterator[Cause]:
        """How what was materialized differs from what a run would give. Raises CorruptRecord."""
        found = self._expected[asset].found
        if found is not None and not self._is_lost(asset, recorded.key):
            yield from ((asset, words) for words in changes_since(self._services.store, recorded.key, found))
            return
        before = None if asset in ROOTS else self._history.made_from(asset)
        differing = list(self._inputs_alone(asset) if before is None else self._differing(asset, before))
        yield from differing
        if not differing:
            yield asset, LOST if before is not None or asset in ROOTS else NO_RECORD

    def _is_lost(self, asset: str, key: str | None) -> bool:
        """Whether a run would repeat the derivation that was materialized, and what that gave is gone."""
        how = self._expected[asset].derivation
        return how is not None and how.key == key and self._expected[asset].fingerprint is None

    def _inputs_alone(self, asset: str) -> Iterator[Cause]:
        for name in GRAPH[asset].inputs(self._pipeline.recipe):
            yield from self._causes[name]

    def _differing(self, asset: str, before: Derivation) -> Iterator[Cause]:
        now = self._now(asset, None)
        yield from ((asset, words) for words in own_changes(before, now.version, now.settings))
        yield from self._explainer.inherited(asset, before, now)

    def _now(self, asset: str, fingerprint: str | None) -> CurrentDerivation:
        """How a run would make it."""
        node, recipe = GRAPH[asset], self._pipeline.recipe
        inputs = {name: self._expected[name].fingerprint for name in node.inputs(recipe)}
        return CurrentDerivation(node.version, node.reads(recipe), inputs, self._expected[asset].found)


def _made_from(name: str, old: str, now: str | None) -> str:
    return f"it was made from {name} {short(old)}, which is {short(now)} now"

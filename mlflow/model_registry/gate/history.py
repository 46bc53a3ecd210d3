"""The history of a registered model: every candidate with its decision, and every hypothesis with its evidence over time.

It is read from the registry's tags alone. The scores behind the evidence are in the store.
"""

from dataclasses import dataclass
from typing import Any

from model_registry.gate.anytime import Standing, amount
from model_registry.gate.ledger import Bet, Hypothesis, Ledger, State
from model_registry.model_version import DECISION_TAG, REASONS_TAG, ROLLED_BACK_TAG, Version
from model_registry.registry import Registry
from training.contract.protocol.artifacts import AssetName


@dataclass(frozen=True)
class Candidate:
    """A version. `decision`: champion, was champion, rolled back, waits, rejected, or not decided."""

    version: int
    decision: str
    policy: str | None
    reasons: str


@dataclass(frozen=True)
class Evidence:
    """The evidence after a bet. `pairs`: held-out or arriving. The other fields are as in `Bet`."""

    time: str
    pairs: str
    prompts: int
    evidence: float
    mean: float
    low: float
    high: float
    clipped: float
    scores: str


@dataclass(frozen=True)
class Comparison:
    """A hypothesis. `evidence` over time; `evidence_needed` for a promotion now, or at the promotion."""

    number: int
    candidate: int
    champion: int
    recipe: str
    state: str
    metric: str
    alpha: float
    level: float
    evidence_needed: float
    clip: float | None
    started: str
    ended: str | None
    reason: str
    prompts_needed: int | None
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True)
class ModelHistory:
    """Candidates and comparisons, the latest first. `promotions`: by the gate `anytime`, beside the first champion."""

    model: str
    champion: int | None
    promotions: int
    candidates: tuple[Candidate, ...]
    comparisons: tuple[Comparison, ...]


def model_history(registry: Registry, name: str) -> ModelHistory:
    """Return the history of the model `name`. Raise UnknownModel or RegistryError."""
    registry.check_registered(name)
    ledger, champion = Ledger.read(registry.connection, name), registry.champion(name)
    number = None if champion is None else champion.number
    candidates = tuple(_candidate(version, number, ledger) for version in registry.versions(name))
    comparisons = tuple(_comparison(entry, ledger) for entry in reversed(ledger.entries))
    return ModelHistory(name, number, ledger.promotions, candidates, comparisons)


def _candidate(version: Version, champion: int | None, ledger: Ledger) -> Candidate:
    policy = version.fingerprint_of(AssetName.POLICY)
    return Candidate(version.number, _decision(version, champion, ledger), policy, version.tags.get(REASONS_TAG, ""))


def _decision(version: Version, champion: int | None, ledger: Ledger) -> str:
    if version.number == champion:
        return "champion"
    if ROLLED_BACK_TAG in version.tags:
        return "rolled back"
    if version.tags.get(DECISION_TAG) == "yes":
        return "was champion"
    if any(entry.state == State.WAITING and entry.candidate == version.number for entry in ledger.entries):
        return "waits"
    return "rejected" if DECISION_TAG in version.tags else "not decided"


def _comparison(entry: Hypothesis, ledger: Ledger) -> Comparison:
    standing = Standing.of(entry, ledger)
    return Comparison(
        number=entry.number,
        candidate=entry.candidate,
        champion=entry.champion,
        recipe=entry.recipe,
        state=entry.state.value,
        metric=entry.metric.value,
        alpha=entry.alpha,
        level=standing.level,
        evidence_needed=amount(standing.needed),
        clip=entry.clip,
        started=entry.started,
        ended=entry.ended,
        reason=entry.reason,
        prompts_needed=entry.prompts_needed,
        evidence=tuple(_evidence(entry, bet) for bet in entry.bets),
    )


def _evidence(entry: Hypothesis, bet: Bet) -> Evidence:
    is_held_out = entry.held_out is not None and bet.source == entry.held_out.evaluation
    fields: dict[str, Any] = bet.model_dump(exclude={"log_evidence", "source"})
    return Evidence(
        pairs="held-out" if is_held_out else "arriving", evidence=amount(bet.log_evidence), scores=bet.source, **fields
    )

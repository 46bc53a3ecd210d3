"""The ledger of a registered model: every comparison of a candidate with a champion, with its evidence and its end.

One comparison is a hypothesis: "the candidate is not better". Its entry is a tag of the registered model, so that it survives
the deletion of a version. The scores are in the store; the entry names them by fingerprint, and anybody can recompute it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from pydantic import ValidationError

from model_registry.connection import Connection
from model_registry.gate.e_lond import level
from model_registry.gate.scores import GateMetric
from training.contract.errors import RegistryError
from training.contract.store.artifact_kind import StoredModel

_TAG = "pedigree.hypothesis."
# A database keeps 5,000 characters of a tag.
MOST_BETS = 12


class State(StrEnum):
    """The state of a hypothesis. All but the first are final."""

    WAITING = "waiting"
    PROMOTED = "promoted"
    SUPERSEDED = "superseded"  # another champion; the candidate goes on under a new hypothesis, if it still waits
    RETIRED = "retired"


class Bet(StoredModel):
    """The evidence after one more batch of prompts. `source`: the fingerprint of the scores.

    They are a `prequential_scores`, or the candidate's `evaluation` for held-out pairs. `mean` and its interval [`low`,
    `high`] (95%, valid at all times at once) are of all differences so far, clipped, in the unit of the metric. A positive
    difference favours the candidate. `clipped`: the share of prompts so far whose difference was clipped.
    """

    source: str
    time: str
    prompts: int
    log_evidence: float
    mean: float
    low: float
    high: float
    clipped: float


class HeldOut(StoredModel):
    """The fingerprints of the candidate's and the champion's evaluation, and the number of shared prompts for the clip."""

    evaluation: str
    champions: str
    prompts_for_clip: int


class Hypothesis(StoredModel):
    """One entry. `candidate` and `champion` are version numbers; `policy` and `champions_policy` their fingerprints.

    `clip`: the largest counted difference; None until pairs are scored to choose it. `held_out`: the pairs that chose the clip
    or started the capital. `clip_source`: the scores of arriving pairs that chose the clip, if held-out pairs could not.
    `rows`: the `raw_preferences` at the start; their prompts do not count as arriving. `prompts_needed`: how many more prompts,
    with the differences so far and power 0.8. `level`: at the promotion.
    """

    number: int
    candidate: int
    policy: str
    champion: int
    champions_policy: str
    recipe: str
    alpha: float
    metric: GateMetric
    clip: float | None = None
    clip_source: str | None = None
    held_out: HeldOut | None = None
    rows: str
    started: str
    bets: tuple[Bet, ...] = ()
    prompts_needed: int | None = None
    state: State = State.WAITING
    ended: str | None = None
    level: float | None = None
    reason: str = ""

    @property
    def log_evidence(self) -> float:
        return self.bets[-1].log_evidence if self.bets else 0.0

    @property
    def arrivals(self) -> list[str]:
        """The fingerprints of the scores of arriving pairs that chose the clip or were bet on."""
        held_out = None if self.held_out is None else self.held_out.evaluation
        used = [self.clip_source, *(bet.source for bet in self.bets)]
        return [source for source in used if source is not None and source != held_out]

    @property
    def prompts(self) -> int:
        """The number of prompts bet on."""
        return sum(bet.prompts for bet in self.bets)

    def end(self, state: State, reason: str, at_level: float | None = None) -> "Hypothesis":
        return self.model_copy(update={"state": state, "reason": reason, "ended": now(), "level": at_level})


@dataclass(frozen=True)
class Ledger:
    """All entries of the model `name`, by number, as they were read."""

    connection: Connection
    name: str
    entries: Sequence[Hypothesis]

    @classmethod
    def read(cls, connection: Connection, name: str) -> "Ledger":
        """Raise RegistryError."""
        with connection.reading(f"read the gate's ledger of {name}") as records:
            tags = records.model_tags(name)
        entries = [_parse(name, tag, value) for tag, value in tags.items() if tag.startswith(_TAG)]
        return cls(connection, name, sorted(entries, key=lambda entry: entry.number))

    def write(self, entry: Hypothesis) -> "Ledger":
        """Write `entry` as a tag. Return the ledger with it. Raise RegistryError."""
        with self.connection.asking(f"write the gate's ledger of {self.name}") as client:
            tag = f"{_TAG}{entry.number:05d}"
            client.set_registered_model_tag(self.name, tag, entry.model_dump_json(exclude_defaults=True))
        others = [other for other in self.entries if other.number != entry.number]
        return Ledger(self.connection, self.name, sorted([*others, entry], key=lambda other: other.number))

    @property
    def next_number(self) -> int:
        return max((entry.number for entry in self.entries), default=0) + 1

    @property
    def promotions(self) -> int:
        return sum(entry.state == State.PROMOTED for entry in self.entries)

    def level_of(self, entry: Hypothesis) -> float:
        """Return the level that a hypothesis needs now; for a promoted one, the level at its promotion."""
        return entry.level if entry.level is not None else level(entry.alpha, entry.number, self.promotions)

    def waiting(self, recipe: str) -> list[Hypothesis]:
        """Return the waiting hypotheses of a recipe, the newest candidate first."""
        found = [entry for entry in self.entries if entry.state == State.WAITING and entry.recipe == recipe]
        return sorted(found, key=lambda entry: (entry.candidate, entry.number), reverse=True)

    def of_policy(self, policy: str) -> list[Hypothesis]:
        """Return the hypotheses about a candidate with this policy, in their order."""
        return [entry for entry in self.entries if entry.policy == policy]


def _parse(name: str, tag: str, value: str) -> Hypothesis:
    try:
        return Hypothesis.model_validate_json(value)
    except ValidationError as error:
        raise RegistryError(
            f"the tag {tag} of the registered model {name} does not hold an entry of the gate's ledger: "
            f"{error.error_count()} fields are wrong. Somebody has edited the tag. Restore it from a backup of MLflow. Or "
            "delete it, which gives up this hypothesis",
            "wrong-ledger-entry",
        ) from error


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

"""Evaluations side by side: their different settings, their results, and the noise of the differences.

We compare the latest evaluations with the settings of their time; a note reports settings changed since. Every recipe is
compared with the first one evaluated, pair by pair on the shared held-out pairs. So the difficulty of pairs cancels, and the
standard error is the same as in the gate.

Accuracy is the share of pairs with a positive margin; margin is in nats, before beta. Both mean the same for every loss over
the same reference; a note reports another reference. A loss is compared only with itself: by the gate's rule, under the same
settings and the same reference.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import dagster as dg

from assets.comparison.leakage import find_leakage
from assets.comparison.paired_metrics import accuracy, loss, margin, prompts, rows_by_pair, scale
from assets.comparison.votes import check_exact
from assets.lineage.history import Ancestor, History
from assets.pipeline.pipeline import Pipeline, Services
from model_registry.gate.scores import MIN_PROMPTS, PairedDifference, Prompts, count_prompts, paired_difference
from model_registry.mlflow_types import flatten
from training.contract.errors import PedigreeError, StoreError, UsageError
from training.contract.identity.fingerprint import short, shortened
from training.contract.protocol.artifacts import EVALUATION, RAW_PREFERENCES, AssetName
from workflows.state.expected_state import expect_state
from workflows.state.status import judge

SHOWN_VALUES = {"accuracy": accuracy, "margin": margin, "loss": loss}
# The recipe's section for the settings of an artifact, and the fields of artifacts shown by content instead of path.
_SECTIONS = {
    AssetName.RAW_PREFERENCES: "data",
    AssetName.TOKENIZATION_SPEC: "tokenization",
    AssetName.REFERENCE_MODEL: "reference.sft",
    AssetName.REFERENCE_LOGPROBS: "reference",
    "policy": "training",
    "evaluation": "evaluation",
}
_CONTENTS = {AssetName.PREFERENCE_SOURCE: "data.sources", AssetName.BASE_MODEL: "reference.model"}


@dataclass(frozen=True)
class Evaluated:
    """The last evaluation of a recipe; `values` (by measure, then by pair) are empty if it is missing.

    `settings` have the recipe's dotted names; losses are comparable if their `scale` is equal; `prompts` are by pair.
    `lacks_source`: none of its pairs is from the requested sources.
    """

    recipe: str
    settings: Mapping[str, str] = field(default_factory=dict)
    scale: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    prompts: Prompts = field(default_factory=dict)
    reference: str | None = None
    lacks_source: bool = False


@dataclass(frozen=True)
class Compared:
    """`settings` are those with differences; `means` are over all its pairs, without a loss of another scale."""

    recipe: str
    settings: dict[str, str | None]
    pairs: int
    means: dict[str, float]
    differences: dict[str, PairedDifference]
    notes: list[str]


@dataclass(frozen=True)
class Comparison:
    """`against`: the recipe as the basis of differences; None if nothing was evaluated."""

    against: str | None
    recipes: list[Compared]


def compare(evaluated: Sequence[Evaluated]) -> Comparison:
    """Compare every evaluation with the first one. Recipes without an evaluation have a note.

    Raises UsageError if no recipe has pairs of the requested sources.
    """
    usable = [item for item in evaluated if item.values]
    if not usable and any(item.lacks_source for item in evaluated):
        message = "\n".join(f"{item.recipe}: {'; '.join(item.notes)}" for item in evaluated)
        raise UsageError(message, "unknown-source-name")
    names = dict.fromkeys(name for item in usable for name in item.settings)
    differing = [name for name in names if len({item.settings.get(name) for item in usable}) > 1]
    return Comparison(
        against=usable[0].recipe if usable else None,
        recipes=[
            _compare_with(usable[0], item, differing)
            if item.values
            else Compared(item.recipe, {}, 0, {}, {}, [*item.notes])
            for item in evaluated
        ],
    )


def last_evaluated(
    pipeline: Pipeline, services: Services, instance: dg.DagsterInstance, source: str | None = None
) -> Evaluated:
    """Return the last evaluation of a pipeline. A corrupt one, or one with missing ancestors in the store, counts as missing.

    With `source`, use only the pairs of the sources with that name. Raises UsageError if the recipe hides held-out pairs.
    """
    check_exact(pipeline, "a comparison of evaluations")
    history = History(instance, pipeline, services.store)
    fingerprint = history.latest(AssetName.EVALUATION).fingerprint
    if fingerprint is None:
        return Evaluated(pipeline.name, notes=(f"never evaluated; run `pedigree run {pipeline.argument}` first",))
    try:
        return _read_evaluation(history, services, fingerprint, source)
    except StoreError as error:
        return Evaluated(pipeline.name, notes=(f"its evaluation cannot be used: {error}",))


def _read_evaluation(history: History, services: Services, fingerprint: str, source: str | None) -> Evaluated:
    artifact = services.store.open(EVALUATION, fingerprint)
    rows = rows_by_pair(artifact, source)
    if not rows:
        names = sorted({name for row in rows_by_pair(artifact).values() if (name := row.get("source_name"))})
        note = f"none of its evaluated sources is named `{source}` (names: {', '.join(names) or 'none'})"
        return Evaluated(history.pipeline.name, notes=(note,), lacks_source=True)
    ancestors, scale_of_loss = history.ancestry({AssetName.EVALUATION: fingerprint}), scale(artifact)
    raw_preferences, notes = ancestors[AssetName.RAW_PREFERENCES].fingerprint, _change_notes(history, services)
    leakage = find_leakage(services.store, [ancestors[AssetName.POLICY].fingerprint], rows, raw_preferences)
    if leaked := len(leakage.pairs):
        notes += (f"its starting policies were trained on the prompts of {leaked} of its {len(rows)} pairs",)
    if AssetName.REFERENCE_MODEL not in scale_of_loss:
        notes += ("its loss has no reference: accuracy and margin are measured over the reference in the recipe",)
    return Evaluated(
        recipe=history.pipeline.name,
        settings=_settings(ancestors),
        scale=scale_of_loss,
        values={name: {pair: of(row) for pair, row in rows.items()} for name, of in SHOWN_VALUES.items()},
        notes=notes,
        prompts=prompts(rows, services.store.open(RAW_PREFERENCES, raw_preferences)),
        reference=ancestors[AssetName.REFERENCE_MODEL].fingerprint,
    )


def _compare_with(first: Evaluated, item: Evaluated, differing: Sequence[str]) -> Compared:
    measures = [name for name in SHOWN_VALUES if name != "loss" or item.scale == first.scale]
    pairs, shared = len(item.values["accuracy"]), item.values["accuracy"].keys() & first.values["accuracy"].keys()
    count = count_prompts(shared, item.prompts)
    comparable = item is not first and count >= MIN_PROMPTS
    notes = list(item.notes)
    if len(shared) < max(pairs, len(first.values["accuracy"])):
        few = "" if count >= MIN_PROMPTS else f", too few to compare ({MIN_PROMPTS} prompts are needed)"
        notes.append(f"evaluated on other pairs than {first.recipe}: {len(shared)} of {pairs} are common{few}")
    elif item is not first and not comparable:
        notes.append(
            f"{len(shared)} held-out pairs are too few to see a difference beyond chance ({MIN_PROMPTS} prompts are needed)"
        )
    if item.reference != first.reference:
        notes.append(
            f"its reference differs from {first.recipe}'s, and its accuracy and margin are measured over its own reference"
        )
    return Compared(
        recipe=item.recipe,
        settings={name: item.settings.get(name) for name in differing},
        pairs=pairs,
        means={name: statistics.fmean(item.values[name].values()) for name in measures},
        differences={
            name: paired_difference(item.values[name], first.values[name], item.prompts)
            for name in (measures if comparable else ())
        },
        notes=notes,
    )


def _settings(ancestors: Mapping[str, Ancestor]) -> dict[str, str]:
    """Return the settings of an evaluation, by the names of the recipe's fields. The loss appears only as the policy's."""
    settings = {name: short(ancestors[kind].fingerprint) for kind, name in _CONTENTS.items()}
    for kind, section in _SECTIONS.items():
        section_settings = {
            k: v for k, v in ancestors[kind].derivation.settings.items() if (kind, k) != ("evaluation", "loss")
        }
        settings |= flatten({section: section_settings})
    return {name: shortened(value) for name, value in settings.items()}


def _change_notes(history: History, services: Services) -> tuple[str, ...]:
    """Return a note if a run would now evaluate something else. The released model is not resolved."""
    try:
        statuses = judge(history, services, expect_state(history.pipeline, services))
        status = next(status for status in statuses if status.asset == AssetName.EVALUATION)
    except PedigreeError as error:
        return (f"its current state cannot be resolved: {error}",)
    return (f"evaluated before this changed: {'; '.join(status.causes)}",) if status.causes else ()

"""Evaluations side by side: in which settings they differ, in which results, and how much of that is noise.

What counts is what was last evaluated, with the settings it was made with, whatever the files say by now; a note says where
they differ. Every recipe is compared with the first that was evaluated, pair by pair on the held-out pairs
that both saw: how hard a pair is cancels, and what is left has the standard error that the gate decides by.

Accuracy (the share of pairs whose chosen response the policy prefers more than the reference does) and margin (by how much, in
nats, before beta) mean the same whatever the loss, over the same reference; a note says where it is another. A loss is compared
with itself only: by the gate's rule, under the same settings and the same reference.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import dagster as dg

from assets.comparison.leakage import find_leakage
from assets.comparison.paired_metrics import accuracy, loss, margin, prompts, rows_by_pair, scale
from assets.lineage.history import Ancestor, History
from assets.pipeline.pipeline import Pipeline, Services
from model_registry.gate import MIN_PROMPTS, PairedDifference, Prompts, count_prompts, paired_difference
from model_registry.mlflow_types import flatten
from training.contract.errors import PedigreeError, StoreError, UsageError
from training.contract.identity.fingerprint import short, shortened
from workflows.state.expected_state import expect_state
from workflows.state.status import judge

SHOWN_VALUES = {"accuracy": accuracy, "margin": margin, "loss": loss}
# Whose settings are which section of the recipe, and what stands there by its content, not by a path.
_SECTIONS = {
    "raw_preferences": "data",
    "tokenization_spec": "tokenization",
    "reference_model": "reference.sft",
    "reference_logprobs": "reference",
    "policy": "training",
    "evaluation": "evaluation",
}
_CONTENTS = {"preference_source": "data.sources", "base_model": "reference.model"}


@dataclass(frozen=True)
class Evaluated:
    """The last evaluation of a recipe; without `values` (by measure, then by pair) it has none.

    `settings`: by dotted names, as in the recipe; `scale`: what a loss has to have in common to be compared; `prompts` by pair.
    `lacks_source`: none of its pairs is of the sources that were asked for.
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
    """`settings`: those that are not the same in all; `means`: over its own pairs, without a loss that is of another scale."""

    recipe: str
    settings: dict[str, str | None]
    pairs: int
    means: dict[str, float]
    differences: dict[str, PairedDifference]
    notes: list[str]


@dataclass(frozen=True)
class Comparison:
    """`against`: the recipe that the differences are to; None where nothing was evaluated."""

    against: str | None
    recipes: list[Compared]


def compare(evaluated: Sequence[Evaluated]) -> Comparison:
    """Every evaluation beside the first; those that are none have a word that says so.

    Raises UsageError where there is none because none has pairs of the sources that were asked for.
    """
    seen = [each for each in evaluated if each.values]
    if not seen and any(each.lacks_source for each in evaluated):
        raise UsageError("\n".join(f"{each.recipe}: {'; '.join(each.notes)}" for each in evaluated))
    names = dict.fromkeys(name for each in seen for name in each.settings)
    differing = [name for name in names if len({each.settings.get(name) for each in seen}) > 1]
    return Comparison(
        against=seen[0].recipe if seen else None,
        recipes=[
            _beside(seen[0], each, differing) if each.values else Compared(each.recipe, {}, 0, {}, {}, [*each.notes])
            for each in evaluated
        ],
    )


def last_evaluated(
    pipeline: Pipeline, services: Services, instance: dg.DagsterInstance, source: str | None = None
) -> Evaluated:
    """The last evaluation of a pipeline; one that is corrupt, or stands on what is no longer in the store, is none.

    With `source`, on the pairs of the sources of that name alone.
    """
    history = History(instance, pipeline, services.store)
    found = history.latest("evaluation").fingerprint
    if found is None:
        return Evaluated(pipeline.name, notes=(f"never evaluated; run `pedigree run {pipeline.argument}` first",))
    try:
        return _evaluated(history, services, found, source)
    except StoreError as error:
        return Evaluated(pipeline.name, notes=(f"its evaluation cannot be used: {error}",))


def _evaluated(history: History, services: Services, fingerprint: str, source: str | None) -> Evaluated:
    artifact = services.store.open("evaluation", fingerprint)
    rows = rows_by_pair(artifact, source)
    if not rows:
        names = sorted({name for row in rows_by_pair(artifact).values() if (name := row.get("source_name"))})
        why = f"`{source}` is the name of no source that it was evaluated on (names: {', '.join(names) or 'none'})"
        return Evaluated(history.pipeline.name, notes=(why,), lacks_source=True)
    stood_on, scale_of_loss = history.ancestry({"evaluation": fingerprint}), scale(artifact)
    raw_preferences, notes = stood_on["raw_preferences"].fingerprint, _edited(history, services)
    leakage = find_leakage(services.store, [stood_on["policy"].fingerprint], rows, raw_preferences)
    if leaked := len(leakage.pairs):
        notes += (f"policies that it started from were trained on the prompts of {leaked} of its {len(rows)} pairs",)
    if "reference_model" not in scale_of_loss:
        notes += ("its loss has no reference: accuracy and margin are measured over the one that the recipe names",)
    return Evaluated(
        recipe=history.pipeline.name,
        settings=_settings(stood_on),
        scale=scale_of_loss,
        values={name: {pair: of(row) for pair, row in rows.items()} for name, of in SHOWN_VALUES.items()},
        notes=notes,
        prompts=prompts(rows, services.store.open("raw_preferences", raw_preferences)),
        reference=stood_on["reference_model"].fingerprint,
    )


def _beside(first: Evaluated, each: Evaluated, differing: Sequence[str]) -> Compared:
    measures = [name for name in SHOWN_VALUES if name != "loss" or each.scale == first.scale]
    pairs, shared = len(each.values["accuracy"]), each.values["accuracy"].keys() & first.values["accuracy"].keys()
    count = count_prompts(shared, each.prompts)
    comparable = each is not first and count >= MIN_PROMPTS
    notes = list(each.notes)
    if len(shared) < max(pairs, len(first.values["accuracy"])):
        few = "" if count >= MIN_PROMPTS else f", which is too few to compare ({MIN_PROMPTS} prompts are needed)"
        notes.append(f"evaluated on other pairs than {first.recipe}: {len(shared)} of {pairs} are common{few}")
    elif each is not first and not comparable:
        notes.append(
            f"{len(shared)} held-out pairs are too few to tell a difference from chance ({MIN_PROMPTS} prompts are needed)"
        )
    if each.reference != first.reference:
        notes.append(
            f"its reference is not that of {first.recipe}, and its accuracy and margin are measured over its own"
        )
    return Compared(
        recipe=each.recipe,
        settings={name: each.settings.get(name) for name in differing},
        pairs=pairs,
        means={name: statistics.fmean(each.values[name].values()) for name in measures},
        differences={
            name: paired_difference(each.values[name], first.values[name], each.prompts)
            for name in (measures if comparable else ())
        },
        notes=notes,
    )


def _settings(stood_on: Mapping[str, Ancestor]) -> dict[str, str]:
    """What went into an evaluation, by the names of the recipe's fields; the loss is told once, as the policy's."""
    found = {name: short(stood_on[kind].fingerprint) for kind, name in _CONTENTS.items()}
    for kind, section in _SECTIONS.items():
        settings = {k: v for k, v in stood_on[kind].derivation.settings.items() if (kind, k) != ("evaluation", "loss")}
        found |= flatten({section: settings})
    return {name: shortened(value) for name, value in found.items()}


def _edited(history: History, services: Services) -> tuple[str, ...]:
    """Whether a run would evaluate something else by now, in words. The release, which comes last, is not looked at."""
    try:
        judged = judge(history, services, expect_state(history.pipeline, services))
        found = next(each for each in judged if each.asset == "evaluation")
    except PedigreeError as error:
        return (f"whether it is what the recipe says by now cannot be seen: {error}",)
    return (f"evaluated before this changed: {'; '.join(found.causes)}",) if found.causes else ()

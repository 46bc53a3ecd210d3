"""Body of `prequential_scores`: policies score the pairs that arrived since their training, before they are trained on.

Pairs arrive once. The first materialization for some rows decides which policies score them. Later hypotheses count later pairs
only. So the key of the asset has the rows, and a record leads from it to the scores.
"""

from dataclasses import dataclass, replace
from functools import partial

import dagster as dg

from assets.bodies import checks
from assets.bodies.data import pairs_work
from assets.comparison.contestants import Contestant, find_contestants, fresh_rows
from assets.execution.asset_context import AssetContext
from assets.execution.changes import input_changes
from assets.execution.job_log import log_message
from assets.execution.materialize import (
    JobSpec,
    MaterializedArtifact,
    find_intact,
    make,
    observe_queue,
    publish_resolved,
)
from assets.inputs.current import ResolvedInput
from assets.pipeline.graph import derive, input_name
from assets.views.metadata import optional_table
from assets.views.sentences import of_arrival
from model_registry.connection import retry_while_unavailable
from training.contract.identity.fingerprint import fingerprint, short
from training.contract.protocol.artifacts import PREQUENTIAL_SCORES, RAW_PREFERENCES, TOKENIZED_PAIRS, AssetName
from training.contract.protocol.details import PrequentialDetails
from training.contract.protocol.prequential import ArrivalSettings, PolicyToScore, PrequentialSettings
from training.contract.store.artifact import JobResult
from training.contract.store.manifest import Derivation

_COLUMNS = ("policy", "version", "pairs", "prompts", "accuracy", "loss", "cache_hits", "cache_misses")


def prequential_scores(context: AssetContext) -> dg.MaterializeResult:
    services, log = context.services, context.dagster.log
    arrival = derive(context.asset, context.inputs(), context.settings(ArrivalSettings))
    scored, versions = _find(context, arrival), dict[str, int]()
    if scored is None:
        report = partial(log_message, services, log, AssetName.PREQUENTIAL_SCORES)
        scored, versions = retry_while_unavailable(lambda: _score(context, arrival), report)
    details = scored.artifact.details
    for text in details.notes:
        log_message(services, log, context.asset, text)
    notes = {"notes": dg.MetadataValue.md("\n\n".join(details.notes))} if details.notes else {}
    rows = [
        {
            "policy": short(found.policy),
            "version": versions.get(found.policy),
            "pairs": found.pairs,
            "prompts": found.prompts,
            "accuracy": f"{found.accuracy:.3f}",
            "loss": f"{found.loss:.4g}",
            "cache_hits": found.hits,
            "cache_misses": found.scored,
        }
        for found in details.policies
    ]
    figures = {**optional_table("policies", rows, _COLUMNS), **_champions_figures(details)}
    return scored.result(of_arrival(details), notes, figures, [checks.fresh(context.services.store, scored.artifact)])


def _champions_figures(details: PrequentialDetails) -> dict[str, float]:
    """Return the champion's figures on fresh pairs; Dagster plots them over materializations."""
    champion = next((found for found in details.policies if found.policy == details.champion), None)
    if champion is None:
        return {"fresh_pairs": 0}
    return {
        "fresh_pairs": champion.pairs,
        "champion_accuracy": champion.accuracy,
        "champion_loss": champion.loss,
    }


def _find(context: AssetContext, arrival: Derivation) -> MaterializedArtifact[PrequentialDetails] | None:
    """Return the scores of these rows, if they were scored before."""
    with context.services.store.lock(context.asset, arrival.key):
        found = find_intact(context.services, PREQUENTIAL_SCORES, arrival, context.dagster.log)
    return None if found is None else _with_changes(context, MaterializedArtifact(found, reused=True))


def _score(
    context: AssetContext, arrival: Derivation
) -> tuple[MaterializedArtifact[PrequentialDetails], dict[str, int]]:
    """Score what is fresh. Return the artifact of `arrival`, and the version numbers by policy."""
    services, log = context.services, context.dagster.log
    contestants = find_contestants(context.pipeline, services, context.history.fingerprint(AssetName.BASE_MODEL))
    rows = context.history.fingerprint(AssetName.RAW_PREFERENCES)
    tested = [found for found in contestants.all if fresh_rows(context.pipeline, services.store, found, rows)]
    if contestants.champion not in tested:
        nothing = _NothingArrived(arrival, fingerprint(context.asset, []), {"policies.json": []}, contestants.skipped)
        return _with_changes(context, publish_resolved(services, PREQUENTIAL_SCORES, nothing, log)), {}
    for text in contestants.skipped:
        log_message(services, log, context.asset, text)
    made_of = (RAW_PREFERENCES.name, TOKENIZED_PAIRS.name)
    inputs = {name: context.history.fingerprint(name) for name in made_of}
    policies = tuple(_to_score(context, contestant, inputs) for contestant in tested)
    settings = PrequentialSettings.of(context.pipeline.recipe, tested[0].policy, policies)
    work = JobSpec("prequential", settings)
    made = make(context.pipeline, observe_queue(context), PREQUENTIAL_SCORES, work, inputs, log)
    with services.store.lock(context.asset, arrival.key), services.store.staging() as staging:
        known = JobResult(made.artifact.fingerprint, made.artifact.details, is_known=True)
        artifact = services.store.publish(staging, arrival, known).of_kind(PREQUENTIAL_SCORES)
    versions = {found.policy: found.version.number for found in tested}
    return _with_changes(context, replace(made, artifact=artifact)), versions


@dataclass(frozen=True)
class _NothingArrived(ResolvedInput):
    """No policy can be scored, or nothing is fresh for the champion. `skipped`: sentences that say why."""

    skipped: tuple[str, ...]

    def details(self) -> PrequentialDetails:
        return PrequentialDetails(notes=self.skipped)


def _with_changes(
    context: AssetContext, made: MaterializedArtifact[PrequentialDetails]
) -> MaterializedArtifact[PrequentialDetails]:
    return replace(made, changes=input_changes(context))


def _to_score(context: AssetContext, contestant: Contestant, inputs: dict[str, str]) -> PolicyToScore:
    """Add the contestant's artifacts to the `inputs` of the job, and return their names there."""

    def named(kind: AssetName, digest: str) -> str:
        name = input_name(kind, digest)
        inputs[name] = digest
        return name

    return PolicyToScore(
        policy=named(AssetName.POLICY, contestant.policy),
        reference=named(AssetName.REFERENCE_MODEL, contestant.reference),
        pairs=named(AssetName.TOKENIZED_PAIRS, _own_pairs(context, contestant, inputs)),
        loss=contestant.loss,
        seen_rows=tuple(named(AssetName.RAW_PREFERENCES, rows) for rows in contestant.seen_rows),
        seen_pairs=tuple(named(AssetName.TOKENIZED_PAIRS, pairs) for pairs in contestant.seen_pairs),
    )


def _own_pairs(context: AssetContext, contestant: Contestant, inputs: dict[str, str]) -> str:
    """Return the current pairs in the contestant's tokens. They are made if its tokenizer or template is not the recipe's."""
    current, store = inputs[AssetName.TOKENIZED_PAIRS], context.services.store
    spec = store.open(TOKENIZED_PAIRS, current, hashes=False).derivation.inputs[AssetName.TOKENIZATION_SPEC].fingerprint
    if contestant.spec == spec:
        return current
    made_from = {
        AssetName.RAW_PREFERENCES.value: inputs[AssetName.RAW_PREFERENCES],
        AssetName.TOKENIZATION_SPEC.value: contestant.spec,
    }
    work, log = pairs_work(context.pipeline), context.dagster.log
    return make(context.pipeline, context.services, TOKENIZED_PAIRS, work, made_from, log).artifact.fingerprint

"""Body of `prequential_evaluation`: policies score the pairs that arrived since their training, before they are trained on.

Pairs arrive once. While the rows stay the same, the asset keeps its artifact, whoever is champion by then: later hypotheses
count later pairs only.
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
from training.contract.protocol.artifacts import PREQUENTIAL_EVALUATION, TOKENIZED_PAIRS, AssetName
from training.contract.protocol.details import PrequentialDetails
from training.contract.protocol.prequential import PolicyToScore, PrequentialRules, PrequentialSettings

_COLUMNS = ("policy", "version", "pairs", "prompts", "accuracy", "loss", "cache_hits", "cache_misses")


def prequential_evaluation(context: AssetContext) -> dg.MaterializeResult:
    services, log = context.services, context.dagster.log
    scored = _latest_of_rows(context)
    versions: dict[str, int] = {}
    if scored is None:
        report = partial(log_message, services, log, AssetName.PREQUENTIAL_EVALUATION)
        scored, versions = retry_while_unavailable(lambda: _score(context), report)
    details = scored.artifact.details
    for text in details.notes:
        log_message(services, log, context.asset, text)
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
    return scored.result(of_arrival(details), {}, figures, [checks.fresh(context.services.store, scored.artifact)])


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


def _latest_of_rows(context: AssetContext) -> MaterializedArtifact[PrequentialDetails] | None:
    """Return the latest artifact if it was made from the current rows, else None."""
    latest = context.history.latest(AssetName.PREQUENTIAL_EVALUATION)
    made_from = context.history.made_from(AssetName.PREQUENTIAL_EVALUATION)
    rows = context.history.fingerprint(AssetName.RAW_PREFERENCES)
    if latest.key is None or made_from is None or made_from.inputs[AssetName.RAW_PREFERENCES].fingerprint != rows:
        return None
    found = find_intact(context.services, PREQUENTIAL_EVALUATION, made_from, context.dagster.log)
    return None if found is None else MaterializedArtifact(found, reused=True, changes=[])


def _score(context: AssetContext) -> tuple[MaterializedArtifact[PrequentialDetails], dict[str, int]]:
    """Score what is fresh. Return the artifact, and the version numbers by policy."""
    services, log = context.services, context.dagster.log
    contestants = find_contestants(context.pipeline, services, context.history.fingerprint(AssetName.BASE_MODEL))
    rules, inputs = context.settings(PrequentialRules), context.inputs()
    rows = inputs[AssetName.RAW_PREFERENCES]
    tested = [found for found in contestants.all if fresh_rows(services.store, found, rows)]
    if contestants.champion not in tested:
        derivation = derive(context.asset, inputs, PrequentialSettings(**dict(rules)))
        nothing = _NothingArrived(derivation, fingerprint(context.asset, derivation.key), {}, contestants.skipped)
        return _with_changes(context, publish_resolved(services, PREQUENTIAL_EVALUATION, nothing, log)), {}
    for text in contestants.skipped:
        log_message(services, log, context.asset, text)
    policies = tuple(_to_score(context, contestant, inputs) for contestant in tested)
    settings = PrequentialSettings(**dict(rules), champion=tested[0].policy, policies=policies)
    work = JobSpec("prequential", settings)
    made = make(context.pipeline, observe_queue(context), PREQUENTIAL_EVALUATION, work, inputs, log)
    return _with_changes(context, made), {found.policy: found.version.number for found in tested}


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

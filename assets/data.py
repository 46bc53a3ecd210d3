"""From preference files to pairs in one schema, and from there to token ids."""

from collections.abc import Mapping

import dagster as dg

from assets import checks
from assets.graph import GRAPH
from assets.metadata import length_histogram, rendered_pairs, table
from assets.pipeline import Pipeline, Services, declare
from assets.realize import Realized, Work, realize
from assets.recorded import data_version
from assets.world import Found, look
from training.contract.errors import DataError
from training.contract.fingerprint import short

PAIRS_WORK = Work("pairs", settings={})


def preferences_work(pipeline: Pipeline, source: Found) -> Work:
    """The job that reads the files of `source`, a `preference_source`: those that were hashed, and no others."""
    settings = GRAPH["raw_preferences"].reads(pipeline.recipe)
    places = {"sources": source.places["sources"], "files": source.places["listed"]}
    return Work("preferences", settings, locations=places)


def raw_preferences(pipeline: Pipeline) -> dg.AssetsDefinition:
    @declare(pipeline, "raw_preferences", checks.specs(pipeline, "raw_preferences", checks.QUARANTINE))
    def raw_preferences(
        context: dg.AssetExecutionContext, services: dg.ResourceParam[Services]
    ) -> dg.MaterializeResult:
        found = look(pipeline, services, "preference_source")
        observed = data_version(context.instance, pipeline.key("preference_source"))
        if observed is not None and observed != found.fingerprint:
            raise DataError(
                f"the preference files are {short(found.fingerprint)}, but {pipeline.name}/preference_source recorded "
                f"{short(observed)}: they changed since; materialize preference_source together with raw_preferences"
            )
        made = realize(context, pipeline, services, preferences_work(pipeline, found))
        return _shown(made, pipeline)

    return raw_preferences


def _shown(made: Realized, pipeline: Pipeline) -> dg.MaterializeResult:
    details = made.artifact.details
    counts = details["counts"]
    reasons = [{"reason": reason, "rows": count} for reason, count in details["reasons"].items()]
    metadata = {
        "dagster/row_count": counts["pairs"],
        "quarantined": counts["quarantined"],
        "train": counts["train"],
        "validation": counts["validation"],
        "formats": dg.MetadataValue.json(details["formats"]),
        "quarantine_reasons": table(reasons, ("reason", "rows")),
        "quarantine_examples": table(details["quarantine_examples"], ("source", "line", "reason", "text")),
        "examples": dg.MetadataValue.json(details["examples"]),
    }
    return made.result(metadata, [checks.quarantine(made.artifact, pipeline.recipe.data.max_quarantined)])


def tokenized_pairs(pipeline: Pipeline) -> dg.AssetsDefinition:
    names = (checks.RESPONSES, checks.PREFIX, checks.SPLITS)

    @declare(pipeline, "tokenized_pairs", checks.specs(pipeline, "tokenized_pairs", *names))
    def tokenized_pairs(
        context: dg.AssetExecutionContext, services: dg.ResourceParam[Services]
    ) -> dg.MaterializeResult:
        made = realize(context, pipeline, services, PAIRS_WORK)
        details = made.artifact.details
        _demand_splits(context, pipeline, details["counts"])
        dropped = [{"reason": reason, "pairs": count} for reason, count in details["reasons"].items()]
        metadata = {
            "dagster/row_count": details["counts"]["pairs"],
            **{name: count for name, count in details["counts"].items() if name != "pairs"},
            "dropped_reasons": table(dropped, ("reason", "pairs")),
            "lengths": length_histogram(details["histogram"]),
            "examples": rendered_pairs(details["examples"]),
        }
        found = [
            checks.responses(made.artifact),
            checks.prefix(made.artifact, pipeline.recipe.data.max_quarantined),
            checks.splits(made.artifact),
        ]
        return made.result(metadata, found)

    return tokenized_pairs


def _demand_splits(context: dg.AssetExecutionContext, pipeline: Pipeline, counts: Mapping[str, int]) -> None:
    """Raises DataError where this run would come to an asset that has no pair to work with: now, not after the training."""
    planned = context.job_def.asset_layer.executable_asset_keys
    for split, asset in (("train", "policy"), ("validation", "evaluation")):
        if not counts[split] and pipeline.key(asset) in planned:
            raise DataError(
                f"none of the {counts['pairs']:,} tokenized pairs is in the {split} split, and {asset} is part of this run; "
                f"`data.validation_fraction` is {pipeline.recipe.data.validation_fraction}, the share of prompts that is "
                f"held out: set another (0.1 is usual), or add data"
            )

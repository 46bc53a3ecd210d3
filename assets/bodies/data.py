"""From preference files to pairs in one schema, and from there to token ids."""

from collections.abc import Collection
from dataclasses import replace

import dagster as dg
import pyarrow.parquet as pq

from assets.bodies import checks
from assets.bodies.embedding_check import check_embeddings
from assets.execution.asset_context import AssetContext
from assets.execution.job_log import log_message
from assets.execution.materialize import JobSpec, materialize
from assets.inputs.current import ResolvedData, find_data
from assets.inputs.recipe_location import tokenizer_places
from assets.lineage.pair_diff import pair_changes
from assets.pipeline.graph import GRAPH
from assets.pipeline.pipeline import Pipeline
from assets.views.metadata import length_histogram, rendered_pairs, table
from training.contract.errors import DataError
from training.contract.files.local_files import distinct_names
from training.contract.identity.fingerprint import short
from training.contract.store.store import Artifact

_NAMES = 3  # of the thousands that a folder may have


def preferences_work(pipeline: Pipeline, found: ResolvedData) -> JobSpec:
    """The job that reads the files in `found`: those that were hashed, and no others."""
    locations = {
        "sources": [source.settings for source in found.sources],
        "files": [[file.model_dump(mode="json") for file in source.files] for source in found.sources],
    }
    return JobSpec("preferences", GRAPH["raw_preferences"].reads(pipeline.recipe), locations)


def pairs_work(pipeline: Pipeline) -> JobSpec:
    """The job that tokenizes; `named` is for its errors."""
    return JobSpec("pairs", GRAPH["tokenized_pairs"].reads(pipeline.recipe), {"named": tokenizer_places(pipeline)})


def raw_preferences(step: AssetContext) -> dg.MaterializeResult:
    found = find_data(step.pipeline)
    observed = step.history.latest("preference_source").fingerprint
    if observed is not None and observed != found.fingerprint:
        raise DataError(
            f"the preference files are {short(found.fingerprint)}, but {step.pipeline.name}/preference_source recorded "
            f"{short(observed)}: they changed since; materialize preference_source together with raw_preferences, once "
            "they are written (`pedigree run` does both)"
        )
    made = materialize(step, preferences_work(step.pipeline, found))
    before, services = step.history.latest("raw_preferences").fingerprint, step.services
    changed = pair_changes(services.store, before, made.artifact, services.hashes)
    if words := list(changed.words() if changed else ()):
        log_message(services, step.context.log, step.asset, "; ".join(words))
        made = replace(made, changes=[*(made.changes or ()), *words])
    if names := _names_of_before(found, made.artifact):
        told = f"its rows name the files as they were called when these were first read: {', '.join(names[:_NAMES])}"
        log_message(services, step.context.log, step.asset, told + (", ..." if names[_NAMES:] else ""))
    details = made.artifact.details
    counts = details["counts"]
    reasons = [{"reason": reason, "rows": count} for reason, count in details["reasons"].items()]
    metadata = {
        "dagster/row_count": counts["pairs"],
        **{name: count for name, count in counts.items() if name != "pairs"},
        "formats": dg.MetadataValue.json(details["formats"]),
        "quarantine_reasons": table(reasons, ("reason", "rows")),
        "quarantine_examples": table(details["quarantine_examples"], ("source", "line", "reason", "text")),
        "examples": dg.MetadataValue.json(details["examples"]),
    }
    return made.result(metadata, rows_checks(step.pipeline, made.artifact))


def _names_of_before(found: ResolvedData, rows: Artifact) -> list[str]:
    """Names that the rows give to files which are called otherwise now: the same rows are never written twice.

    Those that no file has; all of them where the files have exchanged their names.
    """
    if found.hubs:
        return []
    names = distinct_names([file for source in found.sources for file in source.files])
    held_out = [source.settings["held_out"] for source in found.sources for _ in source.files]
    read_first = sorted(zip(names, held_out, strict=True), key=lambda each: not each[1])
    for parts in ("preferences.parquet", "quarantine.parquet"):
        with pq.ParquetFile(rows.file(parts), read_dictionary=["source"]) as file:
            then: list[str] = file.read(columns=["source"])["source"].unify_dictionaries().unique().to_pylist()
        now = iter([name for name, _ in read_first])
        if not all(name in now for name in then):  # one behind the other
            return [name for name in then if name not in names] or then
    return []


def rows_checks(pipeline: Pipeline, rows: Artifact) -> list[dg.AssetCheckResult]:
    return [checks.quarantine(rows, pipeline.recipe.data.max_quarantined)]


def tokenized_pairs(step: AssetContext) -> dg.MaterializeResult:
    spec = _tokenization(step)
    check_embeddings(step.pipeline, step.services, spec)
    made = materialize(step, pairs_work(step.pipeline))
    check_embeddings(step.pipeline, step.services, spec, made.artifact)
    details = made.artifact.details
    planned = step.context.job_def.asset_layer.executable_asset_keys
    check_splits(step.pipeline, made.artifact, [asset for asset in GRAPH if step.pipeline.key(asset) in planned])
    dropped = [{"reason": reason, "pairs": count} for reason, count in details["reasons"].items()]
    metadata = {
        "dagster/row_count": details["counts"]["pairs"],
        **{name: count for name, count in details["counts"].items() if name != "pairs"},
        "dropped_reasons": table(dropped, ("reason", "pairs")),
        "lengths": step.picture("lengths", made.artifact, lambda: length_histogram(details["histogram"])),
        "examples": rendered_pairs(details["examples"]),
    }
    return made.result(metadata, pairs_checks(step.pipeline, made.artifact))


def _tokenization(step: AssetContext) -> Artifact:
    """The spec as last materialized, with the details of the way in which it was made then."""
    latest = step.history.latest("tokenization_spec")
    known = None if latest.key is None else step.services.store.find("tokenization_spec", latest.key)
    return known or step.history.artifact("tokenization_spec")


def pairs_checks(pipeline: Pipeline, pairs: Artifact) -> list[dg.AssetCheckResult]:
    limit = pipeline.recipe.data.max_quarantined
    return [checks.responses(pairs), checks.prefix(pairs, limit), checks.complete(pairs, limit), checks.splits(pairs)]


def check_splits(pipeline: Pipeline, pairs: Artifact, assets: Collection[str]) -> None:
    """Raises DataError if one of `assets`, those of a run, would have no pairs to work with: now, not after the training."""
    counts, data = pairs.details["counts"], pipeline.recipe.data
    remedies = {
        "train": "add data with other prompts" if any(s.held_out for s in data.sources) else "lower it, or add data",
        "validation": "raise it (0.1 is usual), or add a source that is `held_out`",
    }
    for split, asset in (("train", "policy"), ("validation", "evaluation")):
        if not counts[split] and asset in assets:
            raise DataError(
                f"`data.validation_fraction: {data.validation_fraction}` is the share that is held out of the prompts that no "
                f"`held_out` source has, and none of the {counts['pairs']:,} tokenized pairs is in the {split} split, while "
                f"{asset} is part of this run: {remedies[split]}"
            )

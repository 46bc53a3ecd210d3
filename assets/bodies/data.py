"""Bodies of the data assets: preference files become pairs in one schema, then token ids."""

from collections.abc import Collection
from dataclasses import replace

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc
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
from assets.views.column_schema import arrow_columns, parquet_columns
from assets.views.metadata import length_histogram, optional_table, rendered_pairs
from assets.views.pair_reader import HELD_OUT, read_pairs
from assets.views.sentences import of_pairs, of_rows
from training.contract.config.json_object import JsonObject
from training.contract.errors import DataError
from training.contract.files.local_files import distinct_names
from training.contract.identity.fingerprint import short
from training.contract.protocol.artifacts import RAW_PREFERENCES, TOKENIZATION_SPEC, TOKENIZED_PAIRS, AssetName
from training.contract.protocol.details import PairsDetails, RowsDetails, TokenizationDetails
from training.contract.protocol.locations import PairsLocations, PreferencesLocations
from training.contract.store.artifact import Artifact

_SHOWN_NAMES = 3  # a folder may have thousands


def preferences_work(pipeline: Pipeline, found: ResolvedData) -> JobSpec:
    """Return the job that reads exactly the hashed files of `found`."""
    locations = PreferencesLocations(
        sources=tuple(source.settings for source in found.sources),
        files=tuple(tuple(source.files) for source in found.sources),
    )
    return JobSpec("preferences", GRAPH[AssetName.RAW_PREFERENCES].reads(pipeline.recipe), locations)


def pairs_work(pipeline: Pipeline) -> JobSpec:
    """Return the job that tokenizes. `named` holds locations in the recipe, for its errors."""
    return JobSpec(
        "pairs",
        GRAPH[AssetName.TOKENIZED_PAIRS].reads(pipeline.recipe),
        PairsLocations(named=tokenizer_places(pipeline)),
    )


def raw_preferences(context: AssetContext) -> dg.MaterializeResult:
    found = find_data(context.pipeline)
    observed = context.history.latest(AssetName.PREFERENCE_SOURCE).fingerprint
    if observed is not None and observed != found.fingerprint:
        raise DataError(
            f"the preference files are {short(found.fingerprint)}, but {context.pipeline.name}/preference_source recorded "
            f"{short(observed)}: they changed since; materialize preference_source together with raw_preferences, once "
            "they are written (`pedigree run` does both)",
            "preferences-changed",
        )
    materialized = materialize(context, RAW_PREFERENCES, preferences_work(context.pipeline, found))
    previous, services = context.history.latest(AssetName.RAW_PREFERENCES).fingerprint, context.services
    differences = pair_changes(services.store, previous, materialized.artifact, services.hashes)
    if texts := list(differences.words() if differences else ()):
        log_message(services, context.dagster.log, context.asset, "; ".join(texts))
        materialized = replace(materialized, changes=[*(materialized.changes or ()), *texts])
    if names := _outdated_names(found, materialized.artifact):
        text = f"its rows keep the names of the files from their first reading: {', '.join(names[:_SHOWN_NAMES])}"
        log_message(services, context.dagster.log, context.asset, text + (", ..." if names[_SHOWN_NAMES:] else ""))
    details = materialized.artifact.details
    counts = details.counts.model_dump()
    reasons = [{"reason": reason, "rows": count} for reason, count in details.reasons.items()]
    quarantined = [row.model_dump() for row in details.quarantine_examples]
    figures = {
        "dagster/row_count": counts["pairs"],
        **parquet_columns(materialized.artifact.file("preferences.parquet")),
        **{name: count for name, count in counts.items() if name != "pairs"},
        "formats": dg.MetadataValue.json(details.formats),
        **_cache_figures(details),
        **optional_table("quarantine_reasons", reasons, ("reason", "rows")),
        **optional_table("quarantine_examples", quarantined, ("source", "line", "reason", "text")),
        "examples": dg.MetadataValue.json(_shown_examples(context, materialized.artifact)),
    }
    checked = rows_checks(context.pipeline, materialized.artifact)
    return materialized.result(of_rows(details), {}, figures, checked)


def _shown_examples(context: AssetContext, rows: Artifact[RowsDetails]) -> list[JsonObject]:
    """Return the example pairs, which are the first rows, without held-out ones if the recipe hides these."""
    if context.pipeline.recipe.evaluation.is_exact:
        return list(rows.details.examples)
    hidden = _held_out_rows(pq.read_table(rows.file("preferences.parquet"), columns=["row", "split"]))
    return [pair for row, pair in enumerate(rows.details.examples) if row not in hidden]


def _held_out_rows(table: pa.Table) -> set[int]:
    return set(table.filter(pc.equal(table["split"], HELD_OUT))["row"].to_pylist())


def _outdated_names(found: ResolvedData, rows: Artifact) -> list[str]:
    """Return the file names in `rows` that are outdated because files were renamed. Equal rows are never written again.

    These are the names missing now, or all names if the files exchanged their names.
    """
    if found.hubs:
        return []
    names = distinct_names([file for source in found.sources for file in source.files])
    held_out = [source.settings.held_out for source in found.sources for _ in source.files]
    in_reading_order = sorted(zip(names, held_out, strict=True), key=lambda pair: not pair[1])
    for table_name in ("preferences.parquet", "quarantine.parquet"):
        with pq.ParquetFile(rows.file(table_name), read_dictionary=["source"]) as file:
            recorded: list[str] = file.read(columns=["source"])["source"].unify_dictionaries().unique().to_pylist()
        remaining = iter([name for name, _ in in_reading_order])
        if not all(name in remaining for name in recorded):  # recorded names must be a subsequence
            return [name for name in recorded if name not in names] or recorded
    return []


def rows_checks(pipeline: Pipeline, rows: Artifact[RowsDetails]) -> list[dg.AssetCheckResult]:
    return [checks.quarantine(rows, pipeline.recipe.data.max_quarantined)]


def tokenized_pairs(context: AssetContext) -> dg.MaterializeResult:
    spec = _tokenization(context)
    check_embeddings(context.pipeline, context.services, spec)
    materialized = materialize(context, TOKENIZED_PAIRS, pairs_work(context.pipeline))
    check_embeddings(context.pipeline, context.services, spec, materialized.artifact)
    details = materialized.artifact.details
    planned = context.dagster.job_def.asset_layer.executable_asset_keys
    planned_assets = [asset for asset in GRAPH if context.pipeline.key(asset) in planned]
    check_splits(context.pipeline, materialized.artifact, planned_assets)
    dropped = [{"reason": reason, "pairs": count} for reason, count in details.reasons.items()]
    histogram = details.histogram
    lengths = {}
    if histogram is not None:
        lengths["lengths"] = context.picture("lengths", materialized.artifact, lambda: length_histogram(histogram))
    is_exact = context.pipeline.recipe.evaluation.is_exact
    hidden = set() if is_exact else _held_out_rows(read_pairs(materialized.artifact))
    figures = {
        "dagster/row_count": details.counts.pairs,
        **arrow_columns(materialized.artifact.file("pairs.arrow")),
        **{name: count for name, count in details.counts.model_dump().items() if name != "pairs"},
        **optional_table("dropped_reasons", dropped, ("reason", "pairs")),
        **_cache_figures(details),
        **rendered_pairs([pair for pair in details.examples if pair.row not in hidden]),
    }
    checked = pairs_checks(context.pipeline, materialized.artifact)
    return materialized.result(of_pairs(details), lengths, figures, checked)


def _cache_figures(details: RowsDetails | PairsDetails) -> dict[str, int]:
    """Return the rows found in a cache of rows, and its size. Artifacts of older versions lack them."""
    figures = {"cached_rows": details.cached_rows, "cache_bytes": details.cache_bytes}
    return {name: value for name, value in figures.items() if value is not None}


def _tokenization(context: AssetContext) -> Artifact[TokenizationDetails]:
    """Return the latest tokenization spec, with the details of its latest derivation."""
    latest = context.history.latest(AssetName.TOKENIZATION_SPEC)
    spec = None if latest.key is None else context.services.store.find(TOKENIZATION_SPEC, latest.key)
    return spec or context.history.artifact(TOKENIZATION_SPEC)


def pairs_checks(pipeline: Pipeline, pairs: Artifact[PairsDetails]) -> list[dg.AssetCheckResult]:
    limit = pipeline.recipe.data.max_quarantined
    return [checks.responses(pairs), checks.prefix(pairs, limit), checks.complete(pairs, limit), checks.splits(pairs)]


def check_splits(pipeline: Pipeline, pairs: Artifact[PairsDetails], assets: Collection[str]) -> None:
    """Raise DataError if one of a run's `assets` would get an empty split. The check comes now, not after the training."""
    counts, data = pairs.details.counts, pipeline.recipe.data
    remedies = {
        "train": "add data with other prompts" if any(s.held_out for s in data.sources) else "lower it, or add data",
        "validation": "raise it (0.1 is usual), or add a source that is `held_out`",
    }
    of_asset = (("train", counts.train, AssetName.POLICY), ("validation", counts.validation, AssetName.EVALUATION))
    for split, count, asset in of_asset:
        if not count and asset in assets:
            raise DataError(
                f"`data.validation_fraction: {data.validation_fraction}`, the held-out share of prompts outside `held_out` "
                f"sources, leaves the {split} split without any of the {counts.pairs:,} tokenized pairs, while {asset} is "
                f"part of this run: {remedies[split]}",
                "empty-split",
            )

"""Bodies of the two assets for external inputs: preference data and the base model.

They copy nothing. A materialization hashes the files (or queries the hub, and downloads a model) and records their identity.
The data version is the fingerprint of the contents. They are not Dagster's observable source assets: a run has either
observations or materializations, and retraining has to begin with an observation.
"""

import dagster as dg

from assets.execution.asset_context import AssetContext
from assets.execution.job_log import with_log
from assets.execution.materialize import materialize_resolved
from assets.inputs.current import find_data, find_model, named_files
from assets.inputs.model_ref import base_model_of
from assets.inputs.version_repair import restore_named
from assets.views.metadata import optional_table
from assets.views.sentences import of_files, of_model
from training.contract.identity.fingerprint import short
from training.contract.protocol.artifacts import BASE_MODEL, PREFERENCE_SOURCE, AssetName


def preference_source(context: AssetContext) -> dg.MaterializeResult:
    found = find_data(context.pipeline)
    materialized = materialize_resolved(context, PREFERENCE_SOURCE, found)
    rows = materialized.artifact.details.rows
    files = [
        {**entry, "name": name, "rows": rows.get(name), "sha256": short(entry["sha256"])}
        for name, entry in named_files(found.identity).items()
    ]
    details = materialized.artifact.details
    return materialized.result(
        of_files(len(files), details.bytes, rows),
        {},
        {
            **optional_table("files", files, ("name", "bytes", "rows", "sha256")),
            "sources": dg.MetadataValue.json([source.settings.model_dump(mode="json") for source in found.sources]),
        },
    )


def base_model(context: AssetContext) -> dg.MaterializeResult:
    restore_named(context.services, context.pipeline, base_model_of(context.pipeline.recipe))
    found = find_model(context.pipeline, with_log(context.services, context.dagster.log, AssetName.BASE_MODEL))
    materialized = materialize_resolved(context, BASE_MODEL, found)
    assert found.located is not None
    commit, config = found.located.commit, found.located.identity.config
    architecture = " ".join(config.get("architectures") or ["A model"])
    return materialized.result(
        of_model(architecture, materialized.artifact.details),
        {"model": dg.MetadataValue.path(str(found.located.folder)), **({} if commit is None else {"commit": commit})},
        {"config": dg.MetadataValue.json(config)},
    )

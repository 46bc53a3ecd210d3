"""The two assets that stand for the world outside: preference data and the base model.

They copy nothing. Materializing one looks at the files (or asks the hub, and downloads a model) and records what was there;
its data version is the fingerprint of the contents. They are ordinary assets rather than Dagster's observable source assets,
because one run can hold an observation or materializations, not both, and a retrain must begin by looking.
"""

import dagster as dg

from assets.event_log import told_to
from assets.metadata import table
from assets.pipeline import Pipeline, Services, declare
from assets.realize import record_found
from assets.world import look, named_files


def preference_source(pipeline: Pipeline) -> dg.AssetsDefinition:
    @declare(pipeline, "preference_source")
    def preference_source(
        context: dg.AssetExecutionContext, services: dg.ResourceParam[Services]
    ) -> dg.MaterializeResult:
        found = look(pipeline, services, "preference_source")
        made = record_found(services, found, context.instance, pipeline)
        rows = made.artifact.details["rows"]
        files = [
            {**entry, "name": name, "rows": rows.get(name), "sha256": str(entry["sha256"])[:12]}
            for name, entry in named_files(found.derivation.settings["sources"]).items()
        ]
        return made.result(
            {
                "sources": dg.MetadataValue.json(found.places["sources"]),
                "files": table(files, ("name", "bytes", "rows", "sha256")),
            }
        )

    return preference_source


def base_model(pipeline: Pipeline) -> dg.AssetsDefinition:
    @declare(pipeline, "base_model")
    def base_model(context: dg.AssetExecutionContext, services: dg.ResourceParam[Services]) -> dg.MaterializeResult:
        found = look(pipeline, told_to(context.log, services, "base_model"), "base_model")
        made = record_found(services, found, context.instance, pipeline)
        commit = found.places["commit"]
        return made.result(
            {
                "model": dg.MetadataValue.path(str(found.places["folder"])),
                "config": dg.MetadataValue.json(found.derivation.settings["config"]),
                **({} if commit is None else {"commit": commit}),
            }
        )

    return base_model

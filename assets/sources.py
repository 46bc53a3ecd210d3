"""The two assets that stand for the world outside: preference data and the base model.

They copy nothing. Materializing one looks at the files (or asks the hub for the commit) and records what was there; its
data version is the fingerprint of the bytes. They are ordinary assets rather than Dagster's observable source assets,
because one run can hold an observation or materializations, not both, and a retrain must begin by looking.
"""

import dagster as dg

from assets.graph import derivation
from assets.locate import locate_base_model, locate_data
from assets.metadata import table
from assets.pipeline import Pipeline, Services, declare
from assets.realize import record


def preference_source(pipeline: Pipeline) -> dg.AssetsDefinition:
    @declare(pipeline, "preference_source")
    def preference_source(services: dg.ResourceParam[Services]) -> dg.MaterializeResult:
        located = locate_data(pipeline.recipe)
        files = [entry for source in located.identity if isinstance(source, list) for entry in source]
        made = record(
            services,
            derivation("preference_source", {}, {"sources": located.identity}),
            located.fingerprint,
            {"sources.json": located.identity},
            {"files": len(files), "bytes": sum(entry["bytes"] for entry in files)},
        )
        return made.result({"sources": dg.MetadataValue.json(located.sources), "files": _file_table(files)})

    return preference_source


def base_model(pipeline: Pipeline) -> dg.AssetsDefinition:
    @declare(pipeline, "base_model")
    def base_model(services: dg.ResourceParam[Services]) -> dg.MaterializeResult:
        located = locate_base_model(pipeline.recipe, services.registry)
        made = record(
            services,
            derivation("base_model", {}, located.identity),
            located.fingerprint,
            {"identity.json": located.identity},
            {name: located.identity["weights"][name] for name in ("tensors", "bytes")},
        )
        return made.result(
            {
                "model": dg.MetadataValue.path(str(located.folder)),
                "config": dg.MetadataValue.json(located.identity["config"]),
            }
        )

    return base_model


def _file_table(files: list[dict[str, object]]) -> dg.TableMetadataValue:
    return table([{**entry, "sha256": str(entry["sha256"])[:12]} for entry in files], ("name", "bytes", "sha256"))

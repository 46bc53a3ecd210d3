"""The three frozen slices of a recipe. What lies below reads these artifacts and never the recipe's file again.

A run imports the definitions anew, so a file that is edited between two steps would otherwise be read in two states.
"""

import dagster as dg

from assets.changes import changes_since
from assets.pipeline import Pipeline, Services, declare
from assets.realize import Work, latest_key, realize, record_found
from assets.world import Found, look


def tokenizer_work(found: Found) -> Work:
    """The job that freezes the tokenizer and the template in `found`."""
    return Work("tokenizer", found.derivation.settings, found.places)


def tokenization_spec(pipeline: Pipeline) -> dg.AssetsDefinition:
    @declare(pipeline, "tokenization_spec")
    def tokenization_spec(
        context: dg.AssetExecutionContext, services: dg.ResourceParam[Services]
    ) -> dg.MaterializeResult:
        found = look(pipeline, services, "tokenization_spec")
        before = latest_key(context.instance, context.asset_key)
        changes = None if before is None else changes_since(services.store, before, found)
        made = realize(context, pipeline, services, tokenizer_work(found), changes)
        spec = made.artifact.json("spec.json")
        return made.result(
            {
                "spec": dg.MetadataValue.json(spec),
                "template": dg.MetadataValue.md(f"~~~~jinja\n{spec['template']}\n~~~~"),
            }
        )

    return tokenization_spec


def training_spec(pipeline: Pipeline) -> dg.AssetsDefinition:
    return _frozen_slice(pipeline, "training_spec")


def evaluation_spec(pipeline: Pipeline) -> dg.AssetsDefinition:
    return _frozen_slice(pipeline, "evaluation_spec")


def _frozen_slice(pipeline: Pipeline, asset: str) -> dg.AssetsDefinition:
    @declare(pipeline, asset)
    def frozen_slice(context: dg.AssetExecutionContext, services: dg.ResourceParam[Services]) -> dg.MaterializeResult:
        found = look(pipeline, services, asset)
        made = record_found(services, found, context.instance, pipeline)
        return made.result({"spec": dg.MetadataValue.json(found.files["spec.json"])})

    return frozen_slice

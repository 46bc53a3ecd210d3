"""The three frozen slices of a recipe. What lies below reads these artifacts and never the recipe's file again.

A run imports the definitions anew, so a file that is edited between two steps would otherwise be read in two states.
"""

import dagster as dg

from assets.graph import GRAPH, derivation
from assets.locate import LocatedTokenizer, locate_tokenizer
from assets.pipeline import Pipeline, Services, declare
from assets.realize import Work, realize, record
from training.contract.fingerprint import fingerprint


def tokenization_settings(pipeline: Pipeline, tokenizer: LocatedTokenizer) -> dict[str, object]:
    """What the tokenization spec is made of: the recipe's rules and the bytes of the tokenizer's and template's files."""
    return {**GRAPH["tokenization_spec"].reads(pipeline.recipe), **tokenizer.identity}


def tokenization_spec(pipeline: Pipeline) -> dg.AssetsDefinition:
    @declare(pipeline, "tokenization_spec")
    def tokenization_spec(
        context: dg.AssetExecutionContext, services: dg.ResourceParam[Services]
    ) -> dg.MaterializeResult:
        tokenizer = locate_tokenizer(pipeline.recipe, services.registry)
        template = tokenizer.chat_template
        work = Work(
            "tokenizer",
            settings=tokenization_settings(pipeline, tokenizer),
            locations={
                "tokenizer": str(tokenizer.folder),
                "revision": None,
                "chat_template": template and str(template),
            },
        )
        made = realize(context, pipeline, services, work)
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
    def frozen_slice(services: dg.ResourceParam[Services]) -> dg.MaterializeResult:
        fields = GRAPH[asset].reads(pipeline.recipe)
        made = record(services, derivation(asset, {}, fields), fingerprint(asset, fields), {"spec.json": fields}, {})
        return made.result({"spec": dg.MetadataValue.json(fields)})

    return frozen_slice

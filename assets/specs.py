"""The three frozen sections of a recipe. What lies below reads these artifacts and never the recipe's file again.

A run imports the definitions anew, so a file that is edited between two steps would otherwise be read in two states.
"""

import dagster as dg

from assets.metadata import verbatim
from assets.pipeline import Pipeline
from assets.realize import Work, realize, realize_found
from assets.step import Step
from assets.world import FoundTokenizer, find_tokenizer, look
from assets.written import tokenizer_places


def tokenizer_work(pipeline: Pipeline, found: FoundTokenizer) -> Work:
    """The job that freezes the tokenizer and the template that were found; `named` is for its errors."""
    template = found.located.chat_template
    locations = {
        "tokenizer": str(found.located.folder),
        "chat_template": None if template is None else str(template),
        "named": tokenizer_places(pipeline),
    }
    return Work("tokenizer", found.derivation.settings, locations)


def tokenization_spec(step: Step) -> dg.MaterializeResult:
    found = find_tokenizer(step.pipeline, step.services)
    made = realize(step, tokenizer_work(step.pipeline, found), found)
    spec = made.artifact.json("spec.json")
    return made.result(
        {
            "spec": dg.MetadataValue.json(spec),
            "template": verbatim([spec["template"]], "jinja"),
        }
    )


def frozen_section(step: Step) -> dg.MaterializeResult:
    """The body of `training_spec` and `evaluation_spec`, which are made of the recipe alone."""
    found = look(step.pipeline, step.services, step.asset)
    return realize_found(step, found).result({"spec": dg.MetadataValue.json(found.files["spec.json"])})

"""The one Definitions object: every recipe under `workflows/defs/`, and those of the folders in PEDIGREE_RECIPES."""

from pathlib import Path

import dagster as dg

from workflows.recipes import extra_recipes, load_recipes
from workflows.resources import services


@dg.definitions
def defs() -> dg.Definitions:
    """All pipelines side by side. Steps run in the process of their run: the heavy work is in jobs of its own anyway."""
    return dg.Definitions.merge(
        dg.load_from_defs_folder(path_within_project=Path(__file__).parent),
        *(loaded.definitions for folder in extra_recipes() for loaded in load_recipes(folder)),
        dg.Definitions(resources={"services": services}, executor=dg.in_process_executor),
    )

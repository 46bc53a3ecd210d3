"""What `pedigree init` and `dg scaffold defs workflows.PreferenceTuning NAME` write: the smallest recipe, to fill in."""

from pathlib import Path

import dagster as dg

from training.contract.durable import write_durably
from training.contract.errors import UsageError
from training.contract.fingerprint import demand_text
from workflows.recipe_file import RECIPE_FILE, TYPE, refuse_name

_RECIPE = """\
# Paths are relative to this file; docs/recipe.md lists every field. `pedigree plan` says what a run would do.
type: {type}
attributes:
  data:
    sources:
      - path: preferences.jsonl            # a file, a glob or a folder; or {{hub: org/name, split: train, revision: ...}}
  reference:
    model: ./base                          # a folder, a hub id, or models:/name@champion
  training:
    loss: {{type: sigmoid, beta: 0.1}}
  release:
    model_name: "{name}"
"""


class RecipeScaffolder(dg.Scaffolder):
    """Writes a recipe into a new folder. Raises UsageError for what a recipe cannot be."""

    def scaffold(self, request: dg.ScaffoldRequest) -> None:
        if request.append or request.scaffold_format != "yaml":
            raise UsageError("a recipe is a defs.yaml in a folder of its own: leave out --format and the file's name")
        init_recipe(request.target_path)


def init_recipe(folder: Path) -> Path:
    """Write a recipe into `folder`, which is made; returns its file. Raises UsageError where that cannot be, or is there."""
    file = folder.absolute() / RECIPE_FILE
    demand_text(file)
    refuse_name(file.parent)
    if file.exists():
        raise UsageError(f"{file} is there already; name another folder")
    try:
        write_durably(file, _RECIPE.format(type=TYPE, name=file.parent.name).encode())
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error
    return file

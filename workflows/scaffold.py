"""What `dg scaffold defs workflows.PreferenceTuning NAME` writes: the smallest recipe, with what to fill in."""

import dagster as dg

from training.contract.errors import UsageError
from workflows.recipe_file import RECIPE_FILE, TYPE

_RECIPE = """\
# Paths are relative to this file; docs/recipe.md lists every field. `pedigree plan {name}` says what a run would do.
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
    model_name: {name}
"""


class RecipeScaffolder(dg.Scaffolder):
    """Writes a recipe into a new folder. Raises UsageError for what a recipe cannot be."""

    def scaffold(self, request: dg.ScaffoldRequest) -> None:
        if request.append or request.scaffold_format != "yaml":
            raise UsageError("a recipe is a defs.yaml in a folder of its own: leave out --format and the file's name")
        recipe = _RECIPE.format(type=TYPE, name=request.target_path.name)
        (request.target_path / RECIPE_FILE).write_text(recipe, encoding="utf-8")

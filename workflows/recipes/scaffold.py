"""Write the smallest recipe to fill in, for `pedigree init` and `dg scaffold defs workflows.PreferenceTuning NAME`.

If data or model are given, the recipe names them and has training settings for them (suggested_settings.py).
"""

import json
from collections.abc import Iterator
from pathlib import Path

import dagster as dg

from assets.inputs.recipe_yaml import TYPE
from assets.inputs.row_count import count_rows
from training.contract.errors import UsageError
from training.contract.files.local_files import data_files
from training.contract.identity.fingerprint import check_text
from training.contract.identity.model_identity import count_parameters
from training.contract.system.atomic_io import write_durably
from workflows.recipes.recipe_files import RECIPE_FILE, check_name
from workflows.recipes.suggested_settings import SuggestedSettings, number, propose, size

_RECIPE = """\
# Paths are relative to this file; docs/reference/recipe.md lists every field. `pedigree plan` shows the work of a run.
type: {type}
attributes:
  data:
    sources:
      - path: {data}
  reference:
    model: {model}
  training:
    loss: {{type: sigmoid, beta: 0.1}}
{proposed}\
  release:
    model_name: "{name}"
"""
_DATA = "preferences.jsonl            # a file, a glob or a folder; or {hub: org/name, split: train, revision: ...}"
_MODEL = "./base                          # a folder, a hub id, or models:/name@champion"
_STEPS = """\
    # {steps:,} steps for about {pairs:,} training pairs: fewer than about 100 hardly change a model. Published recipes take
    # 1 to 3 epochs at batch sizes of 32 to 128, of tens of thousands of pairs; fewer pairs need smaller batches.
    batch_size: {batch_size}
    epochs: {epochs}
"""
_RATE = """\
    # For {size} parameters. Published: 2e-7 for 70B and 5e-7 for 8B (Tulu 3, arXiv 2411.15124), 5e-7 for 7B (Zephyr,
    # arXiv 2310.16944), 1e-6 for 1.7B (SmolLM2, alignment-handbook). Others follow from the inverse square root of the size,
    # below 100 million parameters without a published example: docs/guides/choose-a-loss.md#learning-rate-and-steps
    optimizer: {{type: adamw, learning_rate: {rate}}}
"""


_HELD_OUT = 0.1  # the default of data.validation_fraction


class RecipeScaffolder(dg.Scaffolder):
    """Writes a recipe into a new folder. Raises UsageError for options without meaning for a recipe."""

    def scaffold(self, request: dg.ScaffoldRequest) -> None:
        if request.append or request.scaffold_format != "yaml":
            raise UsageError(
                "a recipe is a defs.yaml in its own folder: leave out --format and the file's name",
                "unsupported-scaffold",
            )
        init_recipe(request.target_path)


def init_recipe(folder: Path, data: str | None = None, model: str | None = None) -> Path:
    """Write a recipe into `folder`, which is created. Return its file. `data` and `model` are as typed by the user.

    Raises UsageError if the recipe exists or cannot be written, DataError or ModelError if `data` or `model` cannot be read.
    """
    file = folder.absolute() / RECIPE_FILE
    check_text(file)
    check_name(file.parent)
    if file.exists():
        raise UsageError(f"{file} exists already; name another folder", "file-exists")
    text = _RECIPE.format(
        type=TYPE,
        name=file.parent.name,
        data=_DATA if data is None else _quoted(_recipe_path(data, file.parent)),
        model=_MODEL if model is None else _quoted(_model_field(model, file.parent)),
        proposed="".join(_training_lines(data, model)),
    )
    try:
        write_durably(file, text.encode())
    except OSError as error:
        raise UsageError(
            f"{file} cannot be written: {error.strerror}; name another folder", "unwritable-file"
        ) from error
    return file


def _training_lines(data: str | None, model: str | None) -> Iterator[str]:
    """Yield the lines of `training` for the number of pairs and for the model's size, if these are known."""
    pairs = None if data is None else _training_pairs(_absolute(data))
    parameters = None if model is None or not _absolute(model).is_dir() else count_parameters(_absolute(model))
    proposal: SuggestedSettings = propose(pairs or 0, parameters)
    if pairs:
        yield _STEPS.format(steps=proposal.steps, pairs=pairs, batch_size=proposal.batch_size, epochs=proposal.epochs)
    if parameters:
        yield _RATE.format(size=size(parameters), rate=number(proposal.learning_rate))


def _training_pairs(data: Path) -> int | None:
    """Return the approximate number of training pairs: the rows without the held-out share. None if it takes parsing."""
    rows = [count_rows(file.path) for file in data_files(str(data))]
    if None in rows:
        return None
    return round(sum(filter(None, rows)) * (1 - _HELD_OUT))


def _model_field(model: str, folder: Path) -> str:
    """Return a folder as a path, a Hub id or a registered version unchanged. Raises UsageError for a missing folder."""
    if _absolute(model).is_dir():
        return _recipe_path(model, folder)
    if model.startswith((".", "/", "~")):
        raise UsageError(
            f"`--model {model}`: folder {_absolute(model)} does not exist; name a folder, or a Hub id", "missing-folder"
        )
    return model


def _recipe_path(path: str, folder: Path) -> str:
    """Return the path for the recipe: relative to its folder if it is inside, else absolute."""
    absolute = _absolute(path)
    return f"./{absolute.relative_to(folder)}" if absolute.is_relative_to(folder) else str(absolute)


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _quoted(text: str) -> str:
    """Return the text quoted for YAML, with any characters."""
    check_text(Path(text))
    return json.dumps(text, ensure_ascii=False)

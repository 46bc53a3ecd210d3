"""Whose a pipeline's name is in a home: asset keys begin with it, so two recipes of one name would be taken for one.

A run notes the folder of its recipe under the name. Another folder with another recipe in it is refused as long as the
first one is there. Not refused are one that moved, a copy that says the same, and the recipe of another checkout of this
project: whoever installs each release in a folder of its own goes on with the same pipeline.
"""

from pathlib import Path

from training.contract.durable import write_durably
from training.contract.errors import UsageError
from workflows.recipes import DEFS, RECIPE_FILE, LoadedRecipe

_NAMES = "names"


def refuse_namesake(home: Path, loaded: LoadedRecipe) -> None:
    """Raises UsageError where the name of the pipeline is that of another recipe in `home`."""
    note = home / _NAMES / loaded.pipeline.name
    if not note.is_file() or (first := Path(note.read_text(encoding="utf-8"))) == loaded.folder:
        return
    project = DEFS.parts[-2:]
    if first.parent.parts[-2:] == project == loaded.folder.parent.parts[-2:] or not (first / RECIPE_FILE).is_file():
        return
    if (first / RECIPE_FILE).read_bytes() != (loaded.folder / RECIPE_FILE).read_bytes():
        raise UsageError(
            f"in {home} the name {loaded.pipeline.name} is that of the recipe in {first}, and {loaded.folder} has another one: "
            f"rename this folder, set another PEDIGREE_HOME, or remove {note} if this recipe is to take over its assets"
        )


def claim(home: Path, loaded: LoadedRecipe) -> None:
    """Note that the name is this recipe's. Raises UsageError as `refuse_namesake` does."""
    refuse_namesake(home, loaded)
    write_durably(home / _NAMES / loaded.pipeline.name, str(loaded.folder).encode())

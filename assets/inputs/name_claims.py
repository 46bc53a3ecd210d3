"""Which recipe a name belongs to in a home: asset keys begin with the name, so two recipes of one name are one pipeline.

That is right for a recipe that moved, for a copy, and for the checkout of another release: they are versions of one thing,
whose status says what changed. It is wrong for two recipes that release different models. So whoever materializes an asset,
the command or Dagster's web server, notes folder and model under the name, and another folder of that name with another model
is refused as long as the first is there.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from assets.pipeline.pipeline import Pipeline
from training.contract.errors import UsageError
from training.contract.system.atomic_io import write_durably


@dataclass(frozen=True)
class _Owner:
    folder: str
    model_name: str

    @classmethod
    def of(cls, pipeline: Pipeline) -> Self:
        return cls(str(pipeline.file.parent.resolve()), pipeline.recipe.release.model_name)

    @classmethod
    def read(cls, note: Path) -> Self | None:
        """Who owns a name; None where nobody does, or the note cannot be read: it is written again."""
        try:
            return cls(**json.loads(note.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None


def check_name_is_free(home: Path, pipeline: Pipeline) -> None:
    """Raises UsageError where the name of the pipeline is that of a recipe in another folder, for another model."""
    note, mine = _note(home, pipeline), _Owner.of(pipeline)
    first = _Owner.read(note)
    if first is None or first.folder == mine.folder or first.model_name == mine.model_name:
        return
    if (Path(first.folder) / pipeline.file.name).is_file():
        which = "this folder" if pipeline.variant is None else f"the variant {pipeline.variant} of this recipe"
        raise UsageError(
            f"in {home} the name {pipeline.name} is that of the recipe in {first.folder}, which releases the model "
            f"{first.model_name}, and the one in {mine.folder} releases {mine.model_name}: rename {which}, set another "
            f"PEDIGREE_HOME, or remove {note} if this recipe is to take over the other's assets"
        )


def claim_name(home: Path, pipeline: Pipeline) -> None:
    """Note that the name is this recipe's. Raises UsageError as `check_name_is_free` does."""
    check_name_is_free(home, pipeline)
    note, mine = _note(home, pipeline), _Owner.of(pipeline)
    if _Owner.read(note) != mine:
        write_durably(note, json.dumps(vars(mine), ensure_ascii=False).encode())


def _note(home: Path, pipeline: Pipeline) -> Path:
    return home / "names" / f"{pipeline.name}.json"

"""Owners of recipe names in a home. Asset keys begin with the name, so two recipes with one name are one pipeline.

That is right for a moved recipe, a copy, or a checkout of another release: they are versions of one recipe. It is wrong for two
recipes with different models. So every run that materializes an asset records folder and model under the name. A recipe with
the same name in another folder and with another model is an error while the first recipe exists.
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
        """Return the owner in the file `note`; None if it is missing or unreadable. Then it is written again."""
        try:
            return cls(**json.loads(note.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None


def check_name_is_free(home: Path, pipeline: Pipeline) -> None:
    """Raise UsageError if the pipeline's name belongs to a recipe in another folder, with another model."""
    note, claimant = _note_path(home, pipeline), _Owner.of(pipeline)
    owner = _Owner.read(note)
    if owner is None or owner.folder == claimant.folder or owner.model_name == claimant.model_name:
        return
    if (Path(owner.folder) / pipeline.file.name).is_file():
        renamed = "this folder" if pipeline.variant is None else f"the variant {pipeline.variant} of this recipe"
        raise UsageError(
            f"in {home} the name {pipeline.name} belongs to the recipe in {owner.folder} for the model {owner.model_name}, but "
            f"the recipe in {claimant.folder} releases {claimant.model_name}: rename {renamed}, set another PEDIGREE_HOME, or "
            f"remove {note} if this recipe shall take over the other's assets",
            "name-taken",
        )


def claim_name(home: Path, pipeline: Pipeline) -> None:
    """Record this recipe as the owner of its name. Raise UsageError as `check_name_is_free` does."""
    check_name_is_free(home, pipeline)
    note, claimant = _note_path(home, pipeline), _Owner.of(pipeline)
    if _Owner.read(note) != claimant:
        write_durably(note, json.dumps(vars(claimant), ensure_ascii=False).encode())


def _note_path(home: Path, pipeline: Pipeline) -> Path:
    return home / "names" / f"{pipeline.name}.json"

"""Downloads of models from a remote artifact store: folders `name/folder`, each fetched once."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from model_registry.files import move_into_place, scratch
from training.contract.system.locks import locked


class Downloads:
    """The downloads in the folder `root`. Their files never change."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def has(self, name: str) -> bool:
        return (self.root / name).is_dir()

    def get(self, name: str, fetch: Callable[[Path], Path]) -> Path:
        """Return the folder of the download `name`. If it is missing, `fetch` downloads it into a folder and returns its path.

        Other processes wait on a lock: a second download would replace the first while it is read.
        """
        target = self.root / name
        if target.is_dir():
            return target
        with locked(self.root / f".{target.parent.name}-{target.name}.lock"), scratch(self.root) as staging:
            if not target.is_dir():
                fetched = fetch(staging)
                target.parent.mkdir(parents=True, exist_ok=True)
                move_into_place(fetched, target, staging)
        return target

    def by_model(self) -> dict[str, list[str]]:
        """Return the names of all downloads, by registered model."""
        models = sorted(path for path in self.root.glob("[!.]*") if not path.is_symlink())
        return {model.name: sorted(f"{model.name}/{folder.name}" for folder in model.iterdir()) for model in models}

    def remove(self, name: str) -> bool:
        """Remove the download `name`; return False if it is missing. Rename it first, so nobody reads half of it."""
        with scratch(self.root) as staging, suppress(FileNotFoundError):
            (self.root / name).rename(staging / "outdated")
            return True
        return False

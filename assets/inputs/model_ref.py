"""A model or a tokenizer that a field of the recipe names: a local folder, a registry address, or a hub id."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from model_registry.registry import Registry
from training.contract.config.recipe import Recipe
from training.contract.errors import HubError, ModelError
from training.contract.files.hub import Repository
from training.contract.system.progress import Emit


@dataclass(frozen=True)
class ModelRef:
    """`field` is that of the recipe which names it. Every method raises ModelError or RegistryError."""

    field: str
    address: str
    revision: str | None

    @property
    def is_registered(self) -> bool:
        return self.address.startswith("models:/")

    @property
    def is_of_hub(self) -> bool:
        return not self.is_registered and not Path(self.address).is_absolute()

    @property
    def repository(self) -> Repository:
        return Repository(self.address, "model", self.revision)

    def local_folder(self, registry: Registry) -> Path:
        if self.is_registered:
            return registry.resolve(self.address)
        if not Path(self.address).is_dir():
            absent = "is no folder" if Path(self.address).exists() else "does not exist"
            raise ModelError(
                f"{self.address} {absent}; expected a folder beside the recipe, a hub id or models:/name@alias"
            )
        return Path(self.address)

    def commit(self) -> str:
        try:
            return self.repository.commit()
        except HubError as error:
            raise self._neither(error) from error

    def downloaded(
        self, patterns: Sequence[str], ignored: Sequence[str] = (), emit: Emit | None = None
    ) -> tuple[str, Path]:
        """The commit, and the folder with its files."""
        commit = self.commit()
        try:
            return commit, self.repository.fetch(commit, patterns, ignored, emit)
        except HubError as error:
            raise self._neither(error) from error

    def _neither(self, error: HubError) -> ModelError:
        return ModelError(f"it is neither a folder beside the recipe nor a model that the hub gives: {error}")


def base_model_of(recipe: Recipe) -> ModelRef:
    return ModelRef("reference.model", recipe.reference.model, recipe.reference.revision)


def tokenizer_of(recipe: Recipe) -> ModelRef:
    """The base model's, unless the recipe names another."""
    settings = recipe.tokenization
    if settings.tokenizer is None:
        return base_model_of(recipe)
    return ModelRef("tokenization.tokenizer", settings.tokenizer, settings.revision)

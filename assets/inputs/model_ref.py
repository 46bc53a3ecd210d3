"""A reference to a model or tokenizer in the recipe: a local folder, a registry address, or a hub id."""

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
    """A reference to a model or tokenizer in `field` of the recipe. Its methods raise ModelError or RegistryError."""

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
            problem = "is not a folder" if Path(self.address).exists() else "does not exist"
            raise ModelError(
                f"{self.address} {problem}; expected a folder beside the recipe, a hub id or models:/name@alias",
                "no-model-folder",
            )
        return Path(self.address)

    def commit(self) -> str:
        try:
            return self.repository.commit()
        except HubError as error:
            raise self._not_found(error) from error

    def download(
        self, patterns: Sequence[str], ignored: Sequence[str] = (), emit: Emit | None = None
    ) -> tuple[str, Path]:
        """Download the files that match. Return the commit and the folder."""
        commit = self.commit()
        try:
            return commit, self.repository.fetch(commit, patterns, ignored, emit)
        except HubError as error:
            raise self._not_found(error) from error

    def _not_found(self, error: HubError) -> ModelError:
        """Return the error for a missing folder and an unusable hub id. It keeps the code of the hub's error."""
        return ModelError(f"it is neither a folder beside the recipe nor an available model of the hub: {error}")


def base_model_of(recipe: Recipe) -> ModelRef:
    return ModelRef("reference.model", recipe.reference.model, recipe.reference.revision)


def tokenizer_of(recipe: Recipe) -> ModelRef:
    """Return the reference to the tokenizer: the base model's, unless the recipe names another."""
    settings = recipe.tokenization
    if settings.tokenizer is None:
        return base_model_of(recipe)
    return ModelRef("tokenization.tokenizer", settings.tokenizer, settings.revision)

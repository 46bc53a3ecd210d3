"""The paths of a job's files outside the store, and places in the recipe for its errors. They do not change the result."""

from pathlib import Path

from training.contract.config.data_source import DataSource
from training.contract.config.fields import StrictModel
from training.contract.files.local_files import DataFile


class Locations(StrictModel):
    """The locations of a job; here none."""


class PreferencesLocations(Locations):
    """The sources, with revisions resolved to commits, and the hashed local files of each."""

    sources: tuple[DataSource, ...]
    files: tuple[tuple[DataFile, ...], ...]


class RecipePlaces(StrictModel):
    """The places (`file:line: field`) of the fields that name the tokenizer and the chat template."""

    tokenizer: str
    chat_template: str


class PairsLocations(Locations):
    named: RecipePlaces


class TokenizerLocations(PairsLocations):
    """The tokenizer's folder, and the recipe's template file, if it has one."""

    tokenizer: Path
    chat_template: Path | None


class ReleaseFilesLocations(TokenizerLocations):
    """`base`: the base model's folder."""

    base: Path


class PolicyLocations(Locations):
    """`champion`: its folder, if the training starts from it."""

    champion: Path | None = None

"""The settings of each kind of artifact: frozen, validated, and the same in Dagster's process and in the job.

They come from the recipe and from identities of files. `key_settings` gives the part that counts in a key. Field names are
stored. Renaming one needs a migration.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field

from training.contract.config.data_source import DataSource
from training.contract.config.fields import Date, Dtype, SourceName, StrictModel
from training.contract.config.json_object import JsonObject
from training.contract.config.key_settings import AddedLater, Settings
from training.contract.config.loss import Loss
from training.contract.config.recipe import Evaluation, Recipe
from training.contract.config.release import Gate, Generation
from training.contract.config.training import SupervisedTuning, Training
from training.contract.identity.software import SCORING_VERSION, scoring_software, token_software
from training.contract.store.artifact_kind import StoredModel

Software = dict[str, str]  # the version of each library, and the device


def join_fields(*parts: StrictModel) -> dict[str, Any]:
    """Return the fields of all parts, for the model that has all of them."""
    return {name: value for part in parts for name, value in part}


class NoSettings(Settings):
    """Of an artifact that follows from its inputs alone."""


class RemoteModel(Settings):
    """A model of the Hub that is not downloaded yet: only its id and commit are known."""

    hub: str
    commit: str


class SourcesSettings(Settings):
    """`preference_source`: for each source the name, size and sha256 of its files, or the Hub's hashes."""

    sources: tuple[Any, ...]


class TokenizerIdentity(Settings):
    """The sha256 of a tokenizer's `files` and of the recipe's `chat_template`, and config.json's choice of its class."""

    files: dict[str, str]
    chat_template: str | None
    config: JsonObject


class Rendering(Settings):
    """The variables of a chat template."""

    template_kwargs: JsonObject = Field(default={})
    date: AddedLater[Date | None] = None

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        return cls(template_kwargs=recipe.tokenization.template_kwargs, date=recipe.tokenization.date)


class TokenizationRules(Rendering):
    """The recipe's part of `tokenization_spec`. Fields that name files are left out: hashes of the files identify them."""

    train_on: Literal["last_response", "assistant_turns"]
    max_length: int
    over_length: Literal["drop", "truncate_prompt", "truncate_response", "error"]
    software: AddedLater[Software] = Field(default={})

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        used = recipe.tokenization.model_dump(exclude={"tokenizer", "revision", "chat_template"})
        return cls(**used, software=token_software())


class TokenizationSettings(TokenizationRules, TokenizerIdentity):
    """`tokenization_spec`."""


class Answering(Settings):
    """How the released model generates: the recipe's stop tokens and generation settings."""

    eos_tokens: AddedLater[tuple[str, ...]] = ()
    generation: AddedLater[Generation] = Generation()

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        return cls(eos_tokens=recipe.release.eos_tokens, generation=recipe.release.generation)


class ReleaseRules(Rendering, Answering):
    """The recipe's part of `release_spec`."""

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        return cls(**join_fields(Rendering.of(recipe), Answering.of(recipe)))


class ShippedIdentity(Settings):
    """The base model's files for a release: generation settings, stop tokens, sha256 of processors, fields of config.json."""

    base_generation: JsonObject
    eos_token_ids: tuple[int, ...]
    processors: dict[str, str]
    base_config: JsonObject


class ReleaseFilesSettings(ReleaseRules, TokenizerIdentity, ShippedIdentity):
    """`release_spec`."""


class SourceSettings(StrictModel):
    """How to read the rows of one source. `format` may be `auto`."""

    format: str = "auto"
    columns: dict[str, str | None] = Field(default={})
    roles: dict[str, str] = Field(default={})
    held_out: bool = False
    fraction: float = 1.0
    name: SourceName | None = None


class PreferencesSettings(Settings):
    """`raw_preferences`: a value of each field for each source; None if all sources have its default."""

    formats: tuple[str, ...]
    held_out: tuple[bool, ...]
    columns: AddedLater[tuple[dict[str, str | None], ...] | None] = None
    roles: AddedLater[tuple[dict[str, str], ...] | None] = None
    fractions: AddedLater[tuple[float, ...] | None] = None
    names: AddedLater[tuple[SourceName | None, ...] | None] = None
    validation_fraction: float
    duplicates: Literal["keep", "drop"]

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        sources, data = recipe.data.sources, recipe.data
        return cls(
            formats=tuple(source.format for source in sources),
            held_out=tuple(source.held_out for source in sources),
            columns=_unless_default("columns", sources),
            roles=_unless_default("roles", sources),
            fractions=_unless_default("fraction", sources),
            names=_unless_default("name", sources),
            validation_fraction=data.validation_fraction,
            duplicates=data.duplicates,
        )

    @property
    def by_source(self) -> list[SourceSettings]:
        """The settings of each source."""
        return settings_by_source(dict(self))


# The settings with a list over all sources, and the field in each list.
SOURCE_LISTS = {
    "formats": "format",
    "held_out": "held_out",
    "columns": "columns",
    "roles": "roles",
    "fractions": "fraction",
    "names": "name",
}


def settings_by_source(settings: Mapping[str, Any]) -> list[SourceSettings]:
    """Return the settings of each source from the lists in the settings of `raw_preferences`, of any version."""
    lists = {field: settings[name] for name, field in SOURCE_LISTS.items() if settings.get(name) is not None}
    rows = zip(*lists.values(), strict=True)
    return [SourceSettings.model_validate(dict(zip(lists, row, strict=True))) for row in rows]


def _unless_default(field: str, sources: Sequence[DataSource]) -> tuple[Any, ...] | None:
    values = tuple(getattr(source, field) for source in sources)
    default = DataSource.model_fields[field].get_default()
    return values if any(value != default for value in values) else None


class PairsSettings(Settings):
    """`tokenized_pairs`."""

    software: AddedLater[Software] = Field(default={})

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        return cls(software=token_software())


class SupervisedTuningSettings(SupervisedTuning, Settings):
    """`reference_model`, if the base model is tuned first."""


def reference_settings(recipe: Recipe) -> Settings:
    sft = recipe.reference.sft
    return NoSettings() if sft is None else SupervisedTuningSettings(**join_fields(sft))


class ScoringSettings(Settings):
    """`reference_logprobs`. `scoring`: the version of the algorithm, because log-probs depend on it."""

    dtype: Dtype
    scoring: str
    software: AddedLater[Software] = Field(default={})

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        software = scoring_software(recipe.compute.device)
        return cls(dtype=recipe.reference.dtype, scoring=SCORING_VERSION, software=software)


class TrainingSettings(Training, Settings):
    """The recipe's part of `training_spec`."""

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        return cls(**join_fields(recipe.training))

    def unused_fields(self) -> Collection[str]:
        return () if self.max_steps is None else ("epochs",)


class TrainingSpec(TrainingSettings):
    """`training_spec`. `champion`: the fingerprint of its weights, if training starts from it and it exists."""

    champion: str | None = None

    def unused_fields(self) -> Collection[str]:
        return (*super().unused_fields(), *(() if self.start_from == "champion" else ("champion",)))


class EvaluationRules(Evaluation, Answering):
    """The recipe's part of `evaluation_spec`.

    An evaluation takes its loss from the policy. It is repeated here because the fingerprints of stored specs cover it. The
    budget of disclosure changes no result, so a key lacks it.
    """

    loss: Loss

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        return cls(**join_fields(recipe.evaluation, Answering.of(recipe)), loss=recipe.training.loss)

    def unused_fields(self) -> Collection[str]:
        return (*super().unused_fields(), "disclosure_budget")


class EvaluationSpec(EvaluationRules):
    """`evaluation_spec`. `eos_token_ids`: the stop tokens in the base model's files; None in specs of earlier versions."""

    eos_token_ids: AddedLater[tuple[int, ...] | None] = None


class ReleasedModelSettings(Settings):
    """`released_model`."""

    model_name: str
    gate: Gate

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        return cls(model_name=recipe.release.model_name, gate=recipe.release.gate.identity)


class RescoreSettings(Settings):
    """`proof`: the rows to score again, or a number of rows to take evenly from the table."""

    rows: int | tuple[int, ...]


class RecordedSettings(StoredModel):
    """The settings that comparisons read in the derivation of a policy or an evaluation, of any version of this project."""

    champion: str | None = None
    loss: Loss = Loss()

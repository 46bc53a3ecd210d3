"""The recipe: all decisions of the user, in one frozen model without Dagster.

Fields missing in the file have the defaults below. Each section belongs to one artifact, and its fingerprint is part of the
artifact's key. `automation`, `compute` and paths do not change a result, so they are not in any fingerprint: only the bytes of
files count.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from training.contract.config.data_source import DataSource
from training.contract.config.fields import (
    MOST,
    ConfigSection,
    Count,
    Date,
    Dtype,
    Fraction,
    Share,
    Text,
)
from training.contract.config.json_object import JsonObject
from training.contract.config.key_settings import AddedLater
from training.contract.config.release import Release
from training.contract.config.training import SupervisedTuning, Training
from training.contract.errors import RecipeError

# Variables of every chat template, and arguments of the rendering function.
RESERVED = {"messages", "tools", "add_generation_prompt", "chat_template", "strftime_now", "self", "conversations"}
RESERVED |= {"continue_final_message", "return_assistant_tokens_mask"}
Parallel = Literal["auto", "ddp", "fsdp", "hsdp"]
DeviceName = Literal["auto", "cpu", "cuda"]
Disclosure = Literal["exact", "votes"]


class Data(ConfigSection):
    sources: tuple[DataSource, ...] = Field(min_length=1, description="The sources of preference pairs.")
    validation_fraction: Fraction = Field(
        0.1, description="The share of the prompts outside `held_out` sources to hold out, chosen by hash."
    )
    duplicates: Literal["keep", "drop"] = Field(
        "keep", description="Whether repeated pairs are kept, or only the first of them."
    )
    max_quarantined: Share = Field(0.05, description="The highest share of rejected rows; with more, the run fails.")

    @property
    def has_named_sources(self) -> bool:
        return any(source.name is not None for source in self.sources)

    @model_validator(mode="after")
    def _check_training_data(self) -> Self:
        if all(source.held_out for source in self.sources):
            raise ValueError("all of `sources` are `held_out`, so there is nothing to train on; add another source")
        return self


class Tokenization(ConfigSection):
    tokenizer: Text | None = Field(
        None, description="A folder, a Hub id or a registered version; by default the base model's tokenizer."
    )
    revision: Text | None = Field(None, description="The branch, tag or commit of the tokenizer on the Hub.")
    chat_template: Text | None = Field(None, description="A Jinja file, by default the tokenizer's own template.")
    template_kwargs: JsonObject = Field(default={}, description="Arguments of the chat template.")
    date: AddedLater[Date | None] = Field(None, description="The date for templates that write the current one.")
    train_on: Literal["last_response", "assistant_turns"] = Field(
        "last_response", description="Train on the last response, or on all turns of the assistant."
    )
    max_length: Annotated[int, Field(ge=2, le=MOST)] = Field(
        1024, description="The most tokens of prompt and response."
    )
    over_length: Literal["drop", "truncate_prompt", "truncate_response", "error"] = Field(
        "drop", description="What happens to a longer pair."
    )

    @model_validator(mode="after")
    def _check_revision(self) -> Self:
        if self.revision is not None and self.tokenizer is None:
            raise ValueError("`revision` belongs to `tokenizer`, a hub id; the model has `reference.revision`")
        return self

    @model_validator(mode="after")
    def _check_template_kwargs(self) -> Self:
        if reserved := sorted(self.template_kwargs.keys() & RESERVED):
            raise ValueError(
                f"`template_kwargs` has {', '.join(reserved)}, but every template gets it anyway; remove it"
            )
        return self


class Reference(ConfigSection):
    model: Text = Field(description="A folder, a Hub id, or a registered version such as `models:/name@champion`.")
    revision: Text | None = Field(None, description="The branch, tag or commit of the model on the Hub.")
    dtype: Dtype = Field("float32", description="The dtype of scoring and evaluation.")
    sft: SupervisedTuning | None = Field(
        None, description="Supervised tuning of the base model, which makes the reference model."
    )


class Evaluation(ConfigSection):
    samples: Annotated[int, Field(ge=0, le=MOST)] = Field(8, description="The number of held-out prompts to answer.")
    max_new_tokens: Annotated[int, Field(ge=1, le=2**20)] = Field(64, description="The most tokens of an answer.")
    disclosure: AddedLater[Disclosure] = Field(
        "exact", description="Show exact figures of the held-out pairs, or two figures from `votes` of single pairs."
    )
    disclosure_budget: AddedLater[Share] = Field(
        0.1, description="The largest bound on the bias of a figure; used with `disclosure: votes`."
    )

    @property
    def is_exact(self) -> bool:
        """Whether users may see exact figures, texts and log-probs of held-out pairs."""
        return self.disclosure == "exact"


class Compute(ConfigSection):
    """How to run jobs, without an effect on results."""

    processes_per_node: Count = Field(1, description="Processes on each machine, one for each GPU.")
    nodes: Count = Field(1, description="The number of machines.")
    parallel: Parallel = Field("auto", description="The placement of the weights on the processes.")
    device: DeviceName = Field("auto", description="The kind of device.")
    activation_checkpointing: bool = Field(
        False, description="Compute activations again in the backward pass, to save memory."
    )
    compile: bool = Field(False, description="Compile the layers and the head.")
    evaluate_every: Count | None = Field(None, description="Steps between held-out metrics; by default 50 or more.")
    checkpoint_every: Count = Field(50, description="Steps between checkpoints.")
    keep_checkpoints: Count = Field(2, description="The number of latest checkpoints to keep while a job runs.")
    grace_seconds: Count = Field(30, description="The time for a stopped training to save a checkpoint, in seconds.")
    queue: Text | None = Field(None, description="The profile in `engine.yaml` for the jobs of this recipe.")


class Automation(ConfigSection):
    cron: Text | None = Field(None, description="The schedule of retraining, five fields such as `0 6 * * 1`.")
    timezone: Text = Field("UTC", description="The time zone of the schedule.")
    on_change: bool = Field(True, description="Record changes of inputs, and rebuild everything downstream.")


class Recipe(ConfigSection):
    data: Data = Field(description="The preference pairs.")
    tokenization: Tokenization = Field(Tokenization(), description="How text becomes tokens.")
    reference: Reference = Field(description="The base model, and the reference model made from it.")
    training: Training = Field(Training(), description="The preference tuning.")
    evaluation: Evaluation = Field(Evaluation(), description="The evaluation on held-out pairs.")
    release: Release = Field(description="The released model, and the gate.")
    compute: Compute = Field(Compute(), description="How jobs run, without an effect on results.")
    automation: Automation = Field(Automation(), description="Automatic runs.")

    @model_validator(mode="after")
    def _check_no_loop(self) -> Self:
        released = f"models:/{self.release.model_name}@"
        if self.automation.on_change and self.reference.model.startswith(released):
            raise ValueError(
                f"`reference.model: {self.reference.model}` is the model of this recipe's release, so every promotion would "
                "start another run; set `automation.on_change: false` and use a `cron`"
            )
        if self.automation.on_change and self.training.start_from == "champion":
            raise ValueError(
                "`training.start_from: champion` starts from the model of this recipe's release, so every promotion would "
                "start another run; set `automation.on_change: false` and use a `cron`"
            )
        return self

    @model_validator(mode="after")
    def _check_min_accuracy_of(self) -> Self:
        tested = {
            source.name
            for source in self.data.sources
            if source.name and (source.held_out or self.data.validation_fraction)
        }
        if untested := sorted(self.release.gate.min_accuracy_of.keys() - tested):
            raise ValueError(
                f"`release.gate.min_accuracy_of` has {', '.join(untested)}, but sources of this `name` lack held-out pairs "
                f"(names with held-out pairs: {', '.join(sorted(tested)) or 'none'}); name a source so and hold it out, or "
                "remove the minimum"
            )
        return self

    def located_at(self, folder: Path) -> "Recipe":
        """Return the recipe with absolute local paths; relative ones start at `folder`, the recipe's folder.

        Raises RecipeError if a name may mean a folder or a repository of the Hub.
        """
        sources = tuple(
            source.model_copy(update={"path": _resolve_path(source.path, folder)})
            if source.path is not None
            else source
            for source in self.data.sources
        )
        tokenization = {
            "tokenizer": _resolve_model(self.tokenization.tokenizer, self.tokenization.revision, folder),
            "chat_template": self.tokenization.chat_template and _resolve_path(self.tokenization.chat_template, folder),
        }
        return self.model_copy(
            update={
                "data": self.data.model_copy(update={"sources": sources}),
                "tokenization": self.tokenization.model_copy(update=tokenization),
                "reference": self.reference.model_copy(
                    update={"model": _resolve_model(self.reference.model, self.reference.revision, folder)}
                ),
            }
        )


def _resolve_model(model: str | None, revision: str | None, folder: Path) -> str | None:
    """Return a local folder as an absolute path; a hub id or a `models:/` address unchanged."""
    if model is None or model.startswith("models:/"):
        return model
    if not model.startswith((".", "/", "~")):
        if not (folder / model).is_dir():
            return model
        if revision is not None:
            raise RecipeError(
                f"`{model}` with `revision: {revision}` names a repository of the Hub, but {folder / model} is a folder: "
                f"write `./{model}` to use the folder, or rename it",
                "ambiguous-model",
            )
    return str(Path(_resolve_path(model, folder)).resolve())


def _resolve_path(path: str, folder: Path) -> str:
    return str(folder / Path(path).expanduser())

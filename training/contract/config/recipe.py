"""The recipe: all decisions of the user, in one frozen model without Dagster.

Fields missing in the file have the defaults below. Each section belongs to one artifact, and its fingerprint is part of the
artifact's key. `automation`, `compute` and paths do not change a result, so they are not in any fingerprint: only the bytes of
files count.
"""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from training.contract.config.data_source import DataSource
from training.contract.config.fields import (
    MOST,
    ConfigSection,
    Count,
    Date,
    Fraction,
    Name,
    NonNegative,
    Positive,
    Seed,
    Share,
    SourceName,
    Text,
)
from training.contract.config.loss import Loss
from training.contract.config.optimizer import AdamW, Optimizer, Schedule
from training.contract.errors import RecipeError

Dtype = Literal["float32", "bfloat16"]
# Variables of every chat template, and arguments of the rendering function.
RESERVED = {"messages", "tools", "add_generation_prompt", "chat_template", "strftime_now", "self", "conversations"}
RESERVED |= {"continue_final_message", "return_assistant_tokens_mask"}
Parallel = Literal["auto", "ddp", "fsdp", "hsdp"]
DeviceName = Literal["auto", "cpu", "cuda"]


class Data(ConfigSection):
    sources: tuple[DataSource, ...] = Field(min_length=1)
    validation_fraction: Fraction = 0.1
    duplicates: Literal["keep", "drop"] = "keep"
    max_quarantined: Share = 0.05

    @property
    def has_named_sources(self) -> bool:
        return any(source.name is not None for source in self.sources)

    @model_validator(mode="after")
    def _check_training_data(self) -> Self:
        if all(source.held_out for source in self.sources):
            raise ValueError("all of `sources` are `held_out`, so there is nothing to train on; add another source")
        return self


class Tokenization(ConfigSection):
    tokenizer: Text | None = None
    revision: Text | None = None
    chat_template: Text | None = None
    template_kwargs: dict[str, Any] = Field(default={})
    date: Date | None = None
    train_on: Literal["last_response", "assistant_turns"] = "last_response"
    max_length: Annotated[int, Field(ge=2, le=MOST)] = 1024
    over_length: Literal["drop", "truncate_prompt", "truncate_response", "error"] = "drop"

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


class SupervisedTuning(ConfigSection):
    """Supervised fine-tuning of the base model on the chosen responses; the result is the reference model."""

    epochs: Count = 1
    batch_size: Count = 32
    micro_tokens: Count = 16384
    optimizer: Optimizer = AdamW(learning_rate=2e-5)
    schedule: Schedule = Schedule()
    max_grad_norm: Positive = 1.0
    precision: Dtype = "float32"
    router_aux_loss_coef: NonNegative = 0.0
    seed: Seed = 0


class Reference(ConfigSection):
    model: Text
    revision: Text | None = None
    dtype: Dtype = "float32"
    sft: SupervisedTuning | None = None


class Adapter(ConfigSection):
    """Low-rank adaptation (LoRA, Hu et al. 2021): weights stay frozen, `alpha / rank * B A` is trained beside each target.

    Names follow peft's LoraConfig, without `lora_`. A target is the end of a linear layer's dotted name.
    """

    type: Literal["lora"] = "lora"
    rank: Count = 16
    alpha: Count = 32
    dropout: Fraction = 0.0
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    export: Literal["merged", "adapter"] = "merged"

    @property
    def is_merged(self) -> bool:
        """Whether the policy is written as a full model, not as an adapter without its base."""
        return self.export == "merged"


class Training(ConfigSection):
    loss: Loss = Loss()
    start_from: Literal["reference", "champion"] = "reference"
    epochs: Count = 1
    max_steps: Count | None = None
    batch_size: Count = 64
    micro_tokens: Count = 16384
    optimizer: Optimizer = AdamW()
    schedule: Schedule = Schedule()
    max_grad_norm: Positive = 1.0
    precision: Dtype = "float32"
    head_precision: Literal["exact", "float8"] = "exact"
    disable_dropout: bool = True
    router_aux_loss_coef: NonNegative = 0.0
    adapter: Adapter | None = None
    seed: Seed = 0

    @model_validator(mode="after")
    def _check_float8(self) -> Self:
        if self.head_precision == "float8" and self.precision != "bfloat16":
            raise ValueError(f"`head_precision: float8` needs `precision: bfloat16`, not {self.precision}")
        if self.head_precision == "float8" and self.loss.couples_pairs:
            coupling = [term.type for term in self.loss.terms if term.type.traits.couples_pairs]
            raise ValueError(
                f"`head_precision: float8` with a loss of type {', '.join(coupling)}: this loss would compare a pair's 8-bit "
                f"log-probs with exact log-probs of other pairs; use `head_precision: exact`"
            )
        return self

    @model_validator(mode="after")
    def _check_adapter_base(self) -> Self:
        if self.start_from == "champion" and self.adapter is not None and not self.adapter.is_merged:
            raise ValueError(
                "`start_from: champion` with `adapter.export: adapter`: the evaluation would put the adapter on the "
                "reference model, but it was trained on the champion; use `adapter.export: merged`"
            )
        return self

    def steps(self, pairs: int) -> int:
        """Return the number of optimizer steps on this number of training pairs."""
        return self.max_steps or self.epochs * math.ceil(pairs / self.batch_size)


class TrainingSpec(Training):
    """The frozen section in the spec, with the fingerprint of the champion if training starts from it."""

    champion: str | None = None


class Evaluation(ConfigSection):
    samples: Annotated[int, Field(ge=0, le=MOST)] = 8
    max_new_tokens: Annotated[int, Field(ge=1, le=2**20)] = 64


class Gate(ConfigSection):
    """The gate: a candidate's held-out loss must beat the champion's by more than one standard error.

    Its held-out accuracy must be at least `min_accuracy`. `min_accuracy_of` sets a minimum for sources by name.
    """

    type: Literal["ladder"] = "ladder"
    min_accuracy: Share | None = None
    min_accuracy_of: dict[SourceName, Share] = Field(default={})


class Generation(ConfigSection):
    """The default generation settings of the released model, also for the evaluation's samples.

    Decoding is greedy at `temperature: 0`, else sampled. Names follow transformers; `top_k: 0` and `top_p: 1` allow all tokens.
    """

    temperature: NonNegative = 0.0
    top_p: Annotated[Positive, Field(le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=MOST)] = 0
    repetition_penalty: Positive = 1.0

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        if not self.temperature and (self.top_p, self.top_k) != (1.0, 0):
            raise ValueError(
                "`top_p` and `top_k` limit sampling, but `temperature: 0` decodes greedily; raise the temperature"
            )
        return self


class Release(ConfigSection):
    """The released model. `eos_tokens` are stop tokens in addition to the base model's."""

    model_name: Name
    eos_tokens: tuple[Text, ...] = ()
    generation: Generation = Generation()
    gate: Gate = Gate()


class Compute(ConfigSection):
    """How to run jobs, without an effect on results."""

    processes_per_node: Count = 1
    nodes: Count = 1
    parallel: Parallel = "auto"
    device: DeviceName = "auto"
    activation_checkpointing: bool = False
    compile: bool = False
    evaluate_every: Count | None = None
    checkpoint_every: Count = 50
    keep_checkpoints: Count = 2
    grace_seconds: Count = 30
    queue: Text | None = None


class Automation(ConfigSection):
    cron: Text | None = None
    timezone: Text = "UTC"
    on_change: bool = True


class Recipe(ConfigSection):
    data: Data
    tokenization: Tokenization = Tokenization()
    reference: Reference
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
    release: Release
    compute: Compute = Compute()
    automation: Automation = Automation()

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

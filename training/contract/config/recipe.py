"""The recipe: everything a person decides, in one frozen model that knows nothing of Dagster.

A person writes some fields; the others have the defaults below. Fields are grouped by the artifact they change, and a group's
fingerprint is part of that artifact's key. `automation` and `compute` change no result and are in no fingerprint; neither
are paths, since only the bytes of their files count.
"""

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
# What every chat template gets without being asked for it, and arguments of the function that renders it.
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
    def _something_to_train_on(self) -> Self:
        if all(source.held_out for source in self.sources):
            raise ValueError("all of `sources` are `held_out`, so there is nothing to train on; add one that is not")
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
    def _revision_of_something(self) -> Self:
        if self.revision is not None and self.tokenizer is None:
            raise ValueError("`revision` belongs to `tokenizer`, a hub id; that of the model is `reference.revision`")
        return self

    @model_validator(mode="after")
    def _arguments_of_its_own(self) -> Self:
        if taken := sorted(self.template_kwargs.keys() & RESERVED):
            raise ValueError(f"`template_kwargs` has {', '.join(taken)}, which the template is given anyway; remove it")
        return self


class SupervisedTuning(ConfigSection):
    """Supervised fine-tuning on the chosen responses, which makes the reference model from the base model."""

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

    The names are those of peft's LoraConfig without `lora_`; a target is the end of the dotted name of a linear layer.
    """

    type: Literal["lora"] = "lora"
    rank: Count = 16
    alpha: Count = 32
    dropout: Fraction = 0.0
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    export: Literal["merged", "adapter"] = "merged"

    @property
    def is_merged(self) -> bool:
        """Whether the policy is written as one plain model; else as the adapter alone, which needs its base."""
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
    def _float8_of_bfloat16(self) -> Self:
        if self.head_precision == "float8" and self.precision != "bfloat16":
            raise ValueError(f"`head_precision: float8` needs `precision: bfloat16`, not {self.precision}")
        if self.head_precision == "float8" and self.loss.couples_pairs:
            coupling = [term.type for term in self.loss.terms if term.type.traits.couples_pairs]
            raise ValueError(
                f"`head_precision: float8` with a loss of type {', '.join(coupling)}, which would compare a pair's log-probs, "
                f"with the errors of 8 bits, with exact ones of other pairs; use `head_precision: exact`"
            )
        return self

    @model_validator(mode="after")
    def _adapter_on_the_reference(self) -> Self:
        if self.start_from == "champion" and self.adapter is not None and not self.adapter.is_merged:
            raise ValueError(
                "`start_from: champion` with `adapter.export: adapter`: such a policy is evaluated as an adapter on the "
                "reference model, but it was trained on the champion; use `adapter.export: merged`"
            )
        return self


class TrainingSpec(Training):
    """The section as the spec freezes it: with the fingerprint of the champion to start from, where there is one."""

    champion: str | None = None


class Evaluation(ConfigSection):
    samples: Annotated[int, Field(ge=0, le=MOST)] = 8
    max_new_tokens: Annotated[int, Field(ge=1, le=2**20)] = 64


class Gate(ConfigSection):
    """When a candidate becomes champion: its held-out loss must beat the champion's by more than one standard error.

    Its held-out accuracy is at least `min_accuracy`, and that of sources with a name at least what `min_accuracy_of` says.
    """

    type: Literal["ladder"] = "ladder"
    min_accuracy: Share | None = None
    min_accuracy_of: dict[SourceName, Share] = Field(default={})


class Generation(ConfigSection):
    """How the released model answers if a request does not say: greedily, or at a `temperature` above 0 by lot.

    The names are those of transformers; `top_k: 0` and `top_p: 1` leave no token out. The evaluation's samples are made so.
    """

    temperature: NonNegative = 0.0
    top_p: Annotated[Positive, Field(le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=MOST)] = 0
    repetition_penalty: Positive = 1.0

    @model_validator(mode="after")
    def _lot_to_draw(self) -> Self:
        if not self.temperature and (self.top_p, self.top_k) != (1.0, 0):
            raise ValueError(
                "`top_p` and `top_k` say which tokens are drawn, and at `temperature: 0` none is; raise it"
            )
        return self


class Release(ConfigSection):
    """`eos_tokens`: tokens at which the released model stops too, beside those of its base model's files."""

    model_name: Name
    eos_tokens: tuple[Text, ...] = ()
    generation: Generation = Generation()
    gate: Gate = Gate()


class Compute(ConfigSection):
    """How the work is run; none of it changes a result."""

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
    def _no_loop(self) -> Self:
        own = f"models:/{self.release.model_name}@"
        if self.automation.on_change and self.reference.model.startswith(own):
            raise ValueError(
                f"`reference.model: {self.reference.model}` is what this recipe releases, so every promotion would start "
                "another run; set `automation.on_change: false` and let a `cron` decide"
            )
        if self.automation.on_change and self.training.start_from == "champion":
            raise ValueError(
                "`training.start_from: champion` starts from what this recipe releases, so every promotion would start "
                "another run; set `automation.on_change: false` and let a `cron` decide"
            )
        return self

    @model_validator(mode="after")
    def _floors_of_what_is_held_out(self) -> Self:
        tested = {s.name for s in self.data.sources if s.name and (s.held_out or self.data.validation_fraction)}
        if untested := sorted(self.release.gate.min_accuracy_of.keys() - tested):
            raise ValueError(
                f"`release.gate.min_accuracy_of` has {', '.join(untested)}, but no source of such a `name` has held-out pairs "
                f"(those that have: {', '.join(sorted(tested)) or 'none'}); name one so and hold it out, or remove the floor"
            )
        return self

    def located_at(self, folder: Path) -> "Recipe":
        """The same recipe with every local path absolute; relative ones are taken from `folder`, the recipe's own.

        Raises RecipeError where a name could mean a folder as well as a repository of the hub.
        """
        sources = tuple(
            source.model_copy(update={"path": _absolute(source.path, folder)}) if source.path is not None else source
            for source in self.data.sources
        )
        tokenization = {
            "tokenizer": _located(self.tokenization.tokenizer, self.tokenization.revision, folder),
            "chat_template": self.tokenization.chat_template and _absolute(self.tokenization.chat_template, folder),
        }
        return self.model_copy(
            update={
                "data": self.data.model_copy(update={"sources": sources}),
                "tokenization": self.tokenization.model_copy(update=tokenization),
                "reference": self.reference.model_copy(
                    update={"model": _located(self.reference.model, self.reference.revision, folder)}
                ),
            }
        )


def _located(model: str | None, revision: str | None, folder: Path) -> str | None:
    """A local folder as an absolute path; a hub id or a `models:/` address as it is."""
    if model is None or model.startswith("models:/"):
        return model
    if not model.startswith((".", "/", "~")):
        if not (folder / model).is_dir():
            return model
        if revision is not None:
            raise RecipeError(
                f"`{model}` with `revision: {revision}` names a repository of the hub, but {folder / model} is a folder: "
                f"write `./{model}` if the folder is meant, or else rename it"
            )
    return str(Path(_absolute(model, folder)).resolve())


def _absolute(path: str, folder: Path) -> str:
    return str(folder / Path(path).expanduser())

"""The sections of a recipe for training: of the reference model, and of the policy."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from training.contract.config.fields import (
    ConfigSection,
    Count,
    Dtype,
    Fraction,
    NonNegative,
    Positive,
    Seed,
)
from training.contract.config.key_settings import AddedLater
from training.contract.config.loss import Loss
from training.contract.config.optimizer import AdamW, Optimizer, Schedule


class SupervisedTuning(ConfigSection):
    """Supervised fine-tuning of the base model on the chosen responses; the result is the reference model."""

    epochs: Count = Field(1, description="Passes over the training pairs.")
    batch_size: Count = Field(32, description="Responses in a step, over all processes.")
    micro_tokens: Count = Field(16384, description="Tokens in a micro-batch of a process.")
    optimizer: Optimizer = Field(AdamW(learning_rate=2e-5), description="The optimizer.")
    schedule: Schedule = Field(Schedule(), description="The course of the learning rate.")
    max_grad_norm: Positive = Field(1.0, description="The norm to which a greater gradient is scaled down.")
    precision: AddedLater[Dtype] = Field(
        "float32", description="The dtype of the computation; master weights are float32."
    )
    router_aux_loss_coef: AddedLater[NonNegative] = Field(
        0.0, description="The weight of the loss that balances the experts of a mixture of experts."
    )
    seed: Seed = Field(0, description="The seed of the order of the data and of dropout.")


class Adapter(ConfigSection):
    """Low-rank adaptation (LoRA, Hu et al. 2021): weights stay frozen, `alpha / rank * B A` is trained beside each target.

    Names follow peft's LoraConfig, without `lora_`. A target is the end of a linear layer's dotted name.
    """

    type: Literal["lora"] = Field("lora", description="The kind of adapter.")
    rank: Count = Field(16, description="The rank of the trained matrices.")
    alpha: Count = Field(32, description="The scale of the adapter, divided by the rank.")
    dropout: Fraction = Field(0.0, description="Dropout of the adapter's input.")
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        "all-linear", description="The adapted layers: all linear layers, or names of layers."
    )
    export: Literal["merged", "adapter"] = Field("merged", description="Write a full model, or the adapter alone.")

    @property
    def is_merged(self) -> bool:
        """Whether the policy is written as a full model, not as an adapter without its base."""
        return self.export == "merged"


class Training(ConfigSection):
    loss: Loss = Field(Loss(), description="The loss.")
    start_from: Literal["reference", "champion"] = Field("reference", description="The model that becomes the policy.")
    epochs: Count = Field(1, description="Passes over the training pairs.")
    max_steps: Count | None = Field(None, description="The number of steps, instead of `epochs`.")
    batch_size: Count = Field(64, description="Pairs in a step, over all processes.")
    micro_tokens: Count = Field(16384, description="Tokens in a micro-batch of a process.")
    optimizer: Optimizer = Field(AdamW(), description="The optimizer.")
    schedule: Schedule = Field(Schedule(), description="The course of the learning rate.")
    max_grad_norm: Positive = Field(1.0, description="The norm to which a greater gradient is scaled down.")
    precision: Dtype = Field("float32", description="The dtype of the computation; master weights are float32.")
    head_precision: AddedLater[Literal["exact", "float8"]] = Field(
        "exact", description="The precision of the last layer's product."
    )
    disable_dropout: bool = Field(True, description="Train without the dropout of the model's config.")
    router_aux_loss_coef: AddedLater[NonNegative] = Field(
        0.0, description="The weight of the loss that balances the experts of a mixture of experts."
    )
    adapter: Adapter | None = Field(None, description="Train a low-rank adapter instead of all weights.")
    seed: Seed = Field(0, description="The seed of the order of the data, of dropout, and of the adapter's weights.")

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

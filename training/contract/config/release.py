"""The sections of a recipe for the released model: its name, its generation settings, and the gate."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from training.contract.config.fields import (
    MOST,
    ConfigSection,
    Name,
    NonNegative,
    Positive,
    Share,
    SourceName,
    Text,
)
from training.contract.config.key_settings import AddedLater


class Gate(ConfigSection):
    """The gate: a candidate's held-out loss must beat the champion's by more than one standard error.

    Its held-out accuracy must be at least `min_accuracy`. `min_accuracy_of` sets a minimum for sources by name.
    """

    type: Literal["ladder"] = Field("ladder", description="The rule of the gate.")
    min_accuracy: Share | None = Field(None, description="The lowest held-out accuracy of a champion.")
    min_accuracy_of: AddedLater[dict[SourceName, Share]] = Field(
        default={}, description="The lowest held-out accuracy of a champion on named sources."
    )


class Generation(ConfigSection):
    """The default generation settings of the released model, also for the evaluation's samples.

    Decoding is greedy at `temperature: 0`, else sampled. Names follow transformers; `top_k: 0` and `top_p: 1` allow all tokens.
    """

    temperature: NonNegative = Field(0.0, description="The temperature of sampling; 0 decodes greedily.")
    top_p: Annotated[Positive, Field(le=1)] = Field(
        1.0, description="The share of probability from which tokens are sampled."
    )
    top_k: Annotated[int, Field(ge=0, le=MOST)] = Field(
        0, description="The number of tokens from which one is sampled; 0: all."
    )
    repetition_penalty: Positive = Field(1.0, description="The penalty of repeated tokens; 1: none.")

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        if not self.temperature and (self.top_p, self.top_k) != (1.0, 0):
            raise ValueError(
                "`top_p` and `top_k` limit sampling, but `temperature: 0` decodes greedily; raise the temperature"
            )
        return self


class Release(ConfigSection):
    """The released model. `eos_tokens` are stop tokens in addition to the base model's."""

    model_name: Name = Field(description="The name of the registered model in MLflow.")
    eos_tokens: AddedLater[tuple[Text, ...]] = Field((), description="Stop tokens in addition to the base model's.")
    generation: AddedLater[Generation] = Field(
        Generation(), description="The default generation settings of the released model."
    )
    gate: Gate = Field(Gate(), description="The rule that makes a candidate champion.")

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
    """The gate: which candidates become champion. Floors apply to both types.

    `anytime`: a candidate waits until its evidence on pairs that nobody trained on, held-out and arriving ones, reaches its
    level. At most a share `alpha` of all promotions is false on average. `ladder`: its held-out loss must beat the champion's
    by more than one standard error.
    """

    type: Literal["anytime", "ladder"] = Field("anytime", description="The rule of the gate.")
    alpha: AddedLater[Annotated[Positive, Field(lt=1)]] = Field(
        0.05, description="`anytime`: the highest expected share of false promotions."
    )
    held_out_evidence: AddedLater[bool] = Field(
        True,
        description="`anytime`: whether held-out pairs count. Switch it off if you choose candidates by held-out results.",
    )
    clip: AddedLater[Positive | None] = Field(
        None,
        description="`anytime`: the largest counted difference of two losses, in nats. Default: 4 standard deviations of that "
        "difference on pairs scored before the candidate's first bet.",
    )
    min_accuracy: Share | None = Field(None, description="The lowest held-out accuracy of a champion.")
    min_accuracy_of: AddedLater[dict[SourceName, Share]] = Field(
        default={}, description="The lowest held-out accuracy of a champion on named sources."
    )

    @property
    def identity(self) -> Self:
        """The part that identifies a version. The rule is not in it.

        Keys of versions made before `anytime` hold the rule `ladder`. They stay: a version keeps its decision.
        """
        return self.model_copy(update={"type": "ladder"})


_ANYTIME = frozenset({"alpha", "held_out_evidence", "clip"})


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

    @model_validator(mode="after")
    def _check_gate(self) -> Self:
        """Check here, not in the gate: its `identity` and a resolved recipe have all fields."""
        fields = type(self.gate).model_fields
        changed = sorted(name for name in _ANYTIME if getattr(self.gate, name) != fields[name].get_default())
        if self.gate.type == "ladder" and changed:
            raise ValueError(f"`gate.type: ladder` has no `{changed[0]}`; remove it, or set `gate.type: anytime`")
        return self

"""The recipe's settings of the optimizer and the learning rate schedule; `training.optim.optimizer` builds both."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from training.contract.config.fields import TWO_NUMBERS, ConfigSection, Fraction, NonNegative, Positive, shown


def _check_fields(section: Any, foreign: set[str], reason: str) -> Any:
    """Raise ValueError if the section has `foreign` fields, which belong to another optimizer."""
    if isinstance(section, dict) and (wrong := foreign & section.keys()):
        raise ValueError(f"`{min(wrong)}` {reason}")
    return section


class AdamW(ConfigSection):
    """Adaptive moments with decoupled weight decay (Loshchilov and Hutter 2019), for every parameter."""

    type: Literal["adamw"] = Field("adamw", description="AdamW for every parameter.")
    learning_rate: Positive = Field(5e-7, description="The highest learning rate, after the warm-up.")
    betas: Annotated[tuple[Fraction, Fraction], WithJsonSchema(TWO_NUMBERS)] = Field(
        (0.9, 0.999), description="Decay rates of the two moments."
    )
    eps: Positive = Field(1e-8, description="Added to the root of the second moment.")
    weight_decay: NonNegative = Field(
        0.0, description="Decoupled weight decay of matrices; norms and biases have none."
    )

    @model_validator(mode="before")
    @classmethod
    def _check_no_muon(cls, section: Any) -> Any:
        foreign = {"momentum", "nesterov", "ns_steps", "adjust_lr", "adamw"}
        return _check_fields(section, foreign, "belongs to `type: muon`")


class Muon(ConfigSection):
    """Orthogonalized momentum (Jordan 2024) for the matrices of the layers, and `adamw` for all other parameters.

    `adjust_lr: match_rms_adamw` scales an update to the size of AdamW's, so both use the same learning rate (Liu et al. 2025).
    `original` scales it by sqrt(rows / columns) if a matrix has more rows than columns.
    """

    type: Literal["muon"] = Field(description="Muon for the matrices of the layers.")
    learning_rate: Positive = Field(5e-7, description="The highest learning rate, after the warm-up.")
    weight_decay: NonNegative = Field(0.0, description="Decoupled weight decay of these matrices.")
    momentum: Fraction = Field(0.95, description="Decay rate of the momentum.")
    nesterov: bool = Field(True, description="Whether the momentum looks one step ahead.")
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = Field(
        5, description="Newton-Schulz iterations of the orthogonalization."
    )
    adjust_lr: Literal["original", "match_rms_adamw"] = Field(
        "match_rms_adamw", description="How the size of an update follows the shape of its matrix."
    )
    adamw: AdamW = Field(AdamW(), description="The optimizer of all other parameters.")

    @model_validator(mode="before")
    @classmethod
    def _check_no_adamw(cls, section: Any) -> Any:
        return _check_fields(section, {"betas", "eps"}, "is AdamW's: write it under `adamw:`")


def _select_by_type(section: Any) -> Any:
    """Validate a section as the class of its `type`, by default AdamW.

    pydantic's tagged union would put the tag into the path of an error, which then is not a path in the file.
    """
    if isinstance(section, AdamW | Muon):
        return section
    if not isinstance(section, dict):
        raise ValueError(
            f"expected a section, for example `{{type: adamw, learning_rate: 5e-7}}`, found {shown(section)}"
        )
    kinds: dict[str, type[AdamW] | type[Muon]] = {"adamw": AdamW, "muon": Muon}
    kind = kinds.get(str(section.get("type", "adamw")))
    if kind is None:
        raise ValueError(f"unknown optimizer {shown(section['type'])}; expected one of {', '.join(kinds)}")
    return kind.model_validate(section)


Optimizer = Annotated[AdamW | Muon, BeforeValidator(_select_by_type)]


class Schedule(ConfigSection):
    """Linear warm-up over `warmup_ratio` of the steps, then decay to zero (linear, cosine) or a constant rate."""

    type: Literal["linear", "cosine", "constant"] = Field(
        "linear", description="The course of the learning rate after the warm-up."
    )
    warmup_ratio: Fraction = Field(0.1, description="The share of the steps in which the rate rises from zero.")

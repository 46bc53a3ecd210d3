"""The recipe's settings of the optimizer and of its learning rate; `training.optim.optimizer` builds them."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from training.contract.config.fields import TWO_NUMBERS, ConfigSection, Fraction, NonNegative, Positive, shown


def _refuse(given: Any, foreign: set[str], why: str) -> Any:
    if isinstance(given, dict) and (found := foreign & given.keys()):
        raise ValueError(f"`{min(found)}` {why}")
    return given


class AdamW(ConfigSection):
    """Decoupled weight decay with adaptive moments (Loshchilov and Hutter 2019), for every parameter."""

    type: Literal["adamw"] = "adamw"
    learning_rate: Positive = 5e-7
    betas: Annotated[tuple[Fraction, Fraction], WithJsonSchema(TWO_NUMBERS)] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0

    @model_validator(mode="before")
    @classmethod
    def _no_muon(cls, given: Any) -> Any:
        return _refuse(given, {"momentum", "nesterov", "ns_steps", "adjust_lr", "adamw"}, "belongs to `type: muon`")


class Muon(ConfigSection):
    """Orthogonalized momentum (Jordan 2024) for the matrices of the layers, and `adamw` for all the rest.

    `adjust_lr: match_rms_adamw` scales an update to the size AdamW's has, so both take the same learning rate (Liu et al.
    2025); `original` scales it by the root of rows / columns, where a matrix has more rows than columns.
    """

    type: Literal["muon"]
    learning_rate: Positive = 5e-7
    weight_decay: NonNegative = 0.0
    momentum: Fraction = 0.95
    nesterov: bool = True
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    adamw: AdamW = AdamW()

    @model_validator(mode="before")
    @classmethod
    def _no_adamw(cls, given: Any) -> Any:
        return _refuse(given, {"betas", "eps"}, "is AdamW's: write it under `adamw:`")


def _by_type(given: Any) -> Any:
    """A section of the class that its `type` names; AdamW where it names none.

    Not pydantic's tagged union: it puts the tag into the path of an error, which is then not a path in the file.
    """
    if isinstance(given, AdamW | Muon):
        return given
    if not isinstance(given, dict):
        raise ValueError(
            f"expected a section, for example `{{type: adamw, learning_rate: 5e-7}}`, found {shown(given)}"
        )
    kinds: dict[str, type[AdamW] | type[Muon]] = {"adamw": AdamW, "muon": Muon}
    kind = kinds.get(str(given.get("type", "adamw")))
    if kind is None:
        raise ValueError(f"no optimizer is called {shown(given['type'])}; expected one of {', '.join(kinds)}")
    return kind.model_validate(given)


Optimizer = Annotated[AdamW | Muon, BeforeValidator(_by_type)]


class Schedule(ConfigSection):
    """Linear warm-up over `warmup_ratio` of the steps, then decay to zero (linear, cosine) or none (constant)."""

    type: Literal["linear", "cosine", "constant"] = "linear"
    warmup_ratio: Fraction = 0.1

"""The settings of `training.loss`, and the traits of each type of loss.

Besides `beta`, each type has its own settings. A setting of another type is an error, and is not part of any fingerprint. Other
code reads `LossTraits` and never compares names of types. The formulas are in training/losses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, WithJsonSchema, model_serializer, model_validator

from training.contract.config.fields import NUMERIC, ConfigSection, NonNegative, Positive, Share
from training.contract.config.json_object import JsonObject
from training.contract.config.key_settings import AddedLater


@dataclass(frozen=True)
class LossTraits:
    """The needs of a type of loss.

    `own_settings`: names of its settings, besides `beta`.

    `needs_reference`: it is a function of log-ratios, policy over reference.

    `averages_tokens`: it divides by the number of tokens of a response.

    `couples_pairs`: a pair's loss depends on the policy's log-probs of other pairs of the batch.

    `matches_pairs`: it couples pairs by comparing responses of different pairs.

    `keeps_state`: it also depends on earlier batches.

    `compares_scores`: it is a function of the difference of two scores. f-divergences need this.

    `compares_responses`: it needs a chosen and a rejected response. Any other loss can only be a term of a mixture.
    """

    own_settings: tuple[str, ...] = ()
    needs_reference: bool = True
    averages_tokens: bool = False
    couples_pairs: bool = False
    matches_pairs: bool = False
    keeps_state: bool = False
    compares_scores: bool = False
    compares_responses: bool = True


_SMOOTHED = ("label_smoothing",)


class LossType(StrEnum):
    traits: LossTraits

    def __new__(cls, name: str, traits: LossTraits = LossTraits()) -> Self:
        member = str.__new__(cls, name)
        member._value_ = name
        member.traits = traits
        return member

    SIGMOID = "sigmoid", LossTraits(_SMOOTHED, compares_scores=True)
    ROBUST = "robust", LossTraits(_SMOOTHED, compares_scores=True)
    HINGE = "hinge", LossTraits(compares_scores=True)
    IPO = "ipo", LossTraits(averages_tokens=True, compares_scores=True)
    IPO_SUM = "ipo_sum", LossTraits(compares_scores=True)
    DPO_NORM = "dpo_norm", LossTraits(averages_tokens=True, compares_scores=True)
    EXO_PAIR = "exo_pair", LossTraits(_SMOOTHED, compares_scores=True)
    NCA_PAIR = "nca_pair"
    BCO_PAIR = "bco_pair", LossTraits(couples_pairs=True, keeps_state=True)
    SPPO_HARD = "sppo_hard"
    APO_ZERO = "apo_zero"
    APO_DOWN = "apo_down"
    AOT = "aot", LossTraits(_SMOOTHED, couples_pairs=True, matches_pairs=True)
    AOT_UNPAIRED = "aot_unpaired", LossTraits(_SMOOTHED, couples_pairs=True, matches_pairs=True)
    DISCOPOP = "discopop", LossTraits(("tau",), compares_scores=True)
    CPO = "cpo", LossTraits(_SMOOTHED, needs_reference=False)
    ORPO = "orpo", LossTraits(needs_reference=False, averages_tokens=True)
    SIMPO = "simpo", LossTraits(("gamma",), needs_reference=False, averages_tokens=True)
    SFT = "sft", LossTraits(needs_reference=False, compares_responses=False)
    MIXTURE = "mixture", LossTraits(("of",))


_OWN = {name for kind in LossType for name in kind.traits.own_settings}  # fields below used by some types only


class TypedLoss(ConfigSection):
    """A type with its settings. A setting of another type is an error in a recipe, and is left out of the output."""

    type: LossType = Field(description="The type of loss.")
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), WithJsonSchema(NUMERIC)] = Field(
        0.0, description="The assumed share of wrong labels."
    )
    gamma: NonNegative = Field(0.5, description="The target margin of SimPO, before beta.")
    tau: Positive = Field(0.05, description="The temperature of DiscoPOP.")

    @model_validator(mode="after")
    def _check_settings_of_type(self) -> Self:
        for name in sorted(self.model_fields_set & _OWN - set(self.type.traits.own_settings)):
            users = ", ".join(kind for kind in LossType if name in kind.traits.own_settings)
            raise ValueError(f"`{name}` does nothing in a loss of type {self.type}; it belongs to {users}: remove it")
        if self.type is LossType.EXO_PAIR and self.label_smoothing == 0:
            raise ValueError("exo_pair takes the logarithm of `label_smoothing`; set a small one, for example 1e-3")
        return self

    @model_serializer(mode="wrap")
    def _drop_settings_of_other_types(self, write: Callable[[Self], JsonObject]) -> JsonObject:
        unused = _OWN - set(self.type.traits.own_settings)
        return {name: value for name, value in write(self).items() if name not in unused}


class LossTerm(TypedLoss):
    """A term of a mixture: its loss, times `weight`. Its beta is the mixture's."""

    weight: Positive = Field(1.0, description="The factor of this loss in the sum.")

    @model_validator(mode="after")
    def _check_simple(self) -> Self:
        if self.type is LossType.MIXTURE:
            raise ValueError("a mixture consists of losses, not of mixtures: list its parts instead")
        return self


class Divergence(ConfigSection):
    """The f-divergence between policy and reference model, instead of the reverse KL of DPO (Wang et al. 2023).

    `alpha`, for the alpha-divergence only, is between 0 (forward KL) and 1 (reverse KL).
    """

    type: Literal["reverse_kl", "forward_kl", "js", "alpha"] = Field(
        description="The divergence between policy and reference model."
    )
    alpha: AddedLater[Annotated[float, Field(gt=0, lt=1), WithJsonSchema(NUMERIC)] | None] = Field(
        None, description="The alpha of the alpha-divergence."
    )

    @model_validator(mode="after")
    def _check_alpha(self) -> Self:
        if self.type == "alpha" and self.alpha is None:
            raise ValueError("`type: alpha` needs `alpha`, a number between 0 and 1")
        if self.type != "alpha" and self.alpha is not None:
            raise ValueError(f"`alpha` belongs to `type: alpha`; the type is {self.type}")
        return self


class Loss(TypedLoss):
    """One loss, or with `type: mixture` the weighted sum of the losses in `of`.

    `ld_alpha`, `weighting` and `divergence` are off by default, and apply to all preference losses of a mixture.
    """

    type: LossType = Field(LossType.SIGMOID, description="The type of loss.")
    beta: Positive = Field(
        0.1, description="The strength of the pull towards the reference model: rewards are beta times log-ratios."
    )
    of: tuple[LossTerm, ...] = Field((), description="The losses of a mixture.")
    ld_alpha: AddedLater[Share | None] = Field(
        None, description="The weight of tokens beyond the shorter response's length (LD-DPO); none: all count alike."
    )
    weighting: AddedLater[Literal["wpo"] | None] = Field(
        None, description="Weights of the pairs: `wpo` weights them by the policy's probability."
    )
    divergence: AddedLater[Divergence | None] = Field(
        None, description="Another divergence than the reverse KL of DPO."
    )

    @property
    def terms(self) -> tuple[LossTerm, ...]:
        """The terms of the sum; a simple loss has one term."""
        if self.type is LossType.MIXTURE:
            return self.of
        settings = {name: getattr(self, name) for name in self.type.traits.own_settings}
        return (LossTerm.model_validate({"type": self.type, **settings}),)

    @property
    def needs_reference(self) -> bool:
        return any(term.type.traits.needs_reference for term in self.terms)

    @property
    def averages_tokens(self) -> bool:
        return any(term.type.traits.averages_tokens for term in self.terms)

    @property
    def couples_pairs(self) -> bool:
        return any(term.type.traits.couples_pairs for term in self.terms)

    @property
    def keeps_state(self) -> bool:
        return any(term.type.traits.keeps_state for term in self.terms)

    @property
    def needs_token_logprobs(self) -> bool:
        """Whether the loss needs log-probs of single tokens, also of the reference model, not only sums over responses."""
        return self.ld_alpha is not None

    @property
    def depends_on_batch(self) -> bool:
        """Whether a pair's loss depends on other pairs of its batch: on their log-probs, or their numbers of tokens."""
        return any(term.type.traits.couples_pairs or not term.type.traits.compares_responses for term in self.terms)

    @model_validator(mode="after")
    def _check_terms_and_options(self) -> Self:
        kinds = [term.type for term in self.terms]
        preferences = [kind for kind in kinds if kind.traits.compares_responses]
        if not kinds:
            raise ValueError("`of` is empty: a mixture needs losses, `of: [{type: sigmoid}, {type: hinge}]`")
        if not preferences:
            raise ValueError(
                "a preference loss is missing: `sft` is a term of a mixture, `{type: mixture, of: [{type: sigmoid}, "
                "{type: sft, weight: 0.5}]}`; to tune on chosen responses first, use `reference.sft`"
            )
        if len(set(kinds)) < len(kinds):
            raise ValueError(
                f"a type appears twice in the mixture of {', '.join(kinds)}: merge the terms and add their weights"
            )
        not_differences = [kind for kind in preferences if not kind.traits.compares_scores]
        matching = [kind for kind in kinds if kind.traits.matches_pairs]
        averaging = [kind for kind in kinds if kind.traits.averages_tokens]
        self._check_option("divergence", "needs a function of a difference of scores", not_differences)
        self._check_option("weighting", "weights whole pairs, and this loss compares responses across pairs", matching)
        self._check_option("ld_alpha", "takes length out of sums, and this loss divides by the length", averaging)
        return self

    def _check_option(self, option: str, reason: str, kinds: list[LossType]) -> None:
        """Raise ValueError if the option is set and `kinds` do not allow it."""
        if getattr(self, option) is not None and kinds:
            raise ValueError(f"`{option}` {reason}: it cannot be used with {', '.join(kinds)}")

"""Which preference loss is minimized: the settings of `training.loss`, and what each type of loss needs.

A type has settings of its own besides `beta`; one that it does not use is refused, and is neither shown nor part of any
fingerprint. What a type needs is stated here once, in its `LossTraits`: other code asks for a trait and never compares the
name of a type. The formulas are in training/losses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, WithJsonSchema, model_serializer, model_validator

from training.contract.config.fields import NUMERIC, ConfigSection, NonNegative, Positive, Share


@dataclass(frozen=True)
class LossTraits:
    """What a type of loss needs and allows.

    own_settings        names of settings that it uses, besides `beta`
    needs_reference     it is a function of log-ratios, policy over reference
    averages_tokens     it divides by the number of tokens of a response
    couples_pairs       a pair's loss depends on the policy's log-probs of other pairs of the batch
    matches_pairs       namely by comparing responses of different pairs
    keeps_state         it depends on earlier batches too
    compares_scores     it is a function of the difference of two scores; f-divergences are defined for these only
    compares_responses  it needs a chosen and a rejected response; else it can only be a term of a mixture
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


_OWN = {name for kind in LossType for name in kind.traits.own_settings}  # the fields below that only some types use


class TypedLoss(ConfigSection):
    """A type with its own settings; settings of other types are refused when given and left out when written."""

    type: LossType
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), WithJsonSchema(NUMERIC)] = 0.0
    gamma: NonNegative = 0.5
    tau: Positive = 0.05

    @model_validator(mode="after")
    def _uses_what_is_given(self) -> Self:
        for name in sorted(self.model_fields_set & _OWN - set(self.type.traits.own_settings)):
            users = ", ".join(kind for kind in LossType if name in kind.traits.own_settings)
            raise ValueError(
                f"`{name}` does nothing in a loss of type {self.type}; it belongs to {users}: leave it out"
            )
        if self.type is LossType.EXO_PAIR and self.label_smoothing == 0:
            raise ValueError("exo_pair takes the logarithm of `label_smoothing`; give a small one, for example 1e-3")
        return self

    @model_serializer(mode="wrap")
    def _written(self, write: Callable[[Self], dict[str, Any]]) -> dict[str, Any]:
        unused = _OWN - set(self.type.traits.own_settings)
        return {name: value for name, value in write(self).items() if name not in unused}


class LossTerm(TypedLoss):
    """A term of a mixture: its loss, times `weight`. Beta is the mixture's."""

    weight: Positive = 1.0

    @model_validator(mode="after")
    def _is_simple(self) -> Self:
        if self.type is LossType.MIXTURE:
            raise ValueError("a mixture is made of losses, not of mixtures: list its parts instead")
        return self


class Divergence(ConfigSection):
    """The f-divergence that keeps the policy near the reference, instead of the reverse KL of DPO (Wang et al. 2023).

    `alpha`, of the alpha-divergence only, lies between 0 (forward KL) and 1 (reverse KL).
    """

    type: Literal["reverse_kl", "forward_kl", "js", "alpha"]
    alpha: Annotated[float, Field(gt=0, lt=1), WithJsonSchema(NUMERIC)] | None = None

    @model_validator(mode="after")
    def _alpha_for_alpha(self) -> Self:
        if self.type == "alpha" and self.alpha is None:
            raise ValueError("`type: alpha` needs `alpha`, a number between 0 and 1")
        if self.type != "alpha" and self.alpha is not None:
            raise ValueError(f"`alpha` belongs to `type: alpha`; the type is {self.type}")
        return self


class Loss(TypedLoss):
    """One loss, or with `type: mixture` the weighted sum of those in `of`.

    `ld_alpha`, `weighting` and `divergence` are off by default, and hold for all preference losses of a mixture.
    """

    type: LossType = LossType.SIGMOID
    beta: Positive = 0.1
    of: tuple[LossTerm, ...] = ()
    ld_alpha: Share | None = None
    weighting: Literal["wpo"] | None = None
    divergence: Divergence | None = None

    @property
    def terms(self) -> tuple[LossTerm, ...]:
        """The terms of the sum; a simple loss is its own only term."""
        if self.type is LossType.MIXTURE:
            return self.of
        own = {name: getattr(self, name) for name in self.type.traits.own_settings}
        return (LossTerm.model_validate({"type": self.type, **own}),)

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
        """Whether sums over responses are not enough: log-probs of single tokens are needed, the reference's too."""
        return self.ld_alpha is not None

    @property
    def depends_on_batch(self) -> bool:
        """Whether a pair's loss depends on the other pairs of its batch: on their log-probs, or on their numbers of tokens."""
        return any(t.type.traits.couples_pairs or not t.type.traits.compares_responses for t in self.terms)

    def settings(self) -> dict[str, Any]:
        """For a fingerprint: options that are off are left out, so a new option does not change those of older recipes."""
        return self.model_dump(mode="json", exclude_none=True)

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        kinds = [term.type for term in self.terms]
        preferences = [kind for kind in kinds if kind.traits.compares_responses]
        if not kinds:
            raise ValueError("`of` lists no losses: a mixture is made of some, `of: [{type: sigmoid}, {type: hinge}]`")
        if not preferences:
            raise ValueError(
                "no preference loss is named: `sft` is a term of a mixture, `{type: mixture, of: [{type: sigmoid}, "
                "{type: sft, weight: 0.5}]}`; to tune on chosen responses first, use `reference.sft`"
            )
        if len(set(kinds)) < len(kinds):
            raise ValueError(
                f"a type appears twice in the mixture of {', '.join(kinds)}: merge them, adding up their weights"
            )
        unlike = [kind for kind in preferences if not kind.traits.compares_scores]
        matching = [kind for kind in kinds if kind.traits.matches_pairs]
        averaging = [kind for kind in kinds if kind.traits.averages_tokens]
        self._refuse("divergence", "is defined for functions of a difference of scores", unlike)
        self._refuse("weighting", "weights whole pairs, and this loss compares responses of different pairs", matching)
        self._refuse("ld_alpha", "takes length out of sums, and this loss divides by the length", averaging)
        return self

    def _refuse(self, option: str, reason: str, kinds: list[LossType]) -> None:
        if getattr(self, option) is not None and kinds:
            raise ValueError(f"`{option}` {reason}: it cannot be used with {', '.join(kinds)}")

"""The settings of `prequential_evaluation`, and the file with its scores.

scores.parquet  one row for each policy and pair: the columns of an evaluation's pairs.parquet, and
                policy (fingerprint), prompt (digest of the messages, hexadecimal)
"""

from typing import Self

from pydantic import Field

from training.contract.config.fields import Dtype, StrictModel
from training.contract.config.key_settings import AddedLater, Settings
from training.contract.config.loss import Loss
from training.contract.config.recipe import Recipe
from training.contract.identity.software import SCORING_VERSION, scoring_software
from training.contract.protocol.settings import Software
from training.contract.store.artifact_kind import StoredModel

SCORES_FILE = "scores.parquet"


class PolicyToScore(StrictModel):
    """A policy with its reference and loss. All other fields are names of the job's inputs.

    `pairs`: the new pairs in its own tokens. `seen_rows`, `seen_pairs`: the rows and tokenized pairs that it, its ancestors or
    its reference model were trained or judged on.
    """

    policy: str
    reference: str
    pairs: str
    loss: Loss
    seen_rows: tuple[str, ...]
    seen_pairs: tuple[str, ...]


class PrequentialRules(Settings):
    """The part of `prequential_evaluation` that follows from the recipe. `scoring`: the version of the scoring algorithm."""

    dtype: Dtype
    scoring: str
    software: AddedLater[Software] = Field(default={})

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        software = scoring_software(recipe.compute.device)
        return cls(dtype=recipe.reference.dtype, scoring=SCORING_VERSION, software=software)


class PrequentialSettings(PrequentialRules):
    """`prequential_evaluation`. `champion`: the fingerprint of its policy, the first of `policies`."""

    champion: str | None = None
    policies: tuple[PolicyToScore, ...] = ()


# The settings that do not follow from the recipe.
POLICIES = frozenset(PrequentialSettings.model_fields.keys() - PrequentialRules.model_fields.keys())


class RecordedPolicies(StoredModel):
    """The policies in the derivation of a `prequential_evaluation` of any version of this project."""

    policies: tuple[PolicyToScore, ...] = ()

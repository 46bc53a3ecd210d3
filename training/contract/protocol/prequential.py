"""The settings of `prequential_scores`, of the job that scores, and the file with the scores.

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


class ArrivalSettings(Settings):
    """`prequential_scores`: the model, and the recipe whose candidates are tested. Its key has the rows besides.

    Pairs arrive once. So the key holds neither the policies of that moment nor the settings of scoring.
    """

    model_name: str
    gate: str
    recipe: str = ""

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        return cls(model_name=recipe.release.model_name, gate=recipe.release.gate.type)


class PrequentialSettings(Settings):
    """The scores of arriving pairs. `champion`: the fingerprint of its policy, the first of `policies`.

    `scoring`: the version of the scoring algorithm. `split`: the split of the scored rows; None: all rows. With votes it is
    `train`, because exact scores of held-out pairs stay hidden.
    """

    champion: str
    policies: tuple[PolicyToScore, ...]
    dtype: Dtype
    scoring: str
    split: AddedLater[str | None] = None
    software: AddedLater[Software] = Field(default={})

    @classmethod
    def of(cls, recipe: Recipe, champion: str, policies: tuple[PolicyToScore, ...]) -> Self:
        software = scoring_software(recipe.compute.device)
        return cls(
            champion=champion,
            policies=policies,
            dtype=recipe.reference.dtype,
            scoring=SCORING_VERSION,
            split=scored_split(recipe),
            software=software,
        )


def scored_split(recipe: Recipe) -> str | None:
    """Return the split of the arriving rows that may be scored; None: all rows."""
    return "train" if recipe.evaluation.disclosure == "votes" else None


class RecordedPolicies(StoredModel):
    """The policies in the derivation of a `prequential_scores` of any version of this project."""

    policies: tuple[PolicyToScore, ...] = ()

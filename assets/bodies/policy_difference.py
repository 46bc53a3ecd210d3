"""Difference between a policy and its reference model on held-out pairs: the effect of training.

The accuracy does not show it: rewards with differences in the sixth digit rank pairs as well as large ones. All inputs are
files of an evaluation, read without torch.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow.parquet as pq

from assets.views.pair_reader import SIDES
from training.contract.store.artifact import Artifact

_SHIFT, _MARGIN, _CHANGED = 0.01, 0.2, 0.25  # nats a token, nats, share of the samples
_NUMBERS = ("_logprob", "_tokens")


@dataclass(frozen=True)
class PolicyDifference:
    """Three measures of the difference.

    `shift`: mean over responses of |policy - reference| log-prob, in nats per token. `margin`: mean over pairs of the chosen
    minus the rejected log-ratio (policy over reference), in nats; the mean reward margin divided by beta. `changed`: the number
    of `samples` with another answer than the reference's.
    """

    shift: float
    margin: float
    changed: int
    samples: int

    @property
    def is_negligible(self) -> bool:
        """All three measures are near zero. Without samples, the other two are."""
        is_near = self.shift < _SHIFT and abs(self.margin) < _MARGIN
        return is_near and (self.changed < _CHANGED * self.samples or not self.samples)

    def __str__(self) -> str:
        moved = f"held-out log-probs moved by {self.shift:.2g} nats a token"
        moved += f", margins between chosen and rejected by {self.margin:.2g} nats"
        if not self.samples:
            return moved
        return f"{moved}, and {self.changed} of {self.samples} sampled answers changed"


def difference(evaluation: Artifact) -> PolicyDifference:
    """Return the difference between the policy of `evaluation` and the reference model."""
    table = pq.read_table(evaluation.file("pairs.parquet"))
    column = {name: table[name].to_numpy().astype(np.float64) for name in table.column_names if name.endswith(_NUMBERS)}
    log_ratios = [column[f"policy_{side}_logprob"] - column[f"reference_{side}_logprob"] for side in SIDES]
    by_token = [
        np.abs(ratio) / np.maximum(1, column[f"{side}_tokens"]) for side, ratio in zip(SIDES, log_ratios, strict=True)
    ]
    samples = evaluation.json("samples.json")
    return PolicyDifference(
        shift=float(np.mean(by_token)),
        margin=float(np.mean(log_ratios[0] - log_ratios[1])),
        changed=sum(sample["before"] != sample["after"] for sample in samples),
        samples=len(samples),
    )

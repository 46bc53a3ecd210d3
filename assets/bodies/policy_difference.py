"""How far a policy is from its reference model on held-out pairs: whether training has changed anything.

An accuracy does not tell: rewards that differ in their sixth digit rank pairs as well as large ones do. Everything is read from
the files of an evaluation, without torch.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow.parquet as pq

from assets.views.pair_reader import SIDES
from training.contract.store.store import Artifact

_SHIFT, _MARGIN, _CHANGED = 0.01, 0.2, 0.25  # nats a token, nats, share of the samples
_NUMBERS = ("_logprob", "_tokens")


@dataclass(frozen=True)
class PolicyDifference:
    """`shift`: mean over responses of |policy - reference| log-prob, in nats a token.

    `margin`: mean of how many nats the policy prefers the chosen response to the rejected one more than the reference does;
    rewards are this times beta. `changed` of the `samples` are other answers than the reference gave.
    """

    shift: float
    margin: float
    changed: int
    samples: int

    @property
    def is_negligible(self) -> bool:
        """Whether all three are near zero; without samples, the other two."""
        is_near = self.shift < _SHIFT and abs(self.margin) < _MARGIN
        return is_near and (self.changed < _CHANGED * self.samples or not self.samples)

    def __str__(self) -> str:
        moved = f"held-out log-probs moved by {self.shift:.2g} nats a token"
        told = f"{moved}, margins between chosen and rejected by {self.margin:.2g} nats"
        if not self.samples:
            return told
        return f"{told}, and {self.changed} of {self.samples} sampled answers changed"


def difference(evaluation: Artifact) -> PolicyDifference:
    """Read how the policy of `evaluation` differs from the reference model."""
    table = pq.read_table(evaluation.file("pairs.parquet"))
    column = {name: table[name].to_numpy().astype(np.float64) for name in table.column_names if name.endswith(_NUMBERS)}
    moved = [column[f"policy_{side}_logprob"] - column[f"reference_{side}_logprob"] for side in SIDES]
    by_token = [np.abs(each) / np.maximum(1, column[f"{side}_tokens"]) for side, each in zip(SIDES, moved, strict=True)]
    samples = evaluation.json("samples.json")
    return PolicyDifference(
        shift=float(np.mean(by_token)),
        margin=float(np.mean(moved[0] - moved[1])),
        changed=sum(sample["before"] != sample["after"] for sample in samples),
        samples=len(samples),
    )

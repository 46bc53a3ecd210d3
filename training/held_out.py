"""A policy on held-out pairs: log-probs, loss and rewards of each pair, and what they come to.

Legend: V held-out pairs. Their 2V responses have places: the chosen ones 0..V-1, then the rejected ones.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from training.contract.errors import CorruptArtifact, TrainingError
from training.contract.events import EventWriter, Progress
from training.contract.logprob_table import LogProbTable
from training.contract.recipe import Loss
from training.data.batches import SIDES, Pairs
from training.distributed import Group
from training.losses import PairLogProbs, PairLosses, preference_loss
from training.model.logprobs import runs_in_lockstep
from training.model.scoring import Prompts, deal, score, shared_batches

_Z95 = 1.959963984540054  # 97.5% of a normal distribution lie below it


@dataclass(frozen=True)
class HeldOut:
    """Held-out pairs, by their positions among `pairs`, and how the policy does on them."""

    pairs: Pairs
    positions_V: npt.NDArray[np.int64]
    logprobs: PairLogProbs
    outcome: PairLosses

    def metrics(self) -> dict[str, float]:
        means = {
            "loss": self.outcome.losses_B,
            "rewards/chosen": self.outcome.rewards_chosen_B,
            "rewards/rejected": self.outcome.rewards_rejected_B,
            "rewards/margins": self.outcome.margins_B,
            "rewards/accuracies": self.outcome.accuracies_B,
            "logps/chosen": self.logprobs.policy_chosen_B,
            "logps/rejected": self.logprobs.policy_rejected_B,
        }
        return {f"eval/{name}": float(v.mean()) for name, v in means.items()} | {"eval/pairs": len(self.positions_V)}

    def interval(self) -> tuple[float, float]:
        """Where the accuracy over all such pairs lies, with 95% confidence."""
        return wilson_interval(int(self.outcome.accuracies_B.sum()), len(self.positions_V))

    def columns(self) -> dict[str, list[Any]]:
        """A row a pair: what a comparison with another policy on the same pairs needs."""
        numbers: Mapping[str, Tensor] = {
            "loss": self.outcome.losses_B,
            "reward_chosen": self.outcome.rewards_chosen_B,
            "reward_rejected": self.outcome.rewards_rejected_B,
            "margin": self.outcome.margins_B,
            "policy_chosen_logprob": self.logprobs.policy_chosen_B,
            "policy_rejected_logprob": self.logprobs.policy_rejected_B,
            "reference_chosen_logprob": self.logprobs.reference_chosen_B,
            "reference_rejected_logprob": self.logprobs.reference_rejected_B,
        }
        keys = {f"{side}_key": [k.tobytes().hex() for k in self.pairs.keys(side)[self.positions_V]] for side in SIDES}
        rows = {"row": self.pairs.rows[self.positions_V].tolist()}
        return rows | keys | {name: values.tolist() for name, values in numbers.items()}


def evaluate_pairs(
    policy: PreTrainedModel,
    pairs: Pairs,
    positions_V: npt.NDArray[np.int64],
    reference: LogProbTable,
    loss: Loss,
    group: Group,
    events: EventWriter,
) -> HeldOut:
    """Score the pairs at `positions_V` with the policy, every rank its part; the outcome is on every rank's host.

    Raises TrainingError for a log-prob that is not finite, CorruptArtifact where the reference's counts are others.
    """
    scores = _score_places(policy, pairs, positions_V, group, events)
    counts = np.concatenate([reference.chosen_tokens[positions_V], reference.rejected_tokens[positions_V]])
    _refuse(pairs, positions_V, scores, counts)
    chosen, rejected = np.split(scores[:, 1], 2)
    logprobs = PairLogProbs(
        policy_chosen_B=torch.from_numpy(chosen),
        policy_rejected_B=torch.from_numpy(rejected),
        reference_chosen_B=torch.from_numpy(reference.chosen_logprobs[positions_V]),
        reference_rejected_B=torch.from_numpy(reference.rejected_logprobs[positions_V]),
    )
    return HeldOut(pairs, positions_V, logprobs, preference_loss(loss, logprobs))


def _score_places(
    policy: PreTrainedModel, pairs: Pairs, positions_V: npt.NDArray[np.int64], group: Group, events: EventWriter
) -> npt.NDArray[np.float64]:
    """For each of the 2V places: how many response tokens, and their summed log-prob."""
    lengths_2V = np.concatenate([pairs.lengths(side)[positions_V] for side in SIDES])
    of_prompts = (pairs.prompt_numbers(positions_V), pairs.prompt_lengths[positions_V].astype(np.int64))
    batches = shared_batches(lengths_2V, Prompts(*(np.tile(column_V, 2) for column_V in of_prompts)))
    progress = Progress(events, 2 * len(positions_V), "sequences")
    rows = [np.empty((0, 3))]
    for own, everyones in deal(batches, group, runs_in_lockstep(policy)):
        if own is not None:
            places = [divmod(int(place), len(positions_V)) for place in own.positions]
            sequences = [pairs.sequence(int(positions_V[at]), SIDES[side]) for side, at in places]
            scores = score(policy, sequences, own.sizes)
            rows.append(np.stack([own.positions, scores.counts_S, scores.sums_S], axis=1))
        progress.advance(len(everyones))
    all_rows = group.gather_rows(torch.from_numpy(np.concatenate(rows)).to(group.device)).cpu().numpy()
    _, first_of_place = np.unique(all_rows[:, 0], return_index=True)  # in lockstep some are scored more than once
    by_place: npt.NDArray[np.float64] = all_rows[first_of_place, 1:]
    return by_place


def _refuse(
    pairs: Pairs, positions_V: npt.NDArray[np.int64], scores: npt.NDArray[np.float64], counts: npt.NDArray[np.int32]
) -> None:
    rows_2V = np.tile(pairs.rows[positions_V], 2)
    if len(bad := np.flatnonzero(~np.isfinite(scores[:, 1]))):
        raise TrainingError(
            f"the policy gives {len(bad)} of {len(scores)} held-out responses a log-prob that is not finite, first one "
            f"of row {rows_2V[bad[0]]}; its training diverged: lower training.optimizer.learning_rate"
        )
    if len(bad := np.flatnonzero(scores[:, 0] != counts)):
        raise CorruptArtifact(
            f"the reference log-prob of a response of row {rows_2V[bad[0]]} is over {counts[bad[0]]} tokens, "
            f"its mask trains {scores[bad[0], 0]:.0f}; materialize reference_logprobs again"
        )


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """The 95% interval of a proportion (Wilson 1927); unlike the normal one it is right near 0 and 1 as well."""
    share, z2 = successes / trials, _Z95**2
    centre = share + z2 / (2 * trials)
    spread = _Z95 * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    return max(0.0, (centre - spread) / (1 + z2 / trials)), min(1.0, (centre + spread) / (1 + z2 / trials))

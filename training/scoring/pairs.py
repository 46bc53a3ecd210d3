"""Score pairs with a policy, without gradients: log-probs, loss and rewards of each pair, and their means.

The evaluation, the reference check and `pedigree verify` use it. All pairs form one batch: a loss that couples pairs couples
all of them, and bco_pair subtracts their mean reward. So the result depends on policy, table and pairs only, not on the history
of the training. Weights of pairs (WPO) are left out: a policy could lower a weighted loss by making its responses improbable.

Legend: V pairs, S sequences of a batch. The 2V responses have places: the chosen ones 0..V-1, then the rejected ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from training.contract.config.loss import Loss
from training.contract.errors import CorruptArtifact, TrainingError
from training.contract.protocol.events import EventWriter, Progress
from training.contract.store.logprob_table import LogProbTable
from training.data.tokenization.pair_dataset import SIDES, Pairs, by_pair
from training.distributed import Group
from training.losses.inputs import PairLogProbs
from training.losses.preference import PairLosses, preference_loss
from training.model.attention.shared_prefix import TokenSequence
from training.model.logprobs.batch_scoring import Prompts, score_in_rounds, shared_batches
from training.scoring.accuracy import Accuracy, accuracy


@dataclass(frozen=True)
class ScoredPairs:
    """Pairs at some positions of `pairs`, with their log-probs, losses and rewards."""

    pairs: Pairs
    positions_V: npt.NDArray[np.int64]
    logprobs: PairLogProbs
    outcome: PairLosses

    @cached_property
    def _prompts_V(self) -> npt.NDArray[np.int64]:
        return self.pairs.prompt_numbers(self.positions_V)

    def metrics(self) -> dict[str, float]:
        columns = self.outcome.metrics(self.logprobs.policy_B2)
        means = {f"eval/{name}": float(values_B.mean()) for name, values_B in columns.items()}
        by_length = {f"eval/accuracies/{name}": value.share for name, value in self.accuracy_by_length().items()}
        overall = self.accuracy()
        prompts = {"eval/prompts": overall.prompts} if overall.prompts < overall.pairs else {}
        return means | by_length | {"eval/pairs": overall.pairs} | prompts

    def metrics_of(self, kind_V: Tensor) -> dict[str, float]:
        """Return the means over the pairs of a kind, and their number. The losses are those in the batch of all pairs."""
        outcome, accuracy = self.outcome, self.accuracy_of(kind_V)
        return {
            "pairs": accuracy.pairs,
            "loss": float(outcome.losses_B[kind_V].mean()),
            "rewards/margins": float(outcome.margins_B[kind_V].mean()),
            "rewards/accuracies": accuracy.share,
        }

    def accuracy(self) -> Accuracy:
        return self.accuracy_of(torch.ones(len(self.positions_V), dtype=torch.bool))

    def accuracy_of(self, kind_V: Tensor) -> Accuracy:
        return accuracy(self.outcome.accuracies_B[kind_V].bool().numpy(), self._prompts_V[kind_V.numpy()])

    def accuracy_by_length(self) -> dict[str, Accuracy]:
        """Return the accuracy of pairs whose chosen response has more, fewer or as many tokens. Omit empty kinds.

        A policy that learned only length is right in the first kind and wrong in the second (Park et al. 2024, "Disentangling
        Length from Quality in Direct Preference Optimization").
        """
        chosen_B, rejected_B = self.logprobs.tokens_B2.unbind(dim=1)
        kinds = {
            "chosen_longer": chosen_B > rejected_B,
            "chosen_shorter": chosen_B < rejected_B,
            "same_length": chosen_B == rejected_B,
        }
        return {name: self.accuracy_of(kind_B) for name, kind_B in kinds.items() if kind_B.any()}

    def columns(self) -> dict[str, list[Any]]:
        """Return one row per pair, to compare with another policy on the same pairs."""
        numbers: Mapping[str, Tensor] = {
            "loss": self.outcome.losses_B,
            "reward_chosen": self.outcome.rewards_B2[:, 0],
            "reward_rejected": self.outcome.rewards_B2[:, 1],
            "margin": self.outcome.margins_B,
            "policy_chosen_logprob": self.logprobs.policy_B2[:, 0],
            "policy_rejected_logprob": self.logprobs.policy_B2[:, 1],
            "reference_chosen_logprob": self.logprobs.reference_B2[:, 0],
            "reference_rejected_logprob": self.logprobs.reference_B2[:, 1],
        }
        tokens = {f"{side}_tokens": self.logprobs.tokens_B2[:, column].tolist() for column, side in enumerate(SIDES)}
        keys = {f"{side}_key": [k.tobytes().hex() for k in self.pairs.keys(side)[self.positions_V]] for side in SIDES}
        rows = {"row": self.pairs.rows[self.positions_V].tolist()}
        return rows | keys | tokens | {name: values.tolist() for name, values in numbers.items()}


def score_pairs(
    policy: PreTrainedModel,
    pairs: Pairs,
    positions_V: npt.NDArray[np.int64],
    reference: LogProbTable,
    loss: Loss,
    group: Group,
    events: EventWriter,
) -> ScoredPairs:
    """Score the pairs at `positions_V` with the policy. Each rank scores a part; all ranks return all pairs, on the CPU.

    Raises TrainingError for a non-finite log-prob, CorruptArtifact if the table has other token counts.
    """
    tokens_V2 = reference.tokens_P2[positions_V]
    scores = _score_places(policy, pairs, positions_V, tokens_V2.min(axis=1), group, events)
    _check_finite_pairs(pairs, positions_V, scores, tokens_V2.T.flatten())
    sums_V2, tails_V2 = (torch.from_numpy(by_pair(scores[:, column])) for column in (1, 2))
    reference_tails_P2 = reference.tails_P2
    logprobs = PairLogProbs(
        policy_B2=sums_V2,
        reference_B2=torch.from_numpy(reference.logprobs_P2[positions_V]),
        tokens_B2=torch.from_numpy(tokens_V2),
        policy_tails_B2=tails_V2,
        reference_tails_B2=None if reference_tails_P2 is None else torch.from_numpy(reference_tails_P2[positions_V]),
    )
    return ScoredPairs(pairs, positions_V, logprobs, preference_loss(loss, logprobs))


def _score_places(
    policy: PreTrainedModel,
    pairs: Pairs,
    positions_V: npt.NDArray[np.int64],
    common_V: npt.NDArray[np.int32],
    group: Group,
    events: EventWriter,
) -> npt.NDArray[np.float64]:
    """Return for each of the 2V places: token count, summed log-prob, and log-prob of the tokens after `common_V`."""
    lengths_2V = np.concatenate([pairs.lengths(side)[positions_V] for side in SIDES])
    prompts = (pairs.prompt_numbers(positions_V), pairs.prompt_lengths[positions_V].astype(np.int64))
    batches = shared_batches(lengths_2V, Prompts(*(np.tile(column_V, 2) for column_V in prompts)))
    progress = Progress(events, 2 * len(positions_V), "sequences")
    common_2V = torch.from_numpy(common_V).tile(2)
    rows = [torch.empty(0, 4, dtype=torch.float64)]

    def read(place: int) -> TokenSequence:
        side, index = divmod(place, len(positions_V))
        return pairs.sequence(int(positions_V[index]), SIDES[side])

    for scored in score_in_rounds(policy, batches, read, group):
        if scored.own is not None:
            batch, scores = scored.own
            places_S = torch.from_numpy(batch.positions)
            columns = (places_S, scores.counts_S, scores.sums_S, scores.tails_S(common_2V[places_S]))
            rows.append(torch.stack([column.double() for column in columns], dim=1))
        progress.advance(len(scored.all_positions))
    all_rows = group.gather_rows(torch.cat(rows).to(group.device)).cpu().numpy()
    by_place: npt.NDArray[np.float64] = all_rows[all_rows[:, 0].argsort(), 1:]
    return by_place


def _check_finite_pairs(
    pairs: Pairs, positions_V: npt.NDArray[np.int64], scores: npt.NDArray[np.float64], counts: npt.NDArray[np.int32]
) -> None:
    rows_2V = np.tile(pairs.rows[positions_V], 2)
    if len(bad := np.flatnonzero(~np.isfinite(scores[:, 1]))):
        raise TrainingError(
            f"the model gives non-finite log-probs to {len(bad)} of {len(scores)} responses, first in row "
            f"{rows_2V[bad[0]]}; if its training diverged, lower training.optimizer.learning_rate",
            "non-finite-logprob",
        )
    if len(bad := np.flatnonzero(scores[:, 0] != counts)):
        raise CorruptArtifact(
            f"the reference log-prob of a response of row {rows_2V[bad[0]]} is over {counts[bad[0]]} tokens, but its mask "
            f"has {scores[bad[0], 0]:.0f}; run `pedigree rescore RECIPE` to set the table aside; the next run recomputes it",
            "wrong-token-count",
        )

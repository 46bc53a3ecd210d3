"""Examples of held-out pairs in the report: sampled answers, and the pairs of greatest loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from training.data.tokenization.message_text import PairText
from training.evaluation.generate import decode
from training.scoring.pairs import ScoredPairs

_WORST_PAIRS = 10
_EXAMINED_SAMPLES = 8


@dataclass(frozen=True)
class Sample:
    """A held-out prompt with the answers of the reference model (before) and the policy (after), and the chosen response."""

    row: int
    prompt: str
    before: str
    after: str
    chosen: str

    def abridged(self, most: int) -> "Sample":
        """Return the sample with at most `most` characters per text: the end of the prompt, the beginning of the answers."""
        return Sample(self.row, self.prompt[-most:], self.before[:most], self.after[:most], self.chosen[:most])


@dataclass(frozen=True)
class WorstPair:
    row: int
    loss: float
    margin: float
    prompt: str
    chosen: str
    rejected: str

    def abridged(self, most: int) -> "WorstPair":
        """Return the pair with at most `most` characters per text, cut like a sample."""
        prompt, chosen, rejected = self.prompt[-most:], self.chosen[:most], self.rejected[:most]
        return replace(self, prompt=prompt, chosen=chosen, rejected=rejected)

    def with_messages(self, messages: Mapping[int, PairText]) -> "WorstPair":
        """Return the pair with its messages instead of decoded tokens, if the messages are known."""
        if (text := messages.get(self.row)) is None:
            return self
        return replace(self, prompt=text.prompt, chosen=text.chosen, rejected=text.rejected)


def examined_positions(held_out: ScoredPairs, sampled: Sequence[int]) -> list[int]:
    """Return the positions of the pairs whose tokens are scored again: the first samples, and the pairs of greatest loss."""
    worst = [int(held_out.positions_V[place]) for place in _worst_places(held_out)]
    return list(dict.fromkeys([*sampled[:_EXAMINED_SAMPLES], *worst]))


def worst_pairs(held_out: ScoredPairs, tokenizer: PreTrainedTokenizerBase) -> list[WorstPair]:
    """Return the pairs with the greatest loss, worst first. They show wrong labels and weaknesses of the policy."""
    pairs, worst = held_out.pairs, []
    for place in _worst_places(held_out):
        index = int(held_out.positions_V[place])
        worst.append(
            WorstPair(
                row=int(pairs.rows[index]),
                loss=float(held_out.outcome.losses_B[place]),
                margin=float(held_out.outcome.margins_B[place]),
                prompt=decode(tokenizer, pairs.prompt_ids(index)),
                chosen=decode(tokenizer, pairs.response_ids(index)),
                rejected=decode(tokenizer, pairs.response_ids(index, "rejected")),
            )
        )
    return worst


def _worst_places(held_out: ScoredPairs) -> list[int]:
    order = np.argsort(-held_out.outcome.losses_B.numpy(), kind="stable")[:_WORST_PAIRS]
    return [int(place) for place in order]

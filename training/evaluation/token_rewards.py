"""Rewards of single tokens, for the heatmap of the report.

The reward of DPO is beta times the log-ratio of policy and reference, and the log-ratio of a response is a sum over its tokens.
So each token has its own implicit reward:

    beta * (log pi(token | prompt, earlier tokens) - log pi_ref(token | prompt, earlier tokens))

Rafailov et al. 2024, "From r to Q*: Your Language Model is Secretly a Q-Function" (arXiv 2404.12358), show that DPO learns a
reward for each token this way. If the loss uses no reference model, its reward is not a function of the log-ratio. Then the
tokens have their log-ratios in nats, the change of their log-prob.

1. Each model scores both responses of a few pairs: in batches, divided among the ranks, like the held-out pairs.
2. Rank 0 subtracts the log-probs, and decodes the tokens.

Legend: E examined pairs. The 2E responses have places: the chosen ones 0..E-1, then the rejected ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.contract.config.loss import Loss
from training.data.tokenization.pair_dataset import SIDES, Pairs, Side
from training.distributed import Group
from training.evaluation.generate import decode
from training.model.attention.shared_prefix import TokenSequence
from training.model.logprobs.batch_scoring import Prompts, score_in_rounds, shared_batches

_SHOWN_TOKENS = 300
_SHOWN_PROMPT = 300  # characters
_STRONGEST = 3
_FULL_PERCENTILE = 95  # a few extreme tokens must not make all others pale
_REPLACEMENT = "\ufffd"  # decoded from a part of a character

TokenLogProbs = list[npt.NDArray[np.float64]]  # by place, the log-prob of each trained token


@dataclass(frozen=True)
class RewardedToken:
    """A token of a response, and its reward; None if it is not trained."""

    text: str
    reward: float | None


@dataclass(frozen=True)
class RewardedResponse:
    """The first tokens of a response. `total` and `count` are over all trained tokens, `omitted` is the number of others."""

    tokens: Sequence[RewardedToken]
    omitted: int
    total: float
    count: int

    def strongest(self) -> list[tuple[str, float]]:
        """Return the shown tokens with the greatest rewards in absolute value, greatest first."""
        rewarded = [(token.text, token.reward) for token in self.tokens if token.reward is not None]
        return sorted(rewarded, key=lambda token: -abs(token[1]))[:_STRONGEST]


@dataclass(frozen=True)
class RewardedPair:
    row: int
    prompt: str
    chosen: RewardedResponse
    rejected: RewardedResponse


@dataclass(frozen=True)
class TokenRewards:
    """The pairs of the heatmap. `beta` is None if the values are log-ratios, because the loss uses no reference model."""

    pairs: Sequence[RewardedPair]
    beta: float | None

    @property
    def full(self) -> float:
        """The absolute value with the strongest colour; stronger tokens have the same colour."""
        responses = [response for pair in self.pairs for response in (pair.chosen, pair.rejected)]
        rewards = [token.reward for response in responses for token in response.tokens if token.reward is not None]
        return max(float(np.percentile(np.abs(rewards), _FULL_PERCENTILE)), 1e-6) if rewards else 1e-6


def score_tokens(model: PreTrainedModel, pairs: Pairs, positions: Sequence[int], group: Group) -> TokenLogProbs:
    """Return the log-probs of the trained tokens at the 2E places, on every rank. Collective."""
    positions_E = np.array(positions, dtype=np.int64)
    lengths_2E = np.concatenate([pairs.lengths(side)[positions_E] for side in SIDES])
    prompts = (pairs.prompt_numbers(positions_E), pairs.prompt_lengths[positions_E].astype(np.int64))
    batches = shared_batches(lengths_2E, Prompts(*(np.tile(column_E, 2) for column_E in prompts)))

    def read(place: int) -> TokenSequence:
        side, index = divmod(place, len(positions_E))
        return pairs.sequence(int(positions_E[index]), SIDES[side])

    rows = [torch.zeros(0, 2, dtype=torch.float64)]  # place and log-prob; the tokens of a response are consecutive
    for scored in score_in_rounds(model, batches, read, group):
        if scored.own is not None:
            batch, scores = scored.own
            places_N = torch.repeat_interleave(torch.from_numpy(batch.positions), scores.counts_S)
            rows.append(torch.stack([places_N.double(), scores.tokens_N.double()], dim=1))
    all_rows = group.gather_rows(torch.cat(rows).to(group.device)).cpu().numpy()
    return [all_rows[all_rows[:, 0] == place, 1] for place in range(len(lengths_2E))]


@dataclass(frozen=True)
class ExaminedPairs:
    """The E pairs at `positions`, with the log-probs of their tokens under policy and reference model."""

    pairs: Pairs
    positions: Sequence[int]
    policy: TokenLogProbs
    reference: TokenLogProbs

    def rewards(
        self, loss: Loss, tokenizer: PreTrainedTokenizerBase, prompts_by_row: Mapping[int, str]
    ) -> TokenRewards:
        """Return the rewards of the tokens. A prompt missing in `prompts_by_row` is decoded."""
        beta = loss.beta if loss.needs_reference else None
        ratios = [policy - reference for policy, reference in zip(self.policy, self.reference, strict=True)]
        rewards = [(1.0 if beta is None else beta) * ratio for ratio in ratios]
        rewarded = []
        for number, position in enumerate(self.positions):
            row = int(self.pairs.rows[position])
            prompt = prompts_by_row.get(row) or decode(tokenizer, self.pairs.prompt_ids(position))
            chosen, rejected = (
                self._response(position, side, rewards[number + column * len(self.positions)], tokenizer)
                for column, side in enumerate(SIDES)
            )
            rewarded.append(RewardedPair(row, prompt[-_SHOWN_PROMPT:], chosen, rejected))
        return TokenRewards(rewarded, beta)

    def _response(
        self, position: int, side: Side, rewards: npt.NDArray[np.float64], tokenizer: PreTrainedTokenizerBase
    ) -> RewardedResponse:
        sequence, start = self.pairs.sequence(position, side), int(self.pairs.prompt_lengths[position])
        values: list[float | None] = [None] * len(sequence.ids_T)
        trained = np.flatnonzero(sequence.mask_T.numpy()[1:]) + 1  # nothing predicts the first token of a sequence
        for index, reward in zip(trained.tolist(), rewards.tolist(), strict=True):
            values[index] = reward
        end = start + _SHOWN_TOKENS
        texts = token_texts(tokenizer, sequence.ids_T[start:end].tolist())
        tokens = [RewardedToken(*token) for token in zip(texts, values[start:end], strict=True)]
        return RewardedResponse(tokens, max(0, len(values) - end), float(rewards.sum()), len(rewards))


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return the text of each token, special tokens included.

    Some tokenizers drop the space before a word at the beginning of a text. So each token is decoded together with the one
    before it, unless the two form one character.
    """

    def text_of(few: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(few), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    texts, previous = [], ""
    for index in range(len(ids)):
        alone, both = text_of(ids[index : index + 1]), text_of(ids[max(0, index - 1) : index + 1])
        is_continued = both.startswith(previous) and not previous.endswith(_REPLACEMENT)
        texts.append(both.removeprefix(previous) if is_continued else alone)
        previous = alone
    return texts

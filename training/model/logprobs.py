"""Log-probabilities of responses under a model: the one place where the model's forward pass is called.

Legend: S sequences, T tokens of the longest, N response tokens of all sequences together, V vocabulary.

Sequences are padded on the right, so no position needs shifting and the padding, masked, changes nothing. Only the rows
that predict a response token go through the log-softmax, in float32 whatever the model's dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class TokenSequence:
    """A prompt with one response. `ids_T`: token ids, int64; `mask_T`: True where a token belongs to the response."""

    ids_T: Tensor
    mask_T: Tensor


@dataclass(frozen=True)
class LogProbs:
    """`tokens_N`: the log-prob in nats of every response token, sequence after sequence; `counts_S`: how many each has."""

    tokens_N: Tensor
    counts_S: Tensor

    @property
    def sums_S(self) -> Tensor:
        """Summed log-probs, a sequence each, float32 and differentiable."""
        owners_N = torch.repeat_interleave(torch.arange(len(self.counts_S), device=self.tokens_N.device), self.counts_S)
        zeros_S = torch.zeros(len(self.counts_S), dtype=self.tokens_N.dtype, device=self.tokens_N.device)
        return zeros_S.index_add(0, owners_N, self.tokens_N)


def response_logprobs(model: PreTrainedModel, sequences: Sequence[TokenSequence]) -> LogProbs:
    """Log-probs of the response tokens of `sequences`, in their order; gradients flow unless they are switched off."""
    device = next(model.parameters()).device
    lengths_S = [len(s.ids_T) for s in sequences]
    ids_ST = torch.nn.utils.rnn.pad_sequence([s.ids_T for s in sequences], batch_first=True).to(device)
    mask_ST = torch.nn.utils.rnn.pad_sequence([s.mask_T for s in sequences], batch_first=True).to(device)
    attention_ST = torch.arange(ids_ST.shape[1], device=device) < torch.tensor(lengths_S, device=device)[:, None]
    logits_STV = model(input_ids=ids_ST, attention_mask=attention_ST.long(), use_cache=False).logits
    predicted_ST = mask_ST[:, 1:].bool()
    logits_NV = logits_STV[:, :-1][predicted_ST].float()
    targets_N = ids_ST[:, 1:][predicted_ST]
    tokens_N = -torch.nn.functional.cross_entropy(logits_NV, targets_N, reduction="none")
    return LogProbs(tokens_N, predicted_ST.sum(1))

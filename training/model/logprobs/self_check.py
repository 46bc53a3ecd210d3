"""The self-check: before a job relies on them, a model's log-probs must be those of plain transformers.

Two tiny groups of random tokens go through `response_logprobs` and, one sequence at a time, through the model's own
forward pass and a log-softmax of all its logits. What a new architecture or a new version of a library changes in the
head, the positions or the attention shows here, in a fraction of a second, and not in a wrong policy.

The two differ by rounding: a root mean square of 0.001 nats a token is allowed in float32. In bfloat16 it is 0.5, since real
weights spread what is rounded far more than random ones: in SmolLM2-135M-Instruct the two differed by 0.085, and by up to 0.13
where the sums of one were taken in another order, as kernels of a GPU take them.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training.contract.errors import ModelError
from training.contract.protocol.events import EventWriter
from training.model.attention.prefix_support import why_not_shared
from training.model.attention.shared_prefix import TokenSequence
from training.model.backbone import architecture, text_config
from training.model.logprobs.response_logprobs import response_logprobs

_RMS_NATS = {torch.float32: 1e-3, torch.bfloat16: 0.5}
_GROUPS = ((7, (5, 9, 2)), (4, (6, 3)))  # tokens of each prompt, and of the responses to it
LONGEST = max(prompt + max(responses) for prompt, responses in _GROUPS)


def check_exact(
    model: PreTrainedModel, events: EventWriter, dtype: torch.dtype | None = None, training: bool = False
) -> None:
    """Raise ModelError unless the log-probs of `model` are exact; say so if it cannot share prompts among responses.

    `dtype`: in which it computes, if not that of its weights. `training`: whether the model will also run in training mode,
    in which some models cannot share prompts.
    """
    if reason := why_not_shared(model, training):
        events.note(f"each sequence is run in a row of its own, so every prompt more than once: {reason}")
    sequences, sizes = tiny_groups(text_config(model).vocab_size)
    mode = model.training
    with torch.no_grad():
        model.eval()
        found_N = response_logprobs(model, sequences, sizes).tokens_N
        plain_N = torch.cat([_plain(model, sequence) for sequence in sequences])
    model.train(mode)
    error = float((found_N - plain_N).square().mean().sqrt())
    dtype = dtype or model.dtype
    allowed = _RMS_NATS[dtype]
    if bool(plain_N.isfinite().all()) and not error <= allowed:  # a job that meets NaN in real data can name the rows
        raise ModelError(
            f"the log-probs of {architecture(model)} ({model.config.model_type}) differ from those of its own forward "
            f"pass by {error:.3g} nats a token, expected at most {allowed:g} in {dtype}: from {found_N[0]:.4f} and "
            f"{plain_N[0]:.4f} in the first one. This model's head or attention is not what its config says: use another "
            f"base model, or the version of transformers this program was tested with"
        )


def tiny_groups(vocabulary: int, times: int = 1) -> tuple[list[TokenSequence], list[int]]:
    """Sequences of random tokens, and how many consecutive ones share each prompt; the same ones every time.

    Each is `times` as long as it need be; the longest then has `times * LONGEST` tokens.
    """
    random = torch.Generator().manual_seed(0)
    sequences = []
    for prompt, responses in _GROUPS:
        prompt *= times
        start = torch.randint(vocabulary, (prompt,), generator=random)
        for count in responses:
            ids_T = torch.cat([start, torch.randint(vocabulary, (times * count,), generator=random)])
            sequences.append(TokenSequence(ids_T, torch.arange(len(ids_T)) >= prompt))
    return sequences, [len(responses) for _, responses in _GROUPS]


def _plain(model: PreTrainedModel, sequence: TokenSequence) -> Tensor:
    ids_T, mask_T = sequence.ids_T.to(model.device), sequence.mask_T.to(model.device)
    logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0, :-1].float()
    return logits_TV.log_softmax(-1).gather(1, ids_T[1:, None])[:, 0][mask_T[1:]]

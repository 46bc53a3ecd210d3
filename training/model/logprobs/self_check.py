"""The self-check: at the start of a job, a model's log-probs must equal those of plain transformers.

Two tiny groups of random tokens go through `response_logprobs`, and one sequence at a time through the model's own forward
pass and a log-softmax of all logits. If a new architecture or library version changes the head, the positions or the
attention, the job fails within a fraction of a second.

Rounding may cause a root mean square difference of 0.001 nats per token in float32, and of 0.5 in bfloat16: real weights
amplify rounding errors far more than random ones. For SmolLM2-135M-Instruct in bfloat16 we measured 0.085, and up to 0.13
with sums in another order, as in kernels of a GPU.
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
    """Raise ModelError unless the log-probs of `model` are exact. Write a note if it cannot share prompts.

    `dtype`: the dtype of its computations, by default of its weights. `training`: whether it will also run in training mode:
    some models cannot share prompts then.
    """
    if reason := why_not_shared(model, training):
        events.note(f"each sequence runs in a row of its own, without sharing its prompt: {reason}")
    sequences, sizes = tiny_groups(text_config(model).vocab_size)
    mode = model.training
    with torch.no_grad():
        model.eval()
        logprobs_N = response_logprobs(model, sequences, sizes).tokens_N
        expected_N = torch.cat([_plain_logprobs(model, sequence) for sequence in sequences])
    model.train(mode)
    error = float((logprobs_N - expected_N).square().mean().sqrt())
    dtype = dtype or model.dtype
    allowed = _RMS_NATS[dtype]
    # With NaN in the expected log-probs the job goes on: it meets NaN in real data too, and can name the rows.
    if bool(expected_N.isfinite().all()) and not error <= allowed:
        raise ModelError(
            f"the log-probs of {architecture(model)} ({model.config.model_type}) differ from its own forward pass by "
            f"{error:.3g} nats per token, expected at most {allowed:g} in {dtype} (first token: {logprobs_N[0]:.4f}, own "
            f"pass {expected_N[0]:.4f}). The model's head or attention does not match its config: use another base model, "
            "or the tested version of transformers",
            "self-check",
        )


def tiny_groups(vocabulary: int, times: int = 1) -> tuple[list[TokenSequence], list[int]]:
    """Return fixed sequences of random tokens, and the numbers of consecutive sequences with the same prompt.

    `times` multiplies all lengths: the longest sequence has `times * LONGEST` tokens.
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


def _plain_logprobs(model: PreTrainedModel, sequence: TokenSequence) -> Tensor:
    ids_T, mask_T = sequence.ids_T.to(model.device), sequence.mask_T.to(model.device)
    logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0, :-1].float()
    return logits_TV.log_softmax(-1).gather(1, ids_T[1:, None])[:, 0][mask_T[1:]]

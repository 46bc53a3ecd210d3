"""Samples: greedy answers of a model to a few held-out prompts, so that people can see what training changed.

The prompts are spread evenly over the distinct held-out ones, and divided among the ranks; with a sharded model every token is
a collective pass, so all ranks answer all prompts together. An answer ends at an end token of the tokenizer or of the
model's config, or at the one that the chosen responses end with. The model's own generation settings are not used:
temperature and penalties would hide what the weights do, and no fingerprint covers them.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from training.data.tokenized import Pairs
from training.data.tokenizer import control_ids
from training.distributed import Group
from training.model.body import text_config
from training.model.logprobs import runs_in_lockstep

_NO_TOKEN = -1


def spread_prompts(pairs: Pairs, among: npt.NDArray[np.int64], count: int) -> list[int]:
    """Positions of at most `count` pairs with distinct prompts, evenly spread over `among`, its first one included."""
    _, firsts = np.unique(pairs.prompt_numbers(among), return_index=True)
    spread = np.linspace(0, len(firsts), min(count, len(firsts)), endpoint=False).astype(int)
    return [int(at) for at in among[firsts[spread]]]


def stop_tokens(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, pairs: Pairs, among: Sequence[int]
) -> list[int]:
    """Every token that ends an answer. The chosen responses of the pairs at `among` show how the template ends one."""
    configured = config.get_text_config().eos_token_id
    stops = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    stops |= {_last_control_token(pairs.response_ids(index), tokenizer) for index in among}
    return sorted(token for token in stops if token is not None)


def _last_control_token(response: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The control token that `response` ends with, apart from whitespace after it; None where it ends with other text."""
    controls = control_ids(tokenizer)
    for token in reversed(response):
        if token in controls:
            return token
        if tokenizer.decode([token]).strip():
            return None
    return None


def greedy(model: PreTrainedModel, prompt: Sequence[int], stops: list[int], max_new_tokens: int) -> list[int]:
    """The most likely continuation of `prompt`, token by token; shorter where the model has no positions left."""
    positions = getattr(text_config(model), "max_position_embeddings", None) or len(prompt) + max_new_tokens
    room = min(max_new_tokens, positions - len(prompt))
    if room < 1:
        return []
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=room, eos_token_id=stops or None, pad_token_id=stops[0] if stops else 0
    )
    ids_1T = torch.tensor([list(prompt)], device=model.device)
    out_1T = model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), use_cache=True)
    tokens: list[int] = out_1T[0, len(prompt) :].tolist()
    return tokens


def answers(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    stops: list[int],
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    group: Group,
) -> list[str]:
    """What `model` answers to each prompt, as text; every rank does its share and gets all."""
    everything = range(len(prompts))
    share = everything if runs_in_lockstep(model) else everything[group.rank :: group.world]
    rows = torch.full((len(share), 1 + max_new_tokens), _NO_TOKEN, dtype=torch.int64)
    for row, at in zip(rows, share, strict=True):
        tokens = greedy(model, prompts[at], stops, max_new_tokens)
        row[0] = at
        row[1 : 1 + len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    texts = [""] * len(prompts)
    for at, *tokens in group.gather_rows(rows.to(group.device)).tolist():
        texts[at] = decode(tokenizer, [token for token in tokens if token != _NO_TOKEN])
    return texts


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text

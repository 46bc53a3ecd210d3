"""Samples: answers of a model to a few held-out prompts, so that people can see what training changed.

The prompts are spread evenly over the distinct held-out ones, and divided among the ranks; with a sharded model every token is
a collective pass, so all ranks answer all prompts together. Answers are made, and end, as a server would make those of the
released model: greedily, unless `release.generation` says otherwise.
"""

from collections.abc import Mapping, Sequence
from typing import Any

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

from training.contract.config.recipe import Generation
from training.contract.errors import TemplateError
from training.data.tokenization.pair_dataset import Pairs
from training.distributed import Group
from training.model.backbone import text_config
from training.model.logprobs.response_logprobs import is_collective

_NO_TOKEN = -1
_GREEDY = Generation()


def spread_prompts(pairs: Pairs, among: npt.NDArray[np.int64], count: int) -> list[int]:
    """Positions of at most `count` pairs with distinct prompts, evenly spread over `among`, its first one included."""
    _, firsts = np.unique(pairs.prompt_numbers(among), return_index=True)
    spread = np.linspace(0, len(firsts), min(count, len(firsts)), endpoint=False).astype(int)
    return [int(at) for at in among[firsts[spread]]]


def stop_tokens(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, settings: Mapping[str, Any]) -> list[int]:
    """Return the tokens at which the released model stops, in ascending order.

    `settings` holds `eos_token_ids`, those of the base model's files, and `eos_tokens`, which the recipe adds. A spec that was
    frozen before it held them stands for the ids in the model's `config`. Raises TemplateError for a token that is unknown.
    """
    configured = settings.get("eos_token_ids", config.get_text_config().eos_token_id)
    stops = set(configured if isinstance(configured, list) else [configured]) - {None}
    known, added = tokenizer.get_vocab(), settings.get("eos_tokens", [])
    if unknown := [token for token in added if token not in known]:
        raise TemplateError(f"`release.eos_tokens` has {unknown[0]!r}, which the tokenizer does not have as one token")
    return sorted({*stops, *(known[token] for token in added)})


def greedy(model: PreTrainedModel, prompt: Sequence[int], stops: list[int], max_new_tokens: int) -> list[int]:
    """The most likely continuation of `prompt`, token by token; shorter where the model has no positions left."""
    return continuation(model, prompt, stops, max_new_tokens, _GREEDY)


def continuation(
    model: PreTrainedModel,
    prompt: Sequence[int],
    stops: list[int],
    max_new_tokens: int,
    drawing: Generation,
    seed: int = 0,
) -> list[int]:
    """Return a continuation of `prompt`, drawn as `drawing` says; the same for the same `seed`."""
    positions = getattr(text_config(model), "max_position_embeddings", None) or len(prompt) + max_new_tokens
    room = min(max_new_tokens, positions - len(prompt))
    if room < 1:
        return []
    lot = {"temperature": drawing.temperature, "top_p": drawing.top_p, "top_k": drawing.top_k}
    model.generation_config = GenerationConfig(
        do_sample=drawing.temperature > 0,
        max_new_tokens=room,
        eos_token_id=stops or None,
        pad_token_id=stops[0] if stops else 0,
        repetition_penalty=drawing.repetition_penalty,
        **(lot if drawing.temperature else {}),
    )
    ids_1T = torch.tensor([list(prompt)], device=model.device)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
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
    drawing: Generation = _GREEDY,
) -> list[str]:
    """What `model` answers to each prompt, as text; every rank does its share and gets all."""
    everything = range(len(prompts))
    share = everything if is_collective(model) else everything[group.rank :: group.world]
    rows = torch.full((len(share), 1 + max_new_tokens), _NO_TOKEN, dtype=torch.int64)
    for row, at in zip(rows, share, strict=True):
        tokens = continuation(model, prompts[at], stops, max_new_tokens, drawing, seed=at)
        row[0] = at
        row[1 : 1 + len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    texts = [""] * len(prompts)
    for at, *tokens in group.gather_rows(rows.to(group.device)).tolist():
        texts[at] = decode(tokenizer, [token for token in tokens if token != _NO_TOKEN])
    return texts


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text

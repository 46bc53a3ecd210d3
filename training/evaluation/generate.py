"""Sample a model's answers to a few held-out prompts, to show the effect of training.

The prompts are evenly spaced among the distinct held-out prompts, and divided among the ranks. With a sharded model every token
is a collective pass, so all ranks answer all prompts together. A server of the released model decodes and stops in the same
way: greedily, unless `release.generation` sets other values.
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

from training.contract.config.release import Generation
from training.contract.errors import TemplateError
from training.contract.protocol.settings import EvaluationSpec
from training.data.tokenization.pair_dataset import Pairs
from training.distributed import Group
from training.model.backbone import text_config
from training.model.logprobs.response_logprobs import is_collective

_NO_TOKEN = -1
_GREEDY = Generation()


def spread_prompts(pairs: Pairs, among: npt.NDArray[np.int64], count: int) -> list[int]:
    """Return the positions of at most `count` pairs with distinct prompts, evenly spaced in `among`, with its first pair."""
    _, firsts = np.unique(pairs.prompt_numbers(among), return_index=True)
    spread = np.linspace(0, len(firsts), min(count, len(firsts)), endpoint=False).astype(int)
    return [int(position) for position in among[firsts[spread]]]


def stop_tokens(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, settings: EvaluationSpec) -> list[int]:
    """Return the stop tokens of the released model, in ascending order.

    The ids come from the base model's files, and with an old spec from the model's `config`. Raises TemplateError for an
    unknown token in `release.eos_tokens`.
    """
    configured = settings.eos_token_ids
    if configured is None:
        configured = config.get_text_config().eos_token_id
    stops = set(configured if isinstance(configured, list | tuple) else [configured]) - {None}
    vocabulary, added = tokenizer.get_vocab(), settings.eos_tokens
    if unknown := [token for token in added if token not in vocabulary]:
        raise TemplateError(
            f"`release.eos_tokens` has {unknown[0]!r}; expected a single token of the tokenizer, spelled as in tokenizer.json",
            "unknown-eos-token",
        )
    return sorted({*stops, *(vocabulary[token] for token in added)})


def greedy(model: PreTrainedModel, prompt: Sequence[int], stops: list[int], max_new_tokens: int) -> list[int]:
    """Return the greedy continuation of `prompt`. It is shorter if the model lacks positions."""
    return continuation(model, prompt, stops, max_new_tokens, _GREEDY)


def continuation(
    model: PreTrainedModel,
    prompt: Sequence[int],
    stops: list[int],
    max_new_tokens: int,
    drawing: Generation,
    seed: int = 0,
) -> list[int]:
    """Return a continuation of `prompt` by the settings of `drawing`; the same for the same `seed`."""
    positions = getattr(text_config(model), "max_position_embeddings", None) or len(prompt) + max_new_tokens
    room = min(max_new_tokens, positions - len(prompt))
    if room < 1:
        return []
    sampling = {"temperature": drawing.temperature, "top_p": drawing.top_p, "top_k": drawing.top_k}
    model.generation_config = GenerationConfig(
        do_sample=drawing.temperature > 0,
        max_new_tokens=room,
        eos_token_id=stops or None,
        pad_token_id=stops[0] if stops else 0,
        repetition_penalty=drawing.repetition_penalty,
        **(sampling if drawing.temperature else {}),
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
    """Return the model's answer to each prompt, as text. Each rank answers its share and returns all answers."""
    indices = range(len(prompts))
    share = indices if is_collective(model) else indices[group.rank :: group.world]
    rows = torch.full((len(share), 1 + max_new_tokens), _NO_TOKEN, dtype=torch.int64)
    for row, index in zip(rows, share, strict=True):
        tokens = continuation(model, prompts[index], stops, max_new_tokens, drawing, seed=index)
        row[0] = index
        row[1 : 1 + len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    texts = [""] * len(prompts)
    for index, *tokens in group.gather_rows(rows.to(group.device)).tolist():
        texts[index] = decode(tokenizer, [token for token in tokens if token != _NO_TOKEN])
    return texts


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text

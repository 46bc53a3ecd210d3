"""The body of a model: what makes hidden states of token ids, without the head.

In a model that takes images or sound as well (Gemma 3, Qwen 3.5, Mistral Small 3) it is the language model alone. Preference
pairs are text, so the other parts never run: they get no gradient, are not trained, and are saved as they are.
"""

import re

from torch.nn import Embedding, Module
from transformers import PreTrainedConfig, PreTrainedModel

from training.contract.errors import ModelError
from training.contract.protocol.events import EventWriter

# Of the modules and buffers that hold a vector for each position: gpt2, opt, openai-gpt; gptj.
_POSITIONS = re.compile(r"wpe|\w*position\w*")


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The config of what reads and writes text: the model's own, or the part of it that is about its language model."""
    return model.config.get_text_config()


def takes_only_text(model: PreTrainedModel) -> bool:
    """Whether its language model is all there is of `model`."""
    return text_config(model) is model.config


def architecture(model: PreTrainedModel) -> str:
    """The name of its class, as in its config.json: FSDP gives a model that it shards a class of its own."""
    return type(model).__name__.removeprefix("FSDP")


def body_of(model: PreTrainedModel) -> PreTrainedModel:
    """The body of `model`, whose `last_hidden_state` the head turns into logits."""
    part = model if takes_only_text(model) else model.get_decoder()
    # llama4's `base_model_prefix` names none of its parts.
    return part.base_model if part.base_model is not part else getattr(part, "model", part)


def position_limit(model: PreTrainedModel) -> int | None:
    """How many positions the body has vectors for; None where it computes any position (rotary, ALiBi)."""
    named = [(name.rpartition(".")[2], module) for name, module in body_of(model).named_modules()]
    tables = [
        module.num_embeddings - getattr(module, "offset", 0)
        for name, module in named
        if isinstance(module, Embedding) and _POSITIONS.fullmatch(name)
    ]
    tables += [len(buffer) for name, buffer in body_of(model).named_buffers() if name.endswith(".embed_positions")]
    return min(tables, default=None)


def check_positions(model: PreTrainedModel, longest: int, events: EventWriter) -> None:
    """Raise ModelError if `model` cannot run a sequence of `longest` tokens; note it if it was made for shorter ones alone."""
    limit, usual = position_limit(model), getattr(text_config(model), "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise ModelError(
            f"`tokenization.max_length` allows a sequence of {longest:,} tokens, and the model has {limit:,} positions: "
            f"set it to {limit}, or use another base model"
        )
    if usual is not None and longest > usual:
        events.note(
            f"the longest sequence has {longest:,} tokens, and the model was made for {usual:,} (`max_position_embeddings` of "
            f"its config.json): of longer ones it may know little; `tokenization.max_length: {usual}` keeps them out"
        )


def text_modules(model: PreTrainedModel) -> dict[str, Module]:
    """The modules that text goes through, those of the body and of the head, by their names in `model`."""
    used = {part for whole in (body_of(model), model.get_output_embeddings()) if whole for part in whole.modules()}
    return {name: module for name, module in model.named_modules() if module in used}


def freeze_other_parts(model: PreTrainedModel) -> None:
    """Ask for no gradient of what text does not go through."""
    trained = {id(parameter) for module in text_modules(model).values() for parameter in module.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in trained:
            parameter.requires_grad_(False)

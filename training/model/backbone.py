"""The body of a model: the modules between token ids and hidden states, without the head.

In a multimodal model (Gemma 3, Qwen 3.5, Mistral Small 3) the body is the language model alone. Preference pairs are text, so
the other parts never run: they get no gradient and are saved unchanged.
"""

import re

from torch.nn import Embedding, Module
from transformers import PreTrainedConfig, PreTrainedModel

from training.contract.errors import ModelError
from training.contract.protocol.events import EventWriter

# Names of modules and buffers with one vector per position: gpt2, opt, openai-gpt; gptj.
_POSITIONS = re.compile(r"wpe|\w*position\w*")


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the config of the language model: the model's config or a part of it."""
    return model.config.get_text_config()


def takes_only_text(model: PreTrainedModel) -> bool:
    """Return whether `model` consists of a language model only."""
    return text_config(model) is model.config


def architecture(model: PreTrainedModel) -> str:
    """Return the class name as in config.json: FSDP prefixes the class of a sharded model."""
    return type(model).__name__.removeprefix("FSDP")


def body_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the body of `model`. The head turns its `last_hidden_state` into logits."""
    part = model if takes_only_text(model) else model.get_decoder()
    # llama4's `base_model_prefix` matches none of its attributes.
    return part.base_model if part.base_model is not part else getattr(part, "model", part)


def position_limit(model: PreTrainedModel) -> int | None:
    """Return the number of position vectors; None if positions are computed (rotary, ALiBi)."""
    modules = [(name.rpartition(".")[2], module) for name, module in body_of(model).named_modules()]
    tables = [
        module.num_embeddings - getattr(module, "offset", 0)
        for name, module in modules
        if isinstance(module, Embedding) and _POSITIONS.fullmatch(name)
    ]
    tables += [len(buffer) for name, buffer in body_of(model).named_buffers() if name.endswith(".embed_positions")]
    return min(tables, default=None)


def check_positions(model: PreTrainedModel, longest: int, events: EventWriter) -> None:
    """Raise ModelError if `model` cannot run `longest` tokens; write a note if its config declares fewer positions."""
    limit, declared = position_limit(model), getattr(text_config(model), "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise ModelError(
            f"`tokenization.max_length` allows a sequence of {longest:,} tokens, but the model has {limit:,} positions: "
            f"set it to {limit}, or use another base model",
            "sequence-too-long",
        )
    if declared is not None and longest > declared:
        events.note(
            f"the longest sequence has {longest:,} tokens, but `max_position_embeddings` in the model's config.json is "
            f"{declared:,}; the model may handle longer sequences badly; `tokenization.max_length: {declared}` drops them"
        )


def text_modules(model: PreTrainedModel) -> dict[str, Module]:
    """Return the modules of body and head by their names in `model`."""
    used = {part for root in (body_of(model), model.get_output_embeddings()) if root for part in root.modules()}
    return {name: module for name, module in model.named_modules() if module in used}


def freeze_other_parts(model: PreTrainedModel) -> None:
    """Freeze the parameters outside body and head."""
    trained = {id(parameter) for module in text_modules(model).values() for parameter in module.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in trained:
            parameter.requires_grad_(False)

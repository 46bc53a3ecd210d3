"""The stop tokens and generation settings of a released model, from the files of its base model.

`transformers.generate` and servers such as vLLM stop at the `eos_token_id` of generation_config.json. If it is missing,
transformers uses the one of config.json.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training.contract.config.json_object import JsonObject
from training.contract.config.release import Generation
from training.contract.identity.json_objects import read_object

_NO_EFFECT = {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
GENERATION_CONFIG = "generation_config.json"
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Bookkeeping of transformers.
_NO_SETTING = {"transformers_version", "_from_model_config", "use_cache", "output_attentions", "output_hidden_states"}
# The sampling of the base model. A policy is another model, and is evaluated with the settings of its recipe.
_NO_SETTING |= {
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"),
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "penalty_alpha", "dola_layers"),
    *("num_beams", "num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping", "num_return_sequences"),
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "guidance_scale"),
}


def generation_settings(folder: Path) -> JsonObject:
    """Return the generation settings a release keeps from the base model in `folder`, without its sampling settings.

    Special tokens come from generation_config.json, else from config.json. Raises ModelError if a file cannot be read.
    """
    path, config = folder / GENERATION_CONFIG, read_object(folder / "config.json", "a model's config")
    inner = config.get("text_config")
    parts = [
        inner if isinstance(inner, dict) else {},
        config,
        read_object(path, "generation settings") if path.is_file() else {},
    ]
    settings = {name: part[name] for part in parts[:2] for name in _SPECIAL_TOKENS if part.get(name) is not None}
    settings |= {name: value for name, value in parts[2].items() if value is not None}
    return {name: value for name, value in settings.items() if name not in _NO_SETTING}


def released_settings(kept: Mapping[str, Any], eos: Sequence[int], generation: Generation) -> JsonObject:
    """Return the generation_config.json of a release.

    `kept` is the result of `generation_settings`, `generation` the recipe's section. For greedy decoding, pipelines of
    transformers need `do_sample: false`, and servers such as vLLM need `temperature: 0`. Settings without an effect are
    left out.
    """
    temperature = generation.temperature
    written = {name: value for name, value in generation.model_dump().items() if value != _NO_EFFECT.get(name)}
    settings = {**kept, **written, "do_sample": temperature > 0, "temperature": temperature}
    if temperature:
        settings["top_k"] = generation.top_k  # transformers' default is 50
    settings.pop("eos_token_id", None)
    return settings | ({"eos_token_id": eos[0] if len(eos) == 1 else list(eos)} if eos else {})


def eos_token_ids(settings: Mapping[str, Any]) -> list[int]:
    """Return the ids of the stop tokens in these generation settings, ascending."""
    configured = settings.get("eos_token_id")
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({id_ for id_ in ids if isinstance(id_, int)})

"""At which tokens a released model stops, by the files of its base model.

`transformers.generate` and servers such as vLLM stop at the `eos_token_id` of generation_config.json; without one there,
transformers takes that of config.json.
"""

import json
from pathlib import Path
from typing import Any

from training.contract.errors import ModelError

GENERATION_CONFIG = "generation_config.json"
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Written by transformers about itself and the file.
_NO_SETTING = {"transformers_version", "_from_model_config"}


def generation_settings(folder: Path) -> dict[str, Any]:
    """Return how the model in `folder` generates: what its generation_config.json says, and special tokens of its config.json.

    Raises ModelError if one of the files cannot be read.
    """
    path, config = folder / GENERATION_CONFIG, _object(folder / "config.json")
    inner = config.get("text_config")
    parts = [inner if isinstance(inner, dict) else {}, config, _object(path) if path.is_file() else {}]
    settings = {name: part[name] for part in parts[:2] for name in _SPECIAL_TOKENS if part.get(name) is not None}
    settings |= {name: value for name, value in parts[2].items() if value is not None}
    return {name: value for name, value in settings.items() if name not in _NO_SETTING}


def eos_token_ids(settings: dict[str, Any]) -> list[int]:
    """Return the ids of the tokens at which a model with these generation settings stops, in ascending order."""
    configured = settings.get("eos_token_id")
    listed = configured if isinstance(configured, list) else [configured]
    return sorted({id_ for id_ in listed if isinstance(id_, int)})


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}; fetch or save the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a JSON {type(content).__name__}; expected an object")
    return content

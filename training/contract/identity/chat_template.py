"""The chat template of a recipe: the one function that decides which file or field counts.

A tokenizer may have several templates. The order follows transformers 5 (`PreTrainedTokenizerBase.from_pretrained`), and
then the file of a model's processor, which transformers reads only for the processor.
"""

import io
import json
from pathlib import Path
from typing import Any

from training.contract.config.json_object import JsonObject
from training.contract.errors import TemplateError

_JINJA, _CONFIG, _PROCESSOR = "chat_template.jinja", "tokenizer_config.json", "chat_template.json"
_DEFAULT = "default"  # the name of the template that counts, if there are several


def chat_template(tokenizer: Path, of_recipe: bytes | None) -> str | None:
    """Return the text of the template: the recipe's file, else the one in the folder `tokenizer`; None without any.

    `of_recipe`: the content of the file that `tokenization.chat_template` names. Line ends become newlines. Raises
    TemplateError if a file cannot be read.
    """
    if of_recipe is not None:
        return _decode(of_recipe, "the file")
    if (jinja := tokenizer / _JINJA).is_file():
        return _decode(_read(jinja), _JINJA)
    if any(tokenizer.glob("additional_chat_templates/*.jinja")):  # transformers then ignores the config
        return None
    of_config = _read_field(tokenizer / _CONFIG)
    if isinstance(of_config, list):
        return next((entry["template"] for entry in of_config if entry["name"] == _DEFAULT), None)
    template = of_config or _read_field(tokenizer / _PROCESSOR)
    return template if isinstance(template, str) else None


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise TemplateError(f"{file.name} cannot be read: {error}", "unreadable-chat-template") from error


def _decode(content: bytes, name: str) -> str:
    try:
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8").read()  # line ends as `open` reads them
    except UnicodeDecodeError as error:
        raise TemplateError(f"{name} cannot be read: {error}", "unreadable-chat-template") from error


def _read_field(file: Path) -> Any:
    """Return `chat_template` of the JSON object in `file`; None if either is missing."""
    return _read_json(file).get("chat_template") if file.is_file() else None


def _read_json(file: Path) -> JsonObject:
    try:
        content = json.loads(_read(file))
    except ValueError as error:
        raise _unreadable(file, f"{type(error).__name__}: {error}") from error
    if not isinstance(content, dict):
        raise _unreadable(file, f"it holds a JSON {type(content).__name__}")
    return content


def _unreadable(file: Path, problem: str) -> TemplateError:
    return TemplateError(
        f'{file.name} cannot be read: {problem}; expected {{"chat_template": ...}}, or set `tokenization.chat_template` to a '
        ".jinja file",
        "unreadable-chat-template",
    )

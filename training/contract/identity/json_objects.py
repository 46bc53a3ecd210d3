"""Read JSON objects in a model's folder: its config, its generation settings, an index of its weights."""

import json
from pathlib import Path

from training.contract.config.json_object import JsonObject
from training.contract.errors import ModelError


def read_object(path: Path, what: str) -> JsonObject:
    """Return the object in the file `path`; `what` describes it in errors. Raises ModelError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise ModelError(
            f"{path} cannot be read as {what}: {error}; fetch or save the model again", "bad-json"
        ) from error
    if not isinstance(content, dict):
        raise ModelError(
            f"{path} holds a JSON {type(content).__name__}; expected an object, {what}: fetch or save the model again",
            "bad-json",
        )
    return content


def unreadable(path: Path, error: OSError) -> ModelError:
    """Return the error for an unreadable file, such as a 0600 file of another user: safetensors ignores the umask."""
    return ModelError(
        f"{path} cannot be read: {error.strerror}; let this user read it, or fetch or save the model again",
        "unreadable-file",
    )

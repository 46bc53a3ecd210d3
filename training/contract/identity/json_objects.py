"""JSON objects in the folder of a model: its config, its generation settings, an index of its weights."""

import json
from pathlib import Path
from typing import Any

from training.contract.errors import ModelError


def read_object(path: Path, what: str) -> dict[str, Any]:
    """Return the object in the file `path`; `what` says what it should be. Raises ModelError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise ModelError(f"{path} cannot be read as {what}: {error}; fetch or save the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a JSON {type(content).__name__}; expected an object, {what}")
    return content


def unreadable(path: Path, error: OSError) -> ModelError:
    """Of a file that another user has saved, say: safetensors makes its files 0600, whatever the umask."""
    return ModelError(
        f"{path} cannot be read: {error.strerror}; let this user read it, or fetch or save the model again"
    )

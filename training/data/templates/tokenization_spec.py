"""Read the artifact `tokenization_spec`."""

import json
from pathlib import Path
from typing import Any

SPEC_FILE, TOKENIZER_FOLDER = "spec.json", "tokenizer"


def read_spec(folder: Path) -> dict[str, Any]:
    """Return the frozen template, rules and token ids in the artifact's folder."""
    spec: dict[str, Any] = json.loads((folder / SPEC_FILE).read_text(encoding="utf-8"))
    return spec

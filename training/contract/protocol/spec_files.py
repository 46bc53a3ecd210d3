"""The file `spec.json` of a frozen tokenizer and its chat template."""

from pathlib import Path

from pydantic import Field

from training.contract.config.json_object import JsonObject
from training.contract.store.artifact_kind import StoredModel

SPEC_FILE, TOKENIZER_FOLDER = "spec.json", "tokenizer"


class TokenizationSpec(StoredModel):
    """The frozen template, rules and token ids of a `tokenization_spec`.

    `special_ids`: by role, such as `eos_token_id`. `end_of_turn`: the ids of the tokens that end a turn.
    """

    train_on: str
    max_length: int
    over_length: str
    template_kwargs: JsonObject = Field(default={})
    date: str | None = None
    template: str
    tokenizer_fingerprint: str
    template_fingerprint: str
    special_ids: dict[str, int | None] = Field(default={})
    end_of_turn: dict[str, int] = Field(default={})
    vocabulary: int

    @classmethod
    def read(cls, folder: Path) -> "TokenizationSpec":
        """Return the spec in the artifact's folder. Raises OSError, ValueError."""
        return cls.model_validate_json((folder / SPEC_FILE).read_text(encoding="utf-8"))

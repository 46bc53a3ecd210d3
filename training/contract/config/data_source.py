"""A source of preference pairs, as a recipe names it: where its files are, and how their rows are read."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from training.contract.config.fields import Column, ConfigSection, Positive, Role, SourceName, Text, TheirRole

Format = Literal[
    "auto", "conversational", "implicit_prompt", "strings", "sharegpt", "hh", "alpaca", "openai", "messages", "ms_swift",
    "comparison",
]  # fmt: skip
# The fields of a row that formats read, those that they refuse included; a test holds the list to what they do.
FieldName = Literal[
    "prompt", "question", "instruction", "input", "history", "system", "conversations",
    "chosen", "rejected", "preferred_output", "non_preferred_output",
    "messages", "rejected_response", "rejected_messages",
    "response1", "response2", "response_0", "response_1", "response_2", "response_a", "response_b",
    "conversation_a", "conversation_b",
    "label", "winner", "preference", "preferred", "better_response_id", "overall_preference", "preference_strength",
    "tools", "chat_template_kwargs", "functions", "image", "images", "video", "videos", "audio", "audios",
]  # fmt: skip

# The names of settings that hold a list, and the field of a source that each lists; those of `_FIRST` are always there.
SOURCE_LISTS = {
    "formats": "format",
    "columns": "columns",
    "roles": "roles",
    "held_out": "held_out",
    "fractions": "fraction",
    "names": "name",
}
_FIRST = ("formats", "held_out")


class DataSource(ConfigSection):
    """Where preference pairs come from: local files (a file, a glob or a folder) or a data set of the hub.

    `columns` says in which column a field is that a format reads under another name, or, with null, that it is in none.
    `roles` says which of our roles each of the data's own roles stands for. If the source is `held_out`, its prompts are in the
    validation split, wherever else they occur. `fraction` is the share of its prompts that is used. Held-out pairs of sources
    with the same `name` get metrics of their own.
    """

    path: Text | None = None
    hub: Text | None = None
    config: Text | None = None
    split: Text | None = None
    revision: Text | None = None
    format: Format = "auto"
    columns: dict[FieldName, Column | None] = Field(default={})
    roles: dict[TheirRole, Role] = Field(default={})
    name: SourceName | None = None
    held_out: bool = False
    fraction: Annotated[Positive, Field(le=1)] = 1.0

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.path is None) == (self.hub is None):
            raise ValueError("give exactly one of `path` (local files) and `hub` (a data set's id)")
        if self.hub is not None and self.split is None:
            raise ValueError(f"`hub: {self.hub}` needs a `split`, for example `split: train`")
        if self.path is not None and (self.config or self.split or self.revision):
            raise ValueError("`config`, `split` and `revision` belong to `hub`, not to `path`")
        return self


def settings_of_sources(sources: Sequence[DataSource]) -> dict[str, Any]:
    """How the rows of `sources` are read: for each field a list.

    Without lists that ask for nothing, of fields that came later: such data keeps its key.
    """
    lists = {name: [getattr(source, field) for source in sources] for name, field in SOURCE_LISTS.items()}
    return {name: found for name, found in lists.items() if name in _FIRST or any(v != _default(name) for v in found)}


def settings_by_source(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The fields of each source, from lists that `settings_of_sources` made."""
    return [
        {field: settings[name][n] if name in settings else _default(name) for name, field in SOURCE_LISTS.items()}
        for n in range(len(settings["formats"]))
    ]


def _default(name: str) -> Any:
    return DataSource.model_fields[SOURCE_LISTS[name]].get_default()

"""A source of preference pairs in a recipe: its files, and how to read their rows."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from training.contract.config.fields import Column, ConfigSection, Positive, Role, SourceName, Text, TheirRole

Format = Literal[
    "auto", "conversational", "implicit_prompt", "strings", "sharegpt", "hh", "alpaca", "openai", "messages", "ms_swift",
    "comparison",
]  # fmt: skip
# The fields of rows known to formats, including unsupported ones; a test compares this list with the formats.
FieldName = Literal[
    "prompt", "question", "instruction", "input", "history", "system", "conversations",
    "chosen", "rejected", "preferred_output", "non_preferred_output",
    "messages", "rejected_response", "rejected_messages",
    "response1", "response2", "response_0", "response_1", "response_2", "response_a", "response_b",
    "conversation_a", "conversation_b",
    "label", "winner", "preference", "preferred", "better_response_id", "overall_preference", "preference_strength",
    "tools", "chat_template_kwargs", "functions", "image", "images", "video", "videos", "audio", "audios",
]  # fmt: skip


class DataSource(ConfigSection):
    """A source of preference pairs: local files (a file, a glob or a folder) or a data set of the Hub.

    `columns` maps a format's field to a column of the data, or to null if the data lacks it. `roles` maps the data's roles to
    the roles of this project. All prompts of a `held_out` source are in the validation split, even if they also occur in other
    sources. `fraction` is the used share of prompts. Held-out pairs of sources with the same `name` get separate metrics.
    """

    path: Text | None = Field(None, description="A file, a glob or a folder of local files, relative to the recipe.")
    hub: Text | None = Field(None, description="The id of a data set of the Hub, instead of `path`.")
    config: Text | None = Field(None, description="The configuration of the Hub's data set.")
    split: Text | None = Field(None, description="The split of the Hub's data set.")
    revision: Text | None = Field(None, description="The branch, tag or commit of the Hub's data set.")
    format: Format = Field("auto", description="The layout of the rows. `auto` detects it from the first rows.")
    columns: dict[FieldName, Column | None] = Field(
        default={}, description="The data's column for a field of the format, or null if the data lacks it."
    )
    roles: dict[TheirRole, Role] = Field(default={}, description="The role in this project for a role in the data.")
    name: SourceName | None = Field(None, description="The name under which held-out pairs get metrics of their own.")
    held_out: bool = Field(False, description="Use this source only for evaluation.")
    fraction: Annotated[Positive, Field(le=1)] = Field(
        1.0, description="The share of the source's prompts to use, chosen by hash."
    )

    @model_validator(mode="after")
    def _check_one_origin(self) -> Self:
        if (self.path is None) == (self.hub is None):
            raise ValueError("give exactly one of `path` (local files) and `hub` (a data set's id)")
        if self.hub is not None and self.split is None:
            raise ValueError(f"`hub: {self.hub}` needs a `split`, for example `split: train`")
        if self.path is not None and (self.config or self.split or self.revision):
            raise ValueError("`config`, `split` and `revision` belong to `hub`, not to `path`")
        return self

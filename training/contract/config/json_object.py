"""The type of a JSON object. A module of its own, because the command line imports it before pydantic."""

from typing import Any

JsonObject = dict[str, Any]  # the content of a JSON file or of a JSON column, of any version

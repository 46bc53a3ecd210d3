"""Tools of a conversation, tool calls, their results, and arguments of the chat template.

    tools                  [{type: function, function: {name, description, parameters}}]; or without the outer object; or JSON
                           text of the list or of each tool
    tool_calls             [{id, type: function, function: {name, arguments}}]; or without the outer object
    a result               a message of the role `tool`; it may have `tool_call_id` and `name`
    chat_template_kwargs   an object, or its JSON text

`arguments` are an object, or its JSON text as in OpenAI's API. Null and empty text are an empty object. Templates expect
objects, and servers parse that text too (vLLM, entrypoints/chat_utils.py). A null field in an object is removed, since a table
gives all rows the same fields. In JSON text it stays null.

Pairs and messages keep all of this as JSON text with the keys in their original order, because templates write that order.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from training.contract.config.json_object import JsonObject
from training.contract.config.recipe import RESERVED
from training.contract.files.arrow_rows import without_nulls
from training.data.formats.quarantine import Quarantined, QuarantineReason, Row, clean_text, strict_json, text_of

Item = JsonObject  # a tool or a call

# A NUL as JSON writes it. An escaped backslash before the text u0000 does not match.
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def tools_text(value: Any, path: str) -> str:
    """Return tools as JSON text; an empty text without tools. Raises Quarantined."""
    tools, is_text = _parse(value, path, list), isinstance(value, str)
    return _dump_json([_tool(tool, f"{path}[{index}]", is_text) for index, tool in enumerate(tools)], path)


def template_kwargs_text(value: Any, path: str) -> str:
    """Return arguments of the template as JSON text; an empty text without arguments. Raises Quarantined."""
    arguments = _parse(value if isinstance(value, str) else without_nulls(value), path, dict)
    if reserved := sorted(arguments.keys() & RESERVED):
        raise Quarantined(
            QuarantineReason.UNSUPPORTED_FIELD,
            f"`{path}` has {', '.join(reserved)}, which templates get in another way; remove it",
        )
    return _dump_json(arguments, path)


def calls_text(value: Any, path: str) -> str:
    """Return calls as JSON text, with their arguments as objects. Raises Quarantined."""
    calls = _parse(value, path, list)
    is_text = isinstance(value, str)
    return _dump_json([_call(call, f"{path}[{index}]", is_text) for index, call in enumerate(calls)], path)


def function_of(item: Mapping[str, Any]) -> Any:
    """Return the function of a tool or a call: its field `function`, or the item itself."""
    return item.get("function") or item


def with_function(item: Mapping[str, Any], **fields: Any) -> Item:
    """Return `item` with these fields in its function."""
    function = {**function_of(item), **fields}
    return {**item, "function": function} if item.get("function") else function


def _parse(value: Any, path: str, kind: type[list[Any]] | type[dict[str, Any]]) -> Any:
    """Return a list or an object, parsed if `value` is JSON text. It is empty if `value` is null or empty."""
    parsed = value
    if isinstance(value, str) and value:
        try:
            parsed = strict_json(value)
        except Quarantined as problem:
            raise Quarantined(problem.reason, f"`{path}`: {problem.detail}") from None
        except (ValueError, RecursionError) as error:
            raise Quarantined(QuarantineReason.BAD_JSON, f"`{path}` is text, but not JSON: {error}") from None
    if parsed is None or parsed == "" or parsed == []:  # an empty map of a table is a list
        parsed = kind()
    if not isinstance(parsed, kind):
        expected = "a list" if kind is list else "an object"
        raise Quarantined(QuarantineReason.WRONG_TYPE, f"`{path}` is {type(parsed).__name__}, expected {expected}")
    return parsed


def _check_function(item: Any, path: str) -> Row:
    """Return the function of `item`. Raise Quarantined unless it is an object whose name is text."""
    if not isinstance(item, Mapping):
        raise Quarantined(QuarantineReason.WRONG_TYPE, f"`{path}` is {type(item).__name__}, expected an object")
    function = function_of(item)
    if not isinstance(function, Mapping):
        raise Quarantined(
            QuarantineReason.WRONG_TYPE, f"`{path}.function` is {type(function).__name__}, expected an object"
        )
    text_of(function, "name", f"{path}.")
    return function


def _tool(value: Any, path: str, in_text: bool) -> Any:
    tool = _parse(value, path, dict) if isinstance(value, str) else value
    _check_function(tool, path)
    return tool if in_text or isinstance(value, str) else without_nulls(tool)


def _call(value: Any, path: str, in_text: bool) -> Item:
    if "arguments" not in _check_function(value, path):
        raise Quarantined(QuarantineReason.MISSING_FIELD, f"`{path}.arguments` is missing")
    call = value if in_text else without_nulls(value)
    arguments = _parse(function_of(call).get("arguments"), f"{path}.arguments", dict)
    return with_function(call, arguments=arguments)


def _dump_json(values: Sequence[Any] | Mapping[str, Any], path: str) -> str:
    if not values:
        return ""
    try:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Quarantined(QuarantineReason.WRONG_TYPE, f"`{path}` holds a value that JSON lacks: {error}") from None
    if _NUL.search(text):
        raise Quarantined(QuarantineReason.NUL, f"`{path}` has a NUL character")
    return clean_text(text, path)

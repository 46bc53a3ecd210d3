"""Tools that a conversation may use, calls of them by the assistant, their results, and what else a template is given.

    tools of a row    [{type: function, function: {name, description, parameters}}]; or without the outer object; or its text,
                      or a list of the text of each
    a call            tool_calls: [{id, type: function, function: {name, arguments}}]; or without the outer object
    its result        a message of the role `tool`, which may have `tool_call_id` and `name`
    what else         chat_template_kwargs of a row: an object, or its text

`arguments` are an object, or its JSON text, as in OpenAI's API; null or empty text is an empty object. Templates are written
for objects, which servers make of that text as well (vLLM, entrypoints/chat_utils.py). What is null in an object is absent,
since in a table every row has the fields of all; in text it is null.

A message holds its calls, and a pair its tools and the rest, as JSON text in which keys have the order they came in: a template
writes them in that order, so it is part of what they are.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from training.contract.config.recipe import RESERVED
from training.contract.files.arrow_rows import without_nulls
from training.data.formats.quarantine import Quarantined, QuarantineReason, Row, clean_text, strict_json, text_of

Item = dict[str, Any]  # a tool or a call

_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # as JSON writes it; not a backslash before the text u0000


def tools_text(given: Any, place: str) -> str:
    """The tools in `given`, as JSON text; the empty string where there are none. Raises Quarantined."""
    tools, is_text = _parsed(given, place, list), isinstance(given, str)
    return _text([_tool(tool, f"{place}[{index}]", is_text) for index, tool in enumerate(tools)], place)


def template_kwargs_text(given: Any, place: str) -> str:
    """The arguments for the template in `given`, as JSON text; the empty string where there are none. Raises Quarantined."""
    found = _parsed(given if isinstance(given, str) else without_nulls(given), place, dict)
    if taken := sorted(found.keys() & RESERVED):
        raise Quarantined(
            QuarantineReason.UNSUPPORTED_FIELD, f"`{place}` has {', '.join(taken)}, which the template is given anyway"
        )
    return _text(found, place)


def calls_text(given: Any, place: str) -> str:
    """The calls in `given`, with their arguments as objects, as JSON text. Raises Quarantined."""
    calls = _parsed(given, place, list)
    is_text = isinstance(given, str)
    return _text([_call(call, f"{place}[{index}]", is_text) for index, call in enumerate(calls)], place)


def function_of(item: Mapping[str, Any]) -> Any:
    """The function that a tool describes or a call names: in an object of its own, or not."""
    return item.get("function") or item


def with_function(item: Mapping[str, Any], **fields: Any) -> Item:
    """`item` with other fields of its function."""
    function = {**function_of(item), **fields}
    return {**item, "function": function} if item.get("function") else function


def _parsed(given: Any, place: str, kind: type[list[Any]] | type[dict[str, Any]]) -> Any:
    """`given` itself, or what it says as JSON text: a list or an object, empty where there is nothing."""
    found = given
    if isinstance(given, str) and given:
        try:
            found = strict_json(given)
        except Quarantined as problem:
            raise Quarantined(problem.reason, f"`{place}`: {problem.detail}") from None
        except (ValueError, RecursionError) as error:
            raise Quarantined(QuarantineReason.BAD_JSON, f"`{place}` is text that is no JSON: {error}") from None
    if found is None or found == "" or found == []:  # a map of a table that is empty
        found = kind()
    if not isinstance(found, kind):
        expected = "a list" if kind is list else "an object"
        raise Quarantined(QuarantineReason.WRONG_TYPE, f"`{place}` is {type(found).__name__}, expected {expected}")
    return found


def _checked(item: Any, place: str) -> Row:
    """What `item` says of the function, whose name is text."""
    if not isinstance(item, Mapping):
        raise Quarantined(QuarantineReason.WRONG_TYPE, f"`{place}` is {type(item).__name__}, expected an object")
    function = function_of(item)
    if not isinstance(function, Mapping):
        raise Quarantined(
            QuarantineReason.WRONG_TYPE, f"`{place}.function` is {type(function).__name__}, expected an object"
        )
    text_of(function, "name", f"{place}.")
    return function


def _tool(given: Any, place: str, in_text: bool) -> Any:
    item = _parsed(given, place, dict) if isinstance(given, str) else given
    _checked(item, place)
    return item if in_text or isinstance(given, str) else without_nulls(item)


def _call(given: Any, place: str, in_text: bool) -> Item:
    if "arguments" not in _checked(given, place):
        raise Quarantined(QuarantineReason.MISSING_FIELD, f"`{place}.arguments` is missing")
    item = given if in_text else without_nulls(given)
    arguments = _parsed(function_of(item).get("arguments"), f"{place}.arguments", dict)
    return with_function(item, arguments=arguments)


def _text(values: Sequence[Any] | Mapping[str, Any], place: str) -> str:
    if not values:
        return ""
    try:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Quarantined(QuarantineReason.WRONG_TYPE, f"`{place}` holds what JSON cannot: {error}") from None
    if _NUL.search(text):
        raise Quarantined(QuarantineReason.NUL, f"`{place}` has a NUL character")
    return clean_text(text, place)

"""Differences of two sets of settings as text: `loss.beta 0.1 -> 0.2`."""

import json
from collections.abc import Iterator, Mapping
from textwrap import shorten
from typing import Any

from training.contract.identity.fingerprint import shortened
from training.contract.identity.software import SOFTWARE
from training.contract.protocol.settings import SOURCE_LISTS, settings_by_source

_LONGEST_SECTION = 160
_ABSENT = object()  # instead of a missing field


def setting_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield `field old -> new`, with dotted names, for every changed field. A new section is one change."""
    for name, old, new in _differences(_group_by_source(before), _group_by_source(now)):
        if name == SOFTWARE:
            yield f"the versions of {', '.join(new)} count now" if old is _ABSENT else "software differs"
        else:
            yield f"{name.removeprefix(f'{SOFTWARE}.')} {_format_value(old)} -> {_format_value(new)}"


def _group_by_source(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Group the settings of sources by source, as in a recipe. Leave all others as they are."""
    if "formats" not in settings:
        return settings
    sources = settings_by_source(settings)
    rest = {name: value for name, value in settings.items() if name not in SOURCE_LISTS}
    return {**rest, "sources": {str(n): source.model_dump() for n, source in enumerate(sources)}}


def _differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(old.keys() | new.keys()):
            path = f"{name}.{key}" if name else str(key)
            yield from _differences(old.get(key, _ABSENT), new.get(key, _ABSENT), path)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and _has_sections(new):
        for index, (old_item, new_item) in enumerate(zip(old, new, strict=True)):
            yield from _differences(old_item, new_item, f"{name}[{index}]")
    elif old != new:
        yield name, old, new


def _has_sections(values: list[Any]) -> bool:
    return any(isinstance(value, (dict, list)) for value in values)


def _format_value(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    if value is None or isinstance(value, (bool, dict, list)):
        return shorten(json.dumps(value, ensure_ascii=False).replace('"', ""), _LONGEST_SECTION, placeholder=" ...")
    return shortened(str(value))

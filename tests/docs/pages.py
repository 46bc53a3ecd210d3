"""The Markdown pages of the project, and the parts of a page that tests look at."""

import re
from collections.abc import Iterator
from pathlib import Path

from docs._ext.generated import generate

ROOT = Path(__file__).resolve().parents[2]
PATHS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts),
]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PATHS}
_GENERATED = re.compile(r"^```\{generated\} (.+)\n```$", re.MULTILINE)


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of a page in a language, such as `yaml`."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)


def directives(text: str) -> list[str]:
    """Return the arguments of the directives `{generated}` of a page."""
    return _GENERATED.findall(text)


def with_tables(text: str) -> str:
    """Return a page with the tables that its directives insert."""
    return _GENERATED.sub(lambda found: generate(found[1]), text)


def cells(text: str) -> Iterator[str]:
    """Yield the cells of all tables in a page."""
    for line in prose(with_tables(text)).splitlines():
        if line.startswith("|"):
            yield from re.split(r"(?<!\\)\|", line.strip().strip("|"))

"""Read the fences of a page, with the marks for the tests.

A mark is an HTML comment right before a fence. GitHub and Sphinx do not show it:

- `<!-- test: skip: REASON -->` leaves the fence out.
- `<!-- test: save FILE -->` writes the fence into a file of the project, as a reader does in an editor.
- `<!-- test: edit FILE -->` merges a YAML fence into a recipe, as a reader does who changes some fields.
- `<!-- test: serve TEXT -->` starts the commands, waits until they print TEXT, and ends them with the page.

Without a mark, `bash` and `python` fences are run. The `text` fences after a command are its output, shortened.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    path.relative_to(ROOT / "docs").as_posix(): path
    for pattern in ("getting-started/*.md", "guides/*.md", "migrating-from-trl.md")
    for path in sorted((ROOT / "docs").glob(pattern))
}
_MARK = re.compile(r"<!-- test: (skip:|save|edit|serve) (.+?) -->")


@dataclass(frozen=True)
class Fence:
    """One fence: its place, language and text, and its mark with the mark's argument."""

    place: str
    language: str
    text: str
    mark: str | None = None
    argument: str = ""


def fences(page: Path) -> Iterator[Fence]:
    """Yield the fences of a page. Raises ValueError for an unknown mark, or a mark without a fence."""
    mark: re.Match[str] | None = None
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8")):
        place = f"{page.relative_to(ROOT)}:{token.map[0] + 1 if token.map else 0}"
        if mark and token.type != "fence":
            raise ValueError(f"{place}: expected a fence after {mark[0]}")
        if token.type == "html_block" and "test:" in token.content:
            mark = _MARK.fullmatch(token.content.strip())
            if mark is None:
                raise ValueError(f"{place}: unknown mark {token.content.strip()}")
        if token.type == "fence":
            yield Fence(place, token.info.strip(), token.content, *((mark[1].rstrip(":"), mark[2]) if mark else ()))
            mark = None

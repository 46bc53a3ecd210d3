"""The release in the report of an evaluation: recipe, version, date and the gate's decision on top of the page.

The job that writes the report does not know the release, which comes later. So it leaves the line `<!-- release -->`. The texts
of the page are escaped, so no text of the data can look like that line.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from training.contract.system.templates import templates_beside

_START, _END = "<!-- release -->", "<!-- end of release -->"
_PLACE = re.compile(f"{_START}\n(?:.*?{_END}\n)?", re.DOTALL)
_BODY = re.compile(r"<body[^>]*>\n?")
_TEMPLATES = templates_beside(__file__)
_WEB = ("http://", "https://")  # other addresses are shown as text: a link could run a script


@dataclass(frozen=True)
class ReleaseSummary:
    """A registered version, and the gate's decision about it. `links`: web addresses by their texts."""

    recipe: str
    version: int
    registered_model: str
    date: str
    is_champion: bool
    reasons: Sequence[str]
    links: Mapping[str, str]


def add_release(page: str, summary: ReleaseSummary) -> str:
    """Return the report `page` with a header about the release. It replaces an earlier one.

    A report of an older version of Pedigree has no place for it. There it comes first in the body.
    """
    text = _TEMPLATES.get_template("release.html.j2").render(release=summary, web=_WEB)
    header = f"{_START}\n{text}\n{_END}\n"
    place = _PLACE.search(page)
    if place is None:
        body = _BODY.search(page)
        start = end = body.end() if body else 0
    else:
        start, end = place.span()
    return page[:start] + header + page[end:]

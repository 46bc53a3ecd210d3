"""The release in the report of an evaluation: recipe, version, date and the gate's decision on top of the page.

The job that writes the report does not know the release, which comes later. So it leaves the line `<!-- release -->`. The texts
of the page are escaped, so no text of the data can look like that line.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jinja2 import Environment, StrictUndefined

_START, _END = "<!-- release -->", "<!-- end of release -->"
_PLACE = re.compile(f"{_START}\n(?:.*?{_END}\n)?", re.DOTALL)
_BODY = re.compile(r"<body[^>]*>\n?")
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
    header = f"{_START}\n{_HEADER.render(release=summary, web=_WEB)}\n{_END}\n"
    place = _PLACE.search(page)
    if place is None:
        body = _BODY.search(page)
        start = end = body.end() if body else 0
    else:
        start, end = place.span()
    return page[:start] + header + page[end:]


# Styles of its own, because reports of older versions lack them.
_HEADER = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).from_string("""\
<section style="border: 1px solid #8885; border-left: .4rem solid {{ "#2a8f5b" if release.is_champion else "#d9622b" }};
 border-radius: .5rem; padding: .75rem 1rem; margin: 0 0 1rem; overflow-wrap: anywhere">
<strong>Version {{ release.version }} of {{ release.registered_model }}
{{- " is the champion" if release.is_champion else " is not the champion" }}</strong>
<div>Recipe {{ release.recipe }}, {{ release.date }}</div>
{% if release.reasons %}
<div>Decision of the gate:</div>
<ul style="margin: 0; padding-left: 1.25rem">
{% for reason in release.reasons %}
<li>{{ reason }}</li>
{% endfor %}
</ul>
{% endif %}
{% for text, address in release.links.items() %}
{% if address.startswith(web) %}
<div><a href="{{ address }}">{{ text }}</a></div>
{% else %}
<div>{{ text }}: {{ address }}</div>
{% endif %}
{% endfor %}
</section>
""")

"""The result card of an asset: one sentence and a picture as an SVG image, for the top of the asset's page.

Dagster shows pictures of metadata only after a click. A description may contain images, so it shows the card at a fixed
address. Every materialization replaces the card.
"""

import re
from html import escape
from textwrap import wrap

_WIDTH, _PADDING, _LINE_HEIGHT = 740, 10, 19
_PICTURE_WIDTH, _PICTURE_HEIGHT = 420, 180  # in the proportion of the pictures in assets.views.metadata
_CHARACTERS_A_LINE, _CHARACTERS_BESIDE_PICTURE = 100, 38
_MOST_LINES = 4  # of a warning
_WARNING = ' style="fill: #b3540a"'
_PICTURE = re.compile(r"!\[[^\]]*\]\((?P<data>data:image/png;base64,[A-Za-z0-9+/=]+)\)")


def render_card(sentence: str, picture: str | None, stale: str = "") -> str:
    """Return the card as SVG, with the sentence beside the picture.

    `picture`: Markdown with a PNG as a data URI, as in the metadata. `stale`: why the result is out of date. The card is low,
    because Dagster folds long descriptions.
    """
    found = _PICTURE.search(picture) if picture else None
    width = _CHARACTERS_BESIDE_PICTURE if found else _CHARACTERS_A_LINE
    warning = wrap(f"Stale: {stale}", width)[:_MOST_LINES] if stale else []
    lines = warning + wrap(sentence, width)
    left = _PADDING + (_PICTURE_WIDTH + _PADDING if found else 0)
    height = max(_LINE_HEIGHT * len(lines), _PICTURE_HEIGHT if found else 0) + 2 * _PADDING
    texts = "\n".join(
        f'<text{_WARNING if number < len(warning) else ""} x="{left}" '
        f'y="{_PADDING + _LINE_HEIGHT * (number + 1) - 5}">{escape(line)}</text>'
        for number, line in enumerate(lines)
    )
    image = (
        f'<image x="{_PADDING}" y="{_PADDING}" width="{_PICTURE_WIDTH}" height="{_PICTURE_HEIGHT}" '
        f'href="{found["data"]}"/>'
        if found
        else ""
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}">
<style>text {{ font: 14px system-ui, sans-serif; fill: #1b1b1f }}</style>
<rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="6" fill="#ffffff" stroke="#c8c8d0"/>
{texts}
{image}
</svg>
"""

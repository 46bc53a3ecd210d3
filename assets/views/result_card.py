"""The result card of an asset: one sentence and a picture as an SVG image, for the top of the asset's page.

Dagster shows pictures of metadata only after a click. A description may contain images, so it shows the card at a fixed
address. Every materialization replaces the card.
"""

import re
from textwrap import wrap

from training.contract.system.templates import templates_beside

_WIDTH, _PADDING, _LINE_HEIGHT = 740, 10, 19
_PICTURE_WIDTH, _PICTURE_HEIGHT = 420, 180  # in the proportion of the pictures in assets.views.metadata
_CHARACTERS_A_LINE, _CHARACTERS_BESIDE_PICTURE = 100, 38
_MOST_LINES = 4  # of a warning
_TEMPLATES = templates_beside(__file__)
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
    card = _TEMPLATES.get_template("card.svg.j2")
    return card.render(
        width=_WIDTH,
        height=height,
        padding=_PADDING,
        picture=found["data"] if found else None,
        picture_width=_PICTURE_WIDTH,
        picture_height=_PICTURE_HEIGHT,
        lines=lines,
        warnings=len(warning),
        left=left,
        line_height=_LINE_HEIGHT,
    )

"""An HTML page of pairs: trained tokens are framed and coloured by their log-prob under the reference.

The file is self-contained, without scripts. Its text comes from preference data, so it is escaped, and a content security
policy forbids scripts and requests.
"""

from collections.abc import Sequence
from html import escape

from assets.views.pair_reader import SIDES, TokenizedRow, TokenizedSide

# Nats at which the colour is full: a token of probability one in 22,000.
_FULL_NATS = 10.0
_STYLE = """
body { font: 15px/1.6 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h2 { margin: 2rem 0 .3rem } h3 { margin: 1rem 0 .2rem; font-weight: 600 } .sums { color: #555 }
.tokens { font: 13px/2 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
.tokens span { padding: .1em 0; color: #888 } .tokens .trained { color: #111; outline: 1px solid #8a8a8a; border-radius: 2px }
.scale { display: inline-block; width: 12rem; height: .8rem; background: linear-gradient(90deg, #fff, #e76f51) }
"""


def render_page(title: str, rows: Sequence[TokenizedRow]) -> str:
    sections = "\n".join(map(_section, rows))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p>Framed tokens are trained. Colour: the reference's log-prob of the token, from 0 nats
<span class="scale"></span> to -{_FULL_NATS:.0f} and below; the value is shown when the pointer rests on it.</p>
{sections}
</body>
</html>
"""


def _section(row: TokenizedRow) -> str:
    sides = "\n".join(map(_side, SIDES, (row.chosen, row.rejected)))
    return f"<h2>Row {row.row}, {escape(row.split)} split</h2>\n{sides}"


def _side(name: str, side: TokenizedSide) -> str:
    columns = zip(side.texts, side.mask, side.reference_token_logprobs, strict=True)
    tokens = "".join(_token(text, trained, value) for text, trained, value in columns)
    policy = side.policy_logprob
    policy_text = "" if policy is None else f", policy log-prob {policy:.4f}"  # unknown on the reference's pages
    return (
        f"<h3>{name}</h3>\n"
        f'<div class="sums">{len(side.texts)} tokens, {sum(side.mask)} trained; '
        f"reference log-prob {shown_logprob(side.reference_logprob)}{policy_text}</div>\n"
        f'<div class="tokens">{tokens}</div>'
    )


def _token(text: str, trained: bool, value: float | None) -> str:
    attributes = ' class="trained"' if trained else ""
    if value is not None:
        share = min(1.0, max(0.0, -value / _FULL_NATS))
        attributes += f' style="background: rgba(231,111,81,{share:.2f})" title="{value:.4f} nats"'
    return f"<span{attributes}>{escape(text)}</span>"


def shown_logprob(value: float | None) -> str:
    return "not computed" if value is None else f"{value:.4f}"

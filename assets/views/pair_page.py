"""An HTML page of pairs: trained tokens are framed and coloured by their log-prob under the reference.

The file is self-contained, without scripts. Its text comes from preference data, so it is escaped, and a content security
policy forbids scripts and requests.
"""

from collections.abc import Sequence

from assets.views.pair_reader import SIDES, TokenizedRow
from training.contract.system.templates import templates_beside

# Nats at which the colour is full: a token of probability one in 22,000.
_FULL_NATS = 10.0
_TEMPLATES = templates_beside(__file__)


def render_page(title: str, rows: Sequence[TokenizedRow]) -> str:
    template = _TEMPLATES.get_template("pairs.html.j2")
    return template.render(
        title=title, rows=rows, sides=SIDES, full_nats=_FULL_NATS, share=_share, shown_logprob=shown_logprob
    )


def shown_logprob(value: float | None) -> str:
    return "not computed" if value is None else f"{value:.4f}"


def _share(logprob: float) -> float:
    """Return how full the colour of a token is."""
    return min(1.0, max(0.0, -logprob / _FULL_NATS))

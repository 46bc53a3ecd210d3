"""An HTML page with the history of a registered model: its candidates, and the gate's evidence about each of them.

The file is self-contained, without scripts; texts are escaped.
"""

from assets.views.evidence_chart import evidence_svg
from model_registry.gate.anytime import shown_amount
from model_registry.gate.history import ModelHistory
from training.contract.system.templates import templates_beside

_TEMPLATES = templates_beside(__file__)


def render_history(history: ModelHistory) -> str:
    """Return the page."""
    template = _TEMPLATES.get_template("history.html.j2")
    return template.render(history=history, chart=evidence_svg(history.comparisons), amount=shown_amount)

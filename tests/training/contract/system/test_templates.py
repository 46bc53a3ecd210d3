"""Templates in files: escaping by their kind, and unknown names."""

from pathlib import Path

import pytest
from jinja2 import Environment, UndefinedError

from training.contract.system.templates import templates_beside


@pytest.fixture
def templates(tmp_path: Path) -> Environment:
    (tmp_path / "templates").mkdir()
    for name in ("page.html.j2", "card.svg.j2", "job.sbatch.j2"):
        (tmp_path / "templates" / name).write_text("{% if true %}\n{{ text }}\n{% endif %}\n")
    return templates_beside(str(tmp_path / "module.py"))


@pytest.mark.parametrize(
    ("name", "shown"),
    [("page.html.j2", "&lt;b&gt; &amp;"), ("card.svg.j2", "&lt;b&gt; &amp;"), ("job.sbatch.j2", "<b> &")],
)
def test_template_escapes_values_except_in_scripts(templates: Environment, name: str, shown: str):
    assert templates.get_template(name).render(text="<b> &") == f"{shown}\n"


def test_template_unknown_name_raises(templates: Environment):
    with pytest.raises(UndefinedError, match="text"):
        templates.get_template("page.html.j2").render()

"""Text of the data on Dagster's pages, parsed as Markdown by another library: it shows unchanged."""

import dagster as dg
import pytest
from markdown_it import MarkdownIt

from assets.views.metadata import verbatim
from tests.factories import write_inputs
from tests.workflows.homes import ATTRIBUTES, write_recipe
from tests.workflows.in_process import services_in
from workflows.commands.run import materialize
from workflows.recipes.discovery import load_recipe

CLOSING = "{# \n~~~~\n# Sign in again\n![](http://elsewhere.example/seen.png) #}"


@pytest.mark.parametrize("tildes", range(3, 10))
def test_nothing_ends_the_block_of_a_text(tildes):
    text = CLOSING.replace("~~~~", "~" * tildes)
    blocks = MarkdownIt("commonmark").parse(verbatim([text, text]).md_str)
    assert [block.type for block in blocks] == ["fence", "fence"]


def test_a_chat_template_is_shown_and_not_rendered(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "recipe").mkdir()
    write_inputs(tmp_path / "recipe")
    own = (tmp_path / "recipe" / "base" / "chat_template.jinja").read_text()
    (tmp_path / "recipe" / "closing.jinja").write_text(CLOSING + own)
    tokenization = {**ATTRIBUTES["tokenization"], "chat_template": "closing.jinja"}
    loaded = load_recipe(write_recipe(tmp_path / "recipe", {**ATTRIBUTES, "tokenization": tokenization}))
    with dg.DagsterInstance.ephemeral() as instance:
        materialize(loaded, services_in(tmp_path / "home"), instance, "tokenization_spec")
        event = instance.get_latest_materialization_event(loaded.pipeline.key("tokenization_spec"))
    assert event is not None and event.asset_materialization is not None
    [block] = MarkdownIt("commonmark").parse(event.asset_materialization.metadata["template"].value)
    assert block.type == "fence" and "Sign in again" in block.content

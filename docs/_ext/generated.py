"""The Sphinx extension of these pages: the directive `{generated}` inserts a table from the code.

    ```{generated} recipe training.optimizer
    ```

It also writes `recipe.schema.json`, the JSON schema of a recipe, beside the built pages.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from docs._ext.code_tables import assets_table, checks_table, losses_table, metrics_table
from docs._ext.field_tables import engine_table, recipe_table
from workflows.recipes.recipe_schema import recipe_schema

SCHEMA_FILE = "recipe.schema.json"
_SCHEMA_LINK = f'```{{raw}} html\n<p><a href="../{SCHEMA_FILE}" download>{SCHEMA_FILE}</a></p>\n```'
# By the first word of the directive's argument; the rest is passed on.
TABLES: dict[str, Callable[..., str]] = {
    "assets": assets_table,
    "checks": checks_table,
    "engine": engine_table,
    "losses": losses_table,
    "metrics": metrics_table,
    "recipe": recipe_table,
    "schema": lambda: _SCHEMA_LINK,
}


def generate(argument: str) -> str:
    """Return the Markdown for a directive's argument, such as `recipe training.optimizer`."""
    name, _, rest = argument.partition(" ")
    return TABLES[name](rest) if rest else TABLES[name]()


class Generated(SphinxDirective):
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        content = StringList(generate(self.arguments[0]).splitlines(), source=self.get_source_info()[0])
        container = nodes.Element()
        self.state.nested_parse(content, self.content_offset, container)
        return list(container.children)


def write_schema(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        (Path(app.outdir) / SCHEMA_FILE).write_text(json.dumps(recipe_schema(), indent=2) + "\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("generated", Generated)
    app.connect("build-finished", write_schema)
    return {"parallel_read_safe": True}

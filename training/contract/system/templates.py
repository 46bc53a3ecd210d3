"""Jinja templates in files: `NAME.html.j2` and others in the folder `templates/` beside the module that fills them."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def templates_beside(module: str) -> Environment:
    """Return the templates beside a module, given its `__file__`.

    Values are escaped, except in scripts: these take quoted values. An unknown name is an error.
    """
    return Environment(
        loader=FileSystemLoader(Path(module).with_name("templates")),
        autoescape=lambda name: name is None or not name.endswith(".sbatch.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

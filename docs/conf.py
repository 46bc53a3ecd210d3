"""The configuration of Sphinx: `make docs`. The build needs no network."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the extension docs._ext

project = "Pedigree"
version = release = version_of("pedigree")
extensions = ["myst_parser", "sphinx_click", "docs._ext.generated"]
exclude_patterns = ["_build", "_ext"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "Pedigree"
html_show_copyright = False
html_copy_source = False
html_theme_options: dict[str, object] = {"top_of_page_buttons": []}

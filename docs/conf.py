"""Sphinx settings: sphinx-build -W docs docs/_build/html, with fxqat installed."""

import sys
from pathlib import Path

from fxqat import __version__

sys.path.insert(0, str(Path(__file__).parent))  # the modules beside this file

from inventories import intersphinx_mapping as inventories  # noqa: E402

project = "fxqat"
author = "the fxqat authors"
release = __version__
version = __version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "provenance",
    "tables",
]
exclude_patterns = ["_build"]
intersphinx_mapping = inventories()
html_theme = "furo"
html_title = f"fxqat {__version__}"
html_static_path = ["_static"]
html_css_files = ["fxqat.css"]
html_show_sphinx = False
html_show_copyright = False

# The docstrings of torch.nn.Module are not ours, and are not all valid reStructuredText.
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
# Fields under "Attributes:" are listed in the text of the class, so that autodoc does not describe them twice.
napoleon_use_ivar = True

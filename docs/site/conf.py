"""Sphinx's configuration of the site; `make docs` calls Sphinx with it."""

project = "lightning_megatron"
author = "The authors of lightning_megatron"
copyright = author
html_title = "lightning_megatron"
html_theme = "furo"
html_show_sphinx = False
html_copy_source = False

extensions = ["myst_parser"]
# Links to headings are written as GitHub writes them.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# Types are written as the code has them, and are no links.
nitpicky = False

"""Builds the site: stages pages, writes those of the sources beside them, and runs Sphinx, whose warnings are errors.

python docs/site/build.py build/docs
"""

import sys
from pathlib import Path

import api
import errors
import pages
from sphinx.cmd.build import build_main

if __name__ == "__main__":
    target = Path(sys.argv[1])
    pages.stage(target / "pages")
    api.write(target / "pages" / "api")
    (target / "pages" / "errors.md").write_text(errors.page())
    configuration = str(Path(__file__).parent)
    options = ["-b", "html", "-c", configuration, "-W", "--keep-going", "-q", "-j", "2"]
    sys.exit(build_main([*options, str(target / "pages"), str(target / "html")]))

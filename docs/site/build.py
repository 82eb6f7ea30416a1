"""Builds the site: stages pages, writes those of the sources beside them, and runs Sphinx, whose warnings are errors.

A word that people search for and the built search does not find is an error, too.

python docs/site/build.py build/docs
"""

import sys
from pathlib import Path

import api
import errors
import pages
import search_words
from sphinx.cmd.build import build_main
from sphinx.search.en import SearchEnglish

if __name__ == "__main__":
    target = Path(sys.argv[1])
    pages.stage(target / "pages")
    api.write(target / "pages" / "api")
    (target / "pages" / "errors.md").write_text(errors.page())
    configuration = str(Path(__file__).parent)
    options = ["-b", "html", "-c", configuration, "-W", "--keep-going", "-q", "-j", "2"]
    if code := build_main([*options, str(target / "pages"), str(target / "html")]):
        sys.exit(code)
    index = (target / "html" / "searchindex.js").read_text(encoding="utf-8")
    if words := search_words.unfound(index, SearchEnglish({}).stem):
        sys.exit(f"the search finds no page for {', '.join(words)}")

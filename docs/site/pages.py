"""The pages of the documentation as a tree, and the folder that Sphinx builds them from.

The tree is written once, in the pages themselves: below a page are those that its section `Pages` links. The index and
the folder on GitHub lead the same way. `stage` copies the pages, puts the README among them, and appends to each page
the list of the pages below it, by which Sphinx makes the navigation.
"""

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# Pages of the repository's root, and their names on the site.
ROOT_PAGES = {"README.md": "readme.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
# Pages that are written from the sources when the site is built, below the page that leads to them.
WRITTEN = {DOCS / "index.md": "api/index", DOCS / "troubleshooting.md": "errors"}

_SECTION = re.compile(r"^## Pages\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s#]+\.md)(?:#[^)]*)?\)")


def pages_below(page: Path) -> list[Path]:
    """Pages that the section `Pages` of a page links, in its order."""
    section = _SECTION.search(page.read_text())
    links = _LINK.findall(section.group(1)) if section else []
    return list(dict.fromkeys((page.parent / link).resolve() for link in links))


def page_tree() -> dict[Path, list[Path]]:
    """Every page that is reached from the index, with the pages below it; each is below the first that links it."""
    tree: dict[Path, list[Path]] = {}
    waiting = [DOCS / "index.md"]
    placed = set(waiting)
    while waiting:
        page = waiting.pop(0)
        tree[page] = [below for below in pages_below(page) if below not in placed]
        placed.update(tree[page])
        waiting += tree[page]
    return tree


def staged_name(page: Path) -> str:
    """Name of a page in the staged folder: those of the root have one of their own, the others that within `docs/`."""
    return ROOT_PAGES[page.name] if page.parent == ROOT else page.relative_to(DOCS).as_posix()


def staged_text(page: Path) -> str:
    """Text of a page whose links fit the staged folder, in which `docs/` and the root are one."""
    text = page.read_text()
    up = "" if page.parent == ROOT else "../" * len(page.relative_to(DOCS).parts)
    for name, staged in ROOT_PAGES.items():
        text = text.replace(f"]({up}{name}", f"]({up.removesuffix('../')}{staged}")
    return text.replace("](docs/", "](") if page.parent == ROOT else text


def stage(target: Path) -> None:
    """Fills a new folder with the pages, their pictures and the navigation."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(DOCS, target, ignore=shutil.ignore_patterns("site", "__pycache__"))
    for name in ("LICENSE", "CITATION.cff"):
        shutil.copy(ROOT / name, target / name)
    for page, below in page_tree().items():
        names = [staged_name(one).removesuffix(".md") for one in below]
        if page in WRITTEN:
            names.append(WRITTEN[page])
        toctree = "\n```{toctree}\n:hidden:\n\n" + "".join(f"/{name}\n" for name in names) + "```\n"
        (target / staged_name(page)).write_text(staged_text(page) + (toctree if names else ""))

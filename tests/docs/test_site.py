"""The site: every page is reached from the first level, words that people search for find one, and the API is whole."""

import importlib.util
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_megatron.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(path for path in (ROOT / "docs").rglob("*.md")),
}
FIRST_LEVEL = [
    *("quick_start.md", "tutorials/index.md", "layouts.md", "clusters.md", "migration.md", "performance.md"),
    *("profiling.md", "troubleshooting.md", "limits.md", "faq.md", "how_it_is_built.md"),
]


def part_of_site(name: str) -> ModuleType:
    """A file of `docs/site/`, which is no package."""
    spec = importlib.util.spec_from_file_location(f"site_{name}", ROOT / "docs" / "site" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_page_is_reached_from_the_first_level() -> None:
    pages = part_of_site("pages")
    tree = pages.page_tree()
    assert [page.relative_to(ROOT / "docs").as_posix() for page in tree[ROOT / "docs" / "index.md"]] == FIRST_LEVEL
    assert set(tree) == PAGES, set(tree) ^ PAGES
    below = [page for children in tree.values() for page in children]
    assert len(below) == len(set(below)) == len(PAGES) - 1


def test_words_that_people_search_for_lead_to_pages() -> None:
    """Each is in a heading, or in the table of the index that says where to look; `make docs` asks the built search."""
    headings = "\n".join(line for page in PAGES for line in page.read_text().splitlines() if re.match(r"#+ \S", line))
    look = (ROOT / "docs" / "index.md").read_text().partition("## Where to look")[2]
    words = part_of_site("search_words").WORDS
    assert len(words) == 20 and not [word for word in words if word.lower() not in headings.lower() + look.lower()]


def test_a_word_that_the_search_has_no_page_for_is_told() -> None:
    search = part_of_site("search_words")
    stems: dict[str, Any] = {part: [0, 1] for word in search.WORDS for part in re.findall(r"\w+", word.lower())}
    index: dict[str, dict[str, Any]] = {"terms": stems | {"multi": 1}, "titleterms": {"node": 1, "mixed": [2]}}

    def unfound() -> list[str]:
        return list(search.unfound(f"Search.setIndex({json.dumps(index)})", str))

    assert unfound() == []
    index["terms"] |= {"node": 0, "mixed": 3, "faq": []}
    index["titleterms"] = {"mixed": [4]}
    assert unfound() == ["FAQ", "multi-node", "mixed precision"]


def test_the_staged_pages_keep_their_links(tmp_path: Path) -> None:
    pages = part_of_site("pages")
    pages.stage(tmp_path / "pages")
    staged = sorted((tmp_path / "pages").rglob("*.md"))
    assert len(staged) == len(PAGES)
    written = set(pages.WRITTEN.values())
    for page in staged:
        text = page.read_text()
        links = [
            link.partition("#")[0]
            for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.S))
        ]
        lost = [link for link in links if "://" not in link and not (page.parent / link).exists()]
        assert not lost, (page, lost)
        for name in re.findall(r"^/(\S+)$", text, re.MULTILINE):
            assert name in written or (tmp_path / "pages" / f"{name}.md").is_file(), name


def test_the_api_has_every_exported_name_with_its_docstring() -> None:
    api = part_of_site("api")
    for package in api.PACKAGES:
        text = api.page(package)
        module = import_module(package)
        for name in module.__all__:
            if not name.startswith("__"):
                assert re.search(rf"^:::::\{{py:(class|function|data)\}} {name}\b", text, re.MULTILINE), (package, name)
    text = api.page("lightning_megatron")
    assert "tensor_model_parallel_size: int=1" in text
    # The choices of an alias stand where its name does in the source.
    assert ":type: Literal['sequence', 'microbatch', 'global']" in text
    assert "Elements of a gradient bucket, which is reduced in one message" in text


def test_the_picture_of_the_certificate_is_that_of_its_page() -> None:
    picture = part_of_site("certificate_picture")
    page = (ROOT / "docs" / "certificate.md").read_text()
    assert picture.TARGET.read_text() == picture.picture(page), "run python docs/site/certificate_picture.py"
    # A cell outside of the tolerance is seen.
    assert picture.colour("**3e-09**", 1e-10) == picture.OUTSIDE != picture.colour("3e-12", 1e-10)


def test_the_page_of_errors_has_texts_as_the_package_says_them() -> None:
    text = part_of_site("errors").page()
    # Raised, listed as a fault, returned in a list, said by a rule that is a table, said outside of the rooms.
    for said in (
        "overlap_param_gather (True) needs a distributed kind",
        "bucket_size (...) must be at least 1",
        "SampleText has no prompts; give some",
        "world size (...) must be a multiple of ... parallel size (...)",
        "could not be fetched from the Hugging Face hub",
        "is no number from 0",
    ):
        assert said in text, said
    # Neither a docstring nor the help of an option.
    for unsaid in ("the planner checks them too", "where the files shall be", "Everything here goes by"):
        assert unsaid not in text, unsaid
    assert text.count("\n- ") > 1800


@pytest.mark.parametrize(
    "command",
    [
        "schedule --pp 4 --microbatches 0 --max-columns 5",
        "schedule --pp 4 --microbatches 4 --schedule zb_x",
        "recipes copy nope .",
        "curves nowhere",
        "checkpoint inspect nowhere.ckpt",
        "convert nowhere out.ckpt",
        "doctor --limit-seconds 0 --ping -1",
    ],
)
def test_what_a_command_says_of_a_mistake_is_found_on_the_page_of_errors(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    said = " ".join(capsys.readouterr().err.replace("`", "'").split())
    texts = re.findall(r"^- ``(.*)`` \(", part_of_site("errors").page(), re.MULTILINE)
    patterns = {".*".join(re.escape(part) for part in text.split("...")) for text in texts}
    assert any(re.search(pattern, said) for pattern in patterns), said

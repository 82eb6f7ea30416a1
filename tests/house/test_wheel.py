"""What pip installs is enough: the wheel has the recipes, and runs them where there is no repository."""

import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from lightning_megatron.cli.shipped_recipes import shipped_recipes
from tests.lightning_modules.corpus import write_corpus
from tests.recipes.test_pretrain_gpt import surroundings

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    *("--data.path=corpus", "--data.validation_fraction=0.2", "--data.sequence_length=16"),
    *("--data.global_batch_size=4", "--model.config.max_sequence_length=16", "--model.config.vocab_size=300"),
)


def done(folder: Path, *command: str, environment: dict[str, str] | None = None) -> str:
    """What a command that must succeed printed."""
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    pytest.importorskip("hatchling", reason="the wheel is built by hatchling, of the extra dev")
    folder: Path = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    done(ROOT, *pip, "--wheel-dir", str(folder), str(ROOT))
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package of the wheel, and its command in `bin`."""
    folder: Path = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "--quiet")
    done(folder, *pip, "--target", str(folder), str(wheel))
    return folder


@pytest.mark.slow
def test_the_wheel_has_every_recipe_and_nothing_else_of_the_repository(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    recipes = {path for one in shipped_recipes() for path in (one.script, one.config)}
    assert names >= {f"lightning_megatron/recipes/{path.relative_to(ROOT / 'recipes')}" for path in recipes}
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"lightning_megatron"}
    # It works on a clone.
    assert "lightning_megatron/recipes/demo.sh" not in names


RELATIVE_LINK = re.compile(r"\]\((?!#|https://)[^)]*\)")


@pytest.mark.slow
def test_the_readme_of_the_wheel_has_no_link_that_needs_the_repository(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        shown = archive.read(name).decode()
    assert "# lightning_megatron" in shown and "Tutorials: `docs/tutorials/index.md`" in shown
    assert not RELATIVE_LINK.findall(shown)
    assert RELATIVE_LINK.findall((ROOT / "README.md").read_text())


def test_the_links_of_the_readme_lead_to_the_repository_where_it_has_an_address() -> None:
    pytest.importorskip("hatchling", reason="the hook is one of hatchling, of the extra dev")
    hook = importlib.import_module("hatch_build")
    text = "![a picture](docs/a.svg) and [a page](docs/b.md#part), [the web](https://x.y), [below](#part), [c.md](c.md)"
    assert hook.readme_of_index(text, "https://x.y/z/", "v1") == (
        "![a picture](https://x.y/z/raw/v1/docs/a.svg) and [a page](https://x.y/z/blob/v1/docs/b.md#part), "
        "[the web](https://x.y), [below](#part), [c.md](https://x.y/z/blob/v1/c.md)"
    )
    assert hook.readme_of_index(text, "", "v1") == (
        "a picture: `docs/a.svg` and a page: `docs/b.md`, [the web](https://x.y), [below](#part), c.md"
    )


@pytest.mark.slow
def test_the_sources_have_what_every_target_of_the_makefile_reads(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="the sources are packed by hatchling, of the extra dev")
    done(ROOT, sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path))
    [path] = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("lightning_megatron", "recipes", "tests", "docs", "benchmarks")
    kept = [
        file
        for folder in folders
        for kind in ("py", "md", "yaml", "svg", "json")
        for file in (ROOT / folder).rglob(f"*.{kind}")
    ]
    files = ("Makefile", "constraints.txt", "hatch_build.py", "CITATION.cff", "LICENSE")
    kept += [*ROOT.glob("*.md"), *(ROOT / name for name in files)]
    lost = {file.relative_to(ROOT).as_posix() for file in kept} - names
    assert len(kept) > 1000 and not lost, lost
    assert not any(name.startswith((".ci", "build/", "dist/")) for name in names)


@pytest.mark.slow
def test_an_installed_command_lists_copies_and_trains_the_recipes(installed: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path)
    environment = surroundings() | {"PYTHONPATH": os.pathsep.join((str(installed), os.environ.get("PYTHONPATH", "")))}
    command = str(installed / "bin" / "lightning-megatron")
    listed = json.loads(done(tmp_path, command, "recipes", "--json", environment=environment))
    assert [one["name"] for one in listed] == [one.name for one in shipped_recipes()]
    assert all(Path(one[file]).is_relative_to(installed) for one in listed for file in ("script", "config"))
    done(tmp_path, command, "recipes", "copy", "toy", ".", environment=environment)
    for name in ("pretrain_gpt.py", "configs/toy.yaml"):
        assert (tmp_path / Path(name).name).read_bytes() == (ROOT / "recipes" / name).read_bytes()
    # Two processes, the second started by Lightning.
    done(tmp_path, command, "train", "toy", "--trainer.max_steps", "2", *SMALL, environment=environment)
    steps = (tmp_path / "runs/toy/version_0/metrics.csv").read_text().splitlines()
    assert len(steps) == 3, steps
    saved = (tmp_path / "runs/toy/version_0/config.yaml").read_text()
    assert "max_steps: 2" in saved

"""`lightning-megatron recipes`: the list, and copies that a user changes."""

import json
from pathlib import Path

import pytest

from lightning_megatron.cli.main import main
from lightning_megatron.cli.shipped_recipes import shipped_recipe, shipped_recipes


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a command."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_list_has_a_line_for_each_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "script", "configuration", "what", "it", "trains"]
    [toy] = [line for line in lines if line.startswith("toy ")]
    assert toy.split(maxsplit=3)[:3] == ["toy", "pretrain_gpt.py", "toy.yaml"]
    assert toy.endswith(shipped_recipe("toy").trains)
    assert len(lines) == len(shipped_recipes())
    assert main(["recipes", "list"]) == 0
    assert capsys.readouterr().out.splitlines() == [head, *lines]


def test_a_program_reads_the_paths(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [record["name"] for record in records] == [recipe.name for recipe in shipped_recipes()]
    assert all(Path(record[name]).is_file() for record in records for name in ("script", "config"))
    for line in (["recipes", "list", "--json"], ["recipes", "--json", "list"]):
        assert main(line) == 0 and json.loads(capsys.readouterr().out) == records


def test_a_copy_is_script_and_configuration_as_they_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "copy", "toy", "."]) == 0
    assert {path.name for path in folder.iterdir()} == {"pretrain_gpt.py", "toy.yaml"}
    recipe = shipped_recipe("toy")
    assert Path("toy.yaml").read_bytes() == recipe.config.read_bytes()
    assert Path("pretrain_gpt.py").read_bytes() == recipe.script.read_bytes()
    assert capsys.readouterr().out.splitlines()[-1] == "run them by: python pretrain_gpt.py fit --config toy.yaml"


def test_recipes_share_a_script_that_is_unchanged(folder: Path) -> None:
    assert main(["recipes", "copy", "toy", "new/runs"]) == 0
    assert main(["recipes", "copy", "gpt2_124m", "new/runs"]) == 0
    assert {path.name for path in (folder / "new/runs").iterdir()} == {"pretrain_gpt.py", "toy.yaml", "gpt2_124m.yaml"}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (("pretrain_gpt.py",), "pretrain_gpt.py exists already"),
        (("toy.yaml",), "toy.yaml exists already"),
        (("pretrain_gpt.py", "toy.yaml"), "pretrain_gpt.py and toy.yaml exist already"),
    ],
)
def test_no_file_is_overwritten(
    changed: tuple[str, ...], told: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in changed:
        (folder / name).write_text("mine")
    assert main(["recipes", "copy", "toy", "."]) == 2
    assert capsys.readouterr().err == f"error: {told} and would be overwritten; name another folder\n"
    # Nothing is copied in part.
    assert {path.name: path.read_text() for path in folder.iterdir()} == dict.fromkeys(changed, "mine")


def test_a_second_copy_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert [main(["recipes", "copy", "toy", "."]) for _ in range(2)] == [0, 2]
    assert capsys.readouterr().err == "error: toy.yaml exists already and would be overwritten; name another folder\n"


def test_a_link_that_leads_nowhere_is_not_followed(folder: Path) -> None:
    (folder / "toy.yaml").symlink_to("elsewhere.yaml")
    assert main(["recipes", "copy", "toy", "."]) == 2
    assert not (folder / "elsewhere.yaml").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("copy", "tyo", "."), ("there is no recipe 'tyo'; did you mean toy?",)),
        (("copy", "toy", "file"), ("FOLDER (file) cannot be written: Not a directory",)),
        (("copy", "toy"), ("required: FOLDER", "lightning-megatron recipes copy --help")),
        (("cpy", "toy", "."), ("'cpy'", "did you mean copy?", "lightning-megatron recipes --help")),
        (("--jsn",), ("--jsn", "did you mean --json?")),
    ],
)
def test_a_mistake_is_one_line(
    args: tuple[str, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    assert main(["recipes", *args]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1
    assert all(word in told for word in words), told

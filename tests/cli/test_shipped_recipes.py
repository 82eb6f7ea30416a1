"""The recipes of the package: every configuration has a script that is there, and every script a configuration."""

from pathlib import Path

import pytest

from lightning_megatron.cli import certification, certify
from lightning_megatron.cli.certify_recipe import FromRecipe
from lightning_megatron.cli.main import command_line, main
from lightning_megatron.cli.plan_file import planned_file
from lightning_megatron.cli.shipped_recipes import recipe_file, shipped_recipe, shipped_recipes
from lightning_megatron.cli.usage import UsageError

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def test_every_configuration_is_a_recipe_of_a_script_that_runs_one() -> None:
    found = shipped_recipes()
    assert {recipe.config for recipe in found} == set((RECIPES / "configs").glob("*.yaml"))
    scripts = {path for path in RECIPES.glob("*.py") if "run_recipe(" in path.read_text()}
    assert {recipe.script for recipe in found} == scripts
    assert {recipe.name for recipe in found} >= {"toy", "gpt2_124m", "megatron_bert_3.9b"}


def test_every_script_shows_how_it_is_run_by_a_configuration_of_its_own() -> None:
    for recipe in shipped_recipes():
        shown = recipe.script.read_text().partition("--config recipes/configs/")[2].partition(".yaml")[0]
        assert shipped_recipe(shown).script == recipe.script


def test_every_recipe_says_what_it_trains() -> None:
    said = [recipe.trains for recipe in shipped_recipes()]
    assert len(set(said)) == len(said) and all(10 < len(words) < 120 and words[0].isupper() for words in said)
    assert shipped_recipe("toy").trains == "A GPT of 3.6 million parameters that two cores train in minutes"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt2_124", ("there is no recipe 'gpt2_124'; did you mean gpt2_124m", "there are distill_llama3_1b, ")),
        ("recipes/configs/toy.yaml", ("did you mean toy", "t5_v1_1_xl")),
        ("", ("there is no recipe ''; there are ",)),
        ("toy.yaml", ("'toy.yaml' is a file", "python SCRIPT fit --config toy.yaml runs it")),
        ("copied.yaml", ("'copied.yaml' is a file", "python pretrain_t5.py fit --config copied.yaml runs it")),
    ],
)
def test_an_unknown_name_is_told_with_the_known_ones(
    name: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("toy.yaml").touch()
    Path("copied.yaml").write_text("# Script: pretrain_t5.py\n")
    with pytest.raises(UsageError) as raised:
        shipped_recipe(name)
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize("command", [("plan", "--gpu", "h100"), ("dry-run",)])
def test_commands_that_plan_take_names_and_refuse_recipes_of_two_models(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = command
    assert main([name, "dpo_toy", *options]) == 2
    assert "dpo_toy is a recipe of dpo_hf.py, which trains a model beside a frozen one" in capsys.readouterr().err


def test_a_name_is_the_file_of_its_recipe_unless_it_is_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    toy = str(shipped_recipe("toy").config)
    assert (planned_file("toy"), recipe_file("toy"), recipe_file("toys")) == (toy, toy, "toys")
    # There is a preset of this name, too.
    assert planned_file("gpt3_175b") == "gpt3_175b" != recipe_file("gpt3_175b")
    Path("toy").mkdir()
    assert recipe_file("toy") == "toy"


def test_a_certificate_takes_the_name_of_a_recipe() -> None:
    parser = command_line(["certify"])
    options = parser.parse_args(["certify", "toy", "--tiny"])
    certify._require_sense(options)
    subject = certification.subject_of(options)
    assert isinstance(subject, FromRecipe) and subject.path == shipped_recipe("toy").config

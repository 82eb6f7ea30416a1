"""`lightning-megatron certify`: exit codes, JSON, and the module of a recipe's file."""

import json
from pathlib import Path

import pytest

from lightning_megatron.cli.certify_recipe import FromRecipe
from lightning_megatron.cli.main import main
from lightning_megatron.cli.plan_file import is_causal_recipe
from lightning_megatron.lightning_modules import CausalModule, GPTDataModule, GPTModule, T5Module
from lightning_megatron.testing.subject import SubjectError
from tests.lightning_modules.pretrained import write_model

ROOT = Path(__file__).resolve().parents[2]
# The command line of the tests' own process.
pytestmark = pytest.mark.filterwarnings("ignore:LightningCLI's args parameter:UserWarning")
MODULES = ROOT / "tests/testing/modules.py"


def test_the_exit_code_says_whether_something_differs(capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--data", f"{MODULES}:rows", "--steps", "1", "--layouts", "m2"]
    assert main(["certify", f"{MODULES}:Right", *data, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["equal"] and record["layouts"][0]["largest"]["loss"] < 1e-12
    assert main(["certify", f"{MODULES}:Summed", *data]) == 1
    assert "a factor of 1/2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py:Module"], "nowhere.py is no file"),
        ([f"{MODULES}:Wrong"], "modules.py has no Wrong; it has "),
        ([f"{MODULES}:NeedsArguments"], "is called without arguments, and needs width; write a function"),
        ([f"{MODULES}:Right", "--layouts", ","], "layouts are empty and must name at least one"),
        ([f"{MODULES}:WIDTH"], "must be a class or a function without arguments, and is a int"),
        (["Module"], "'Module' must be a file and a name in it"),
        (["no_such_package:Module"], "no_such_package cannot be imported"),
        ([f"{MODULES}:Right", "--layouts", "tp3x,dp32"], "layout 'tp3x' must be made of"),
        ([f"{MODULES}:Right", "--steps", "0"], "steps (0) must be at least 1"),
        (["nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["nowhere.yaml", "--data", "x.py:y"], "--data (x.py:y) is for a module of your own"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", *arguments]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ") and message in said


def test_a_file_that_cannot_be_compiled_is_shown_by_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.py").write_text("\ndef f(: pass\n")
    assert main(["certify", f"{tmp_path}/wrong.py:f", "--layouts", "m2"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "cannot be made: SyntaxError: invalid syntax (wrong.py, line 2): def f(: pass" in said


def test_a_recipes_file_names_module_data_and_clipping() -> None:
    subject = FromRecipe(path=ROOT / "recipes/configs/gpt3_175b.yaml", trainer={"accumulate_grad_batches": 2})()
    assert isinstance(subject.module, GPTModule) and isinstance(subject.data, GPTDataModule)
    assert subject.trainer == {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2}
    assert "callbacks" in subject.notes[0]
    assert isinstance(FromRecipe(path=ROOT / "recipes/configs/t5_11b.yaml", trainer={})().module, T5Module)


def test_a_recipe_of_any_causal_model_makes_its_module_and_data(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny")
    path = ROOT / "recipes/configs/hf_toy.yaml"
    (tmp_path / "own.yaml").write_text(path.read_text().replace("path: tiny", f"path: {tmp_path}/tiny"))
    subject = FromRecipe(path=tmp_path / "own.yaml", trainer={})()
    assert isinstance(subject.module, CausalModule) and isinstance(subject.data, GPTDataModule)
    assert subject.module.from_scratch and subject.data.config.vocab_size == 304
    # A certificate has fewer steps than the warm-up, so that the file must say where the curve ends.
    assert subject.module.optimizer.total_steps > subject.module.optimizer.warmup_steps


@pytest.mark.parametrize(
    ("model", "is_causal"),
    [
        ({"class_path": "lightning_megatron.lightning_modules.CausalModule"}, True),
        ({"class_path": "lightning_megatron.lightning_modules.causal.CausalModule"}, True),
        ({"class_path": "CausalModule"}, True),
        ({"class_path": "mine.CausalModule"}, False),
        ({"class_path": "lightning_megatron.lightning_modules.MyCausalModule"}, False),
        ({"from_scratch": False}, True),
        ({"path": "tiny"}, False),
    ],
)
def test_a_class_of_another_package_is_not_taken_for_the_causal_module(
    model: dict[str, object], is_causal: bool, tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text(json.dumps({"model": model}))
    assert is_causal_recipe(tmp_path / "own.yaml") == is_causal


def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    sizes = "num_layers: 2, hidden_size: 8, num_attention_heads: 2, vocab_size: 9"
    wrong.write_text(f"trainer: {{max_stepz: 3}}\nmodel: {{config: {{{sizes}}}}}\n")
    with pytest.raises(SubjectError, match="max_stepz"):
        FromRecipe(path=wrong, trainer={})()

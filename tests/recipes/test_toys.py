"""Toy recipes on the files that `lightning-megatron recipes toys` writes: each trains as it stands."""

import csv
import json
from pathlib import Path

import pytest

from lightning_megatron.cli.main import main
from lightning_megatron.cli.shipped_recipes import shipped_recipe
from lightning_megatron.data import load_tokenizer
from lightning_megatron.hf.stop_tokens import stop_tokens
from tests.recipes.launched import launched

STEPS = ("--trainer.max_steps=12", "--trainer.val_check_interval=12")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    path: Path = tmp_path_factory.mktemp("toys")
    assert main(["recipes", "toys", str(path)]) == 0
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packed_toy", "distill_toy", "hf_continue_toy", "blend_toy"])
def test_a_toy_trains_on_the_files_made_for_it(name: str, folder: Path) -> None:
    recipe = shipped_recipe(name)
    ran = launched(folder, "fit", "--config", str(recipe.config), *STEPS, script=recipe.script.name)
    assert ran.returncode == 0, ran.stderr
    with (folder / "runs" / name / "version_0" / "metrics.csv").open(newline="") as file:
        losses = [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]
    assert len(losses) == 12 and losses[-1] < 0.95 * losses[0]


def test_the_files_are_what_recipes_read_and_are_not_overwritten(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    assert len(rows) == 100 and all(row["chosen"][1] != row["rejected"][1] for row in rows)
    # An answer ends with its turn, and so does a text: for the tokenizer, the model and transformers alike.
    tokenizer = load_tokenizer(folder / "tiny")
    assert stop_tokens(folder / "tiny") == (tokenizer.end_of_text,) == (tokenizer.token_id("<|end|>"),)
    assert main(["recipes", "toys", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "tiny" in error and "sums.txt would be overwritten" in error

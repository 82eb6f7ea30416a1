"""The recipe for preferences as a user runs it: two processes learn which answers are wanted, by either reference."""

import csv
import json
from pathlib import Path

import pytest

from tests.harness.ranks import ROOT
from tests.lightning_modules.preferences import write_pairs
from tests.lightning_modules.pretrained import write_model
from tests.recipes.launched import launched

TOY = ("--config", str(ROOT / "recipes" / "configs" / "dpo_toy.yaml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("dpo")
    write_model(path / "tiny")
    write_pairs(path / "pairs.jsonl", copies=16)
    return path


def logged(folder: Path, version: int, name: str) -> list[float]:
    path = folder / "runs" / "dpo_toy" / f"version_{version}" / "metrics.csv"
    with path.open(newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


@pytest.mark.slow
def test_a_model_learns_preferences_alike_beside_its_reference_and_by_a_pass_before(folder: Path) -> None:
    pytest.importorskip("transformers")
    scored = ("--model.reference=data", "--data.path=scored.jsonl")
    for options in (
        ("fit", *TOY, "--export.path=preferred"),
        ("predict", *TOY, "--model.reference=data", "--references.path=scored.jsonl"),
        ("fit", *TOY, *scored),
    ):
        ran = launched(folder, *options, script="dpo_hf.py")
        assert ran.returncode == 0, ran.stderr
    # Prediction is a version of its own.
    losses, others = logged(folder, 0, "train_loss"), logged(folder, 2, "train_loss")
    # Every step begins from the reference: log 2.
    assert losses[0] == pytest.approx(0.6931, abs=1e-3) and losses[-1] < 0.1
    assert others == pytest.approx(losses, abs=1e-3)
    assert logged(folder, 0, "val_accuracy")[-1] == 1.0
    assert len((folder / "scored.jsonl").read_text().splitlines()) == 48
    assert json.loads((folder / "preferred" / "config.json").read_text())["model_type"] == "llama"


def test_a_mistake_ends_in_words(folder: Path) -> None:
    ran = launched(folder, "fit", *TOY, "--model.beta=0", "--model.reference=none", script="dpo_hf.py")
    assert ran.returncode == 2 and "Traceback" not in ran.stderr
    assert "reference" in ran.stderr

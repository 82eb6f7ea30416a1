"""The recipe for models of transformers as they are: four ranks learn what one device does; transformers loads it."""

import csv
from pathlib import Path

import pytest

from tests.harness.ranks import ROOT
from tests.lightning_modules.pretrained import write_model
from tests.recipes.launched import launched

TOY = (
    "--config",
    str(ROOT / "recipes" / "configs" / "hf_toy.yaml"),
    "--data.path=text.txt",
    "--model.optimizer.lr=1e-2",
)
ONE_DEVICE = ("--trainer.devices=1", "--trainer.strategy=auto")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("hf")
    write_model(path / "tiny", num_hidden_layers=4)
    (path / "text.txt").write_text("The cat sat on the mat, and looked at the moon. " * 400)
    return path


def logged(folder: Path, version: int, name: str) -> list[float]:
    path = folder / "runs" / "hf_toy" / f"version_{version}" / "metrics.csv"
    with path.open(newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


@pytest.mark.slow
def test_four_ranks_learn_what_one_device_learns_and_transformers_loads_it(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for num_ranks, options in ((1, ONE_DEVICE), (4, ("--export.path=trained",))):
        ran = launched(folder, "fit", *TOY, *options, script="pretrain_hf.py", num_ranks=num_ranks)
        assert ran.returncode == 0, ran.stderr
    for name, num_values in (("train_loss", 40), ("val_loss", 2)):
        wanted, found = logged(folder, 0, name), logged(folder, 1, name)
        assert len(found) == len(wanted) == num_values
        # In float32.
        assert found == pytest.approx(wanted, rel=1e-4)
    assert found[-1] < 0.7
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder / "trained"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder / "trained"))
    asked = tokenizer("The cat sat on the", return_tensors="pt")
    answer = tokenizer.decode(model.generate(**asked, max_new_tokens=4, do_sample=False)[0])
    assert "mat" in answer


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (
            ("--model.path=no/such/folder",),
            "'no/such/folder' is no folder here; give that of a Hugging Face model, or a model's name on the hub",
        ),
        (("--trainer.strategy.init_args.context_parallel_size=3",), "world size"),
    ],
)
def test_a_mistake_ends_in_words(folder: Path, options: tuple[str, ...], shown: str) -> None:
    ran = launched(folder, "fit", *TOY, *options, script="pretrain_hf.py", num_ranks=4)
    assert ran.returncode == 2 and shown in ran.stderr and "Traceback" not in ran.stderr

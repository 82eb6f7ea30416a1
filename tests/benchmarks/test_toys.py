"""The figures next to the toys' losses are those of their own validation targets."""

import json
import math
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from benchmarks import toys
from benchmarks.toys import (
    RECIPES,
    TOYS,
    Learnt,
    data_of,
    entropy_of,
    last_validation,
    learnt,
    newest_run,
    table_of,
    target_counts,
)

CSV = "step,train_loss,val_accuracy,val_loss,val_perplexity\n9,3.0,,,\n9,,0.25,2.5,7.0\n19,,0.5,2.0,5.0\n20,1.9,,,\n"


def test_the_entropy_is_that_of_the_frequencies() -> None:
    assert entropy_of(np.array([3.0, 0, 1.0])) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert entropy_of(np.full(8, 5.0)) == pytest.approx(math.log(8))


def written_run(folder: Path, version: int, text: str = CSV) -> None:
    (folder / f"version_{version}").mkdir(parents=True)
    (folder / f"version_{version}" / "metrics.csv").write_text(text)


def test_the_last_validation_of_the_newest_run_counts(tmp_path: Path) -> None:
    for version in (9, 10):
        written_run(tmp_path / "a", version, CSV.replace("5.0", f"{version}.5"))
    assert last_validation(newest_run(tmp_path / "a")) == {"steps": 20, "loss": math.log(10.5), "accuracy": 0.5}
    written_run(tmp_path / "b", 0, "step,train_loss\n0,3.0\n")
    with pytest.raises(ValueError, match="version_0 was never validated; train one by --max-steps"):
        last_validation(newest_run(tmp_path / "b"))
    with pytest.raises(ValueError, match="nowhere has no run; train one by --max-steps"):
        newest_run(tmp_path / "nowhere")


def test_a_run_is_measured_on_its_own_data(texts: Path, tmp_path: Path) -> None:
    config = configured("toy", texts)
    config["trainer"]["limit_val_batches"] = 2
    written_run(tmp_path / "toy", 0)
    (tmp_path / "toy" / "version_0" / "config.yaml").write_text(yaml.safe_dump(config))
    counts = target_counts(data_of(TOYS["toy"], config, tmp_path), 2)
    found = learnt("toy", tmp_path)
    assert (found.num_targets, found.entropy) == (counts.sum(), pytest.approx(entropy_of(counts)))
    assert found.loss == math.log(5) and found.entropy_of_all != found.entropy


def configured(name: str, texts: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((RECIPES / "configs" / f"{name}.yaml").read_text())
    if name != "llava_toy":
        config["data"] |= {"path": str(texts), "validation_fraction": 0.5, "global_batch_size": 2}
    return config


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(8):
        lines = [f"Line {i} of {number} says {i * number}. Then it ends.\n" for i in range(60)]
        (folder / f"{number}.txt").write_text("".join(lines))
    return folder


@pytest.mark.parametrize("name", [name for name in TOYS if name != "llava_toy"])
def test_targets_are_counted_as_validation_meets_them(name: str, texts: Path, tmp_path: Path) -> None:
    data = data_of(TOYS[name], configured(name, texts), tmp_path)
    wanted: Counter[int] = Counter()
    for number, batch in enumerate(data.val_dataloader()[0]):
        if number < 2:
            pairs = zip(batch["labels"].flatten().tolist(), batch["loss_mask"].flatten().tolist(), strict=True)
            wanted.update(label for label, weight in pairs if label != -100 and weight)
    counts = target_counts(data, 2)
    assert {i: int(count) for i, count in enumerate(counts) if count} == dict(wanted)
    assert target_counts(data, None).sum() > counts.sum() > 0


def test_what_has_no_label_or_no_weight_is_no_target() -> None:
    batch = {"labels": torch.tensor([[2, 2, -100], [1, 3, 0]]), "loss_mask": torch.tensor([[1.0, 1, 1], [1, 0, 0]])}
    data: Any = SimpleNamespace(config=SimpleNamespace(vocab_size=5), val_dataloader=lambda: [[batch]])
    assert target_counts(data, None).tolist() == [0, 1, 2, 0, 0]


def test_a_limit_is_a_number_of_batches_or_a_share_of_them() -> None:
    batches = [{"labels": torch.tensor([i]), "loss_mask": torch.ones(1)} for i in range(5)]
    data: Any = SimpleNamespace(config=SimpleNamespace(vocab_size=5), val_dataloader=lambda: [batches])
    counted = {limit: target_counts(data, limit).sum() for limit in (1, 2, 0.5, 0.99)}
    assert counted == {1: 1, 2: 2, 0.5: 2, 0.99: 4}
    # A dictionary takes 1 and 1.0 for one.
    assert target_counts(data, 1.0).sum() == 5


def test_what_a_run_has_not_logged_and_a_recipe_that_fails_end_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written_run(tmp_path / "toy", 0)
    (tmp_path / "pretrain_gpt.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(toys, "RECIPES", tmp_path)
    for options, fault in (
        ([], "version_0 has no config.yaml, which says what it was validated on; train one by --max-steps"),
        (["--max-steps", "1"], "toy: pretrain_gpt.py ended with exit code 3; above stands why"),
    ):
        monkeypatch.setattr(sys, "argv", ["toys.py", "toy", "--runs", str(tmp_path), *options])
        with pytest.raises(SystemExit) as ended:
            toys.main()
        assert ended.value.code == 2 and fault in capsys.readouterr().err


@pytest.mark.parametrize("name", TOYS)
def test_links_are_those_of_the_recipe(name: str) -> None:
    found = dict(re.findall(r'"model\.config\.([\w.]+)": "data\.(\w+)"', (RECIPES / TOYS[name].recipe).read_text()))
    assert found == {source: target for target, source in TOYS[name].links.items()}


def test_a_loss_that_is_not_below_is_reported_and_figures_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Learnt(steps=5, num_targets=1000, entropy=2.0, entropy_of_all=2.25, loss=1.5, accuracy=0.25)
    found = {
        "toy": good,
        "t5_toy": Learnt(steps=5, num_targets=10, entropy=2.0, entropy_of_all=2.75, loss=2.5, accuracy=0.0),
    }
    assert table_of(found).splitlines()[2:] == [
        "| toy | 5 | 1,000 | 2.000 | 2.250 | 1.500 | 25.0% |",
        "| t5_toy | 5 | 10 | 2.000 | 2.750 | 2.500, not below | 0.0% |",
    ]
    monkeypatch.setattr(toys, "learnt", lambda name, runs: found[name])
    monkeypatch.setattr(sys, "argv", ["toys.py", "toy", "--json", str(tmp_path / "a.json")])
    toys.main()
    assert "| toy | 5 |" in capsys.readouterr().out
    assert json.loads((tmp_path / "a.json").read_text())["toy"]["loss"] == 1.5
    monkeypatch.setattr(sys, "argv", ["toys.py", "gpt"])
    with pytest.raises(SystemExit):
        toys.main()
    assert "gpt: no such toy; there are toy, bert_toy" in capsys.readouterr().err

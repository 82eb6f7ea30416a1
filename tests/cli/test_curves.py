"""`lightning-megatron curves`: curves are read from each logger's files, compared, and drawn."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lightning_megatron.cli.main import main

FIRST = {step: 8 - step / 10 for step in range(12)}


def write_csv(folder: Path, losses: dict[int, float]) -> str:
    folder.mkdir()
    rows = "".join(f"0,{step},{loss},\n" for step, loss in losses.items())
    # Validation has a row without a training loss.
    (folder / "metrics.csv").write_text(f"epoch,step,train_loss,val_loss\n{rows}0,{max(losses)},,9.0\n")
    return str(folder)


def write_events(folder: Path, losses: dict[int, float]) -> str:
    pytest.importorskip("tensorboard")
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    # A resumed run has a second file in the same folder.
    for part in (list(losses)[:3], list(losses)[3:]):
        logger = loggers.TensorBoardLogger(folder.parent, name="", version=folder.name)
        for step in part:
            logger.log_metrics({"train_loss": losses[step]}, step)
        logger.finalize("success")
    return str(folder)


def curves(*options: str) -> int:
    return main(["curves", *options])


def record(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert curves(*options, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_resumed_run_is_shown_beside_the_first_around_the_steps_of_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write_csv(tmp_path / "a", FIRST)
    resumed = write_csv(tmp_path / "b", {step: 8 - step / 10 + 1e-6 for step in range(10, 30)})
    assert curves(first, resumed, "--within", "1e-5", "--falls") == 0
    printed = capsys.readouterr().out
    assert "run 2: on the 2 steps in common with run 1 it differs by 1.0e-06 at most." in printed
    assert "run 2: train_loss went from 7 at step 11 to 5.55 over steps 21 to 30." in printed
    rows = [line.split() for line in printed.splitlines() if line.startswith("  ")]
    assert [row[0] for row in rows] == ["step", *map(str, range(8, 16))]
    assert rows[4] == ["11", "7.000000", "7.000001", "1.0e-06"]


@pytest.mark.parametrize(
    ("resumed", "shown"),
    [
        ({10: 7.2, 11: 6.9}, "left the first run by 2.0e-01, more than 0.01"),
        ({10: 7.0, 11: float("nan")}, "left the first run by nan"),
        ({10: 7.0, 11: 6.9, 12: 80.0}, "did not fall"),
        ({20: 2.0, 21: 1.0}, "no step in common"),
    ],
)
def test_curves_that_part_fail(
    tmp_path: Path, resumed: dict[int, float], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = write_csv(tmp_path / "a", FIRST), write_csv(tmp_path / "b", resumed)
    assert curves(*runs, "--within", "1e-2", "--falls") == 1
    assert shown in "".join(capsys.readouterr().out.splitlines()[-2:])
    assert curves(*runs) == 0


def test_events_of_tensorboard_are_the_curve_of_a_csv_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs").mkdir()
    write_csv(tmp_path / "runs" / "a", FIRST)
    write_events(tmp_path / "runs" / "b", FIRST)
    # The folder stands for both.
    one, other = record(capsys, str(tmp_path / "runs"))["runs"]
    assert (Path(one["run"]).name, Path(other["run"]).name) == ("a", "b")
    # Events are in 32 bits.
    assert other["values"] == pytest.approx(one["values"], rel=1e-6) and len(one["values"]) == 12
    assert other["difference"] < 1e-6


def test_the_picture_has_a_line_for_each_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [write_csv(tmp_path / name, FIRST) for name in ("a", "b")]
    for ending in ("svg", "png"):
        assert curves(*runs, "--out", str(tmp_path / f"loss.{ending}")) == 0
    texts = [node.text for node in ElementTree.parse(tmp_path / "loss.svg").iter() if node.tag.endswith("text")]
    assert {"a", "b", "train_loss", "optimizer steps"} <= set(texts)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_every_run_without_the_value_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    run = write_csv(tmp_path / "a", FIRST)
    assert curves(run, str(tmp_path / "empty"), "--value", "loss") == 2
    error = capsys.readouterr().err
    assert "a has no 'loss'; it has train_loss, val_loss" in error and "empty has no metrics.csv" in error
    (tmp_path / "words.txt").write_text("")
    assert curves(str(tmp_path / "gone"), str(tmp_path / "words.txt")) == 2
    error = capsys.readouterr().err
    assert "gone does not exist; name a run's folder" in error and "words.txt has no values" in error
    assert curves(str(tmp_path / "other.csv")) == 2
    assert "is no log of Lightning's CSVLogger" in capsys.readouterr().err

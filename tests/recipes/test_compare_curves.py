"""The comparison of two curves passes where they agree and fails where they part."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script() -> Any:
    spec = importlib.util.spec_from_file_location("compare_curves", ROOT / "recipes" / "compare_curves.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(path: Path, losses: dict[int, float]) -> str:
    rows = "".join(f"0,{step},{loss},\n" for step, loss in losses.items())
    # Validation has a row without a training loss.
    path.write_text(f"epoch,step,train_loss,val_loss\n{rows}0,{max(losses)},,9.0\n")
    return str(path)


def test_curves_that_agree_are_shown_around_the_seam(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write(tmp_path / "a.csv", {step: 8 - step / 10 for step in range(12)})
    resumed = write(tmp_path / "b.csv", {step: 8 - step / 10 + 1e-6 for step in range(10, 30)})
    assert script().main(first, resumed) == ""
    printed = capsys.readouterr().out
    assert "the checkpoint of step 10" in printed
    assert "1.0e-06 at most" in printed
    assert "fell from 8.00 at step 1 to 5.55 over steps 21 to 30" in printed


@pytest.mark.parametrize(
    ("resumed", "shown"),
    [
        ({10: 7.2, 11: 6.9}, "left the first"),
        ({10: 7.0, 11: 6.9, 12: 80.0}, "did not fall"),
        ({20: 1.0}, "no step in common"),
    ],
)
def test_curves_that_part_fail(tmp_path: Path, resumed: dict[int, float], shown: str) -> None:
    first = write(tmp_path / "a.csv", {step: 8 - step / 10 for step in range(12)})
    assert shown in script().main(first, write(tmp_path / "b.csv", resumed))

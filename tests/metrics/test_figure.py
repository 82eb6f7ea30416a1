"""Files of figures: their format follows their name, they are equal to the byte, and a missing package shows first."""

import sys
from pathlib import Path

import pytest

from lightning_megatron.metrics.figure import matplotlib_faults, new_figure, picture_faults, write_figure

HEADS = {".svg": b"<?xml", ".png": b"\x89PNG", ".PDF": b"%PDF"}


@pytest.mark.parametrize("ending", HEADS)
def test_the_ending_picks_the_format_and_equal_figures_make_equal_files(ending: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = [tmp_path / f"{number}{ending}" for number in range(3)]
    for path in paths:
        figure = new_figure(200, 100)
        figure.add_subplot().broken_barh([(0, 1)], (0, 1), label="a bar")
        figure.text(0.5, 0.5, "another" if path == paths[-1] else "one")
        write_figure(figure, path)
    one, two, other = (path.read_bytes() for path in paths)
    assert one.startswith(HEADS[ending])
    assert one == two != other


def test_faults_of_a_file_are_listed_and_a_good_one_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    assert matplotlib_faults() == [] and picture_faults(tmp_path / "a.pdf", "--out") == []
    # What the import system takes for "there is none".
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    ending, folder, extra = picture_faults(tmp_path / "none" / "a.gif", "--out")
    assert "a.gif) must end in one of .svg, .png, .pdf" in ending and "a.gif.svg" in ending
    assert "which is no directory" in folder
    assert "lightning_megatron[plot]" in extra and matplotlib_faults()[0] in extra

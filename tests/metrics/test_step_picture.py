"""The picture of a step is to scale on one axis for all blocks, and whole."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from lightning_megatron.metrics import step_picture
from lightning_megatron.metrics.step_picture import Block, Row, svg_of_step
from lightning_megatron.metrics.step_timeline import DATA, OPTIMIZER, Lap
from lightning_megatron.pipeline.schedule import Action, Kind

SVG = "{http://www.w3.org/2000/svg}"
LAPS = (
    Lap(DATA, 0, 3.0, 3.2),
    Lap(Action(Kind.RECV_FORWARD, 0, 0), 0, 3.2, 3.6),
    Lap(Action(Kind.FORWARD, 0, 0), 0, 3.6, 4.6),
    Lap(Action(Kind.FORWARD, 2, 1), 0, 4.6, 5.6),
    Lap(Action(Kind.BACKWARD, 2, 1), 0, 5.6, 7.6),
    Lap(OPTIMIZER, 0, 7.6, 8.0),
)
BLOCKS = [
    Block(heading="measured", rows=(Row(label="rank 0 < 1", laps=LAPS, stages=(0, 2)), Row(label="rank 1", laps=()))),
    Block(heading="predicted", rows=(Row(label="first", laps=LAPS[2:5], stages=(0, 2)),)),
]


def bars(text: str) -> list[list[tuple[float, float, str]]]:
    """x, width and colour of every bar, by row."""
    found = []
    for group in ElementTree.fromstring(text).iter(f"{SVG}g"):
        rects = [rect for rect in group.findall(f"{SVG}rect") if rect.get("class") != "idle"]
        found.append(sorted((float(r.attrib["x"]), float(r.attrib["width"]), r.attrib["fill"]) for r in rects))
    return found


def test_bars_of_all_blocks_are_to_one_scale_and_a_later_chunk_has_another_colour() -> None:
    measured, nothing, predicted = bars(svg_of_step(BLOCKS, title="a step"))
    assert len(measured) == len(LAPS) and nothing == [] and predicted == measured[2:5]
    left, scale = measured[0][0], measured[2][1]
    for (x, width, _), lap in zip(measured, LAPS, strict=True):
        assert x - left == pytest.approx((lap.start - 3.0) * scale, abs=0.01)
        assert width == pytest.approx((lap.end - lap.start) * scale, abs=0.01)
    assert all(one[0] + one[1] == pytest.approx(two[0], abs=0.01) for one, two in pairwise(measured))
    # Both chunks' forwards, and everything else, are told apart.
    assert len({colour for _, _, colour in measured}) == len(LAPS)


def test_labels_headings_and_the_legend_are_there_and_within_the_picture() -> None:
    root = ElementTree.fromstring(svg_of_step(BLOCKS, title="a & b"))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    for wanted in (
        "a & b",
        "measured",
        "predicted",
        "rank 0 < 1",
        "first",
        "data",
        "optimizer",
        "backward",
        "0",
        "5000",
    ):
        assert wanted in texts
    assert texts.count("waiting for a message") == 1
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("x", 0)) + float(rect.attrib["width"]) <= width
        assert float(rect.get("y", 0)) + float(rect.attrib["height"]) <= height
    hints = [title.text for title in root.iter(f"{SVG}title")]
    assert "forward, stage 2, microbatch 1: 1600 to 2600 ms" in hints


def test_a_large_step_is_drawn_as_paths_of_the_same_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    small = bars(svg_of_step(BLOCKS, title="a step"))[0]
    monkeypatch.setattr(step_picture, "_MOST_BARS", 3)
    text = svg_of_step(BLOCKS, title="a step")
    group = next(ElementTree.fromstring(text).iter(f"{SVG}g"))
    strokes = [
        (float(x), float(length), path.attrib["stroke"])
        for path in group.findall(f"{SVG}path")
        for x, length in re.findall(r"M([\d.]+) [\d.]+h([\d.]+)", path.attrib["d"])
    ]
    assert [colour for *_, colour in sorted(strokes)] == [colour for *_, colour in small]
    for (x, length, _), (wanted_x, wanted_length, _) in zip(sorted(strokes), small, strict=True):
        assert (x, length) == pytest.approx((wanted_x, wanted_length), abs=0.1)

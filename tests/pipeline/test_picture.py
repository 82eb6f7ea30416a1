"""The picture of a timeline is to scale, whole, and one that a reader can take in."""

import re
import struct
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lightning_megatron.pipeline import picture
from lightning_megatron.pipeline.bubble import timeline_of
from lightning_megatron.pipeline.picture import svg_of, write_png, write_svg
from lightning_megatron.pipeline.registry import ScheduleName
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.simulate import Costs, Timeline

SVG = "{http://www.w3.org/2000/svg}"
CASES: list[tuple[ScheduleName, int, Costs]] = [
    ("gpipe", 1, Costs()),
    ("1f1b", 1, Costs(message=0.3)),
    ("interleaved", 3, Costs(backward=2.5)),
    ("zb_h1", 1, Costs(backward_weight=0.7)),
    ("zb_v", 2, Costs()),
]
Bars = list[tuple[float, float, str]]


def played(name: ScheduleName, chunks: int, costs: Costs, pp: int = 3, microbatches: int = 7) -> Timeline:
    return timeline_of(Schedule(name=name, pp=pp, chunks=chunks, microbatches=microbatches), costs)


def rank_groups(root: ElementTree.Element) -> list[ElementTree.Element]:
    return [group for group in root.iter(f"{SVG}g") if group.get("class") == "rank"]


def rectangles(group: ElementTree.Element) -> Bars:
    """x, width and colour of each compute of a rank, left to right."""
    return sorted(
        (float(rect.attrib["x"]), float(rect.attrib["width"]), colours.attrib["fill"])
        for colours in group.iter(f"{SVG}g")
        for rect in colours.findall(f"{SVG}rect")
        if rect.get("class") == "compute"
    )


def strokes(group: ElementTree.Element) -> Bars:
    """The same where each colour is a path of strokes in thousandths of a pixel."""
    found = []
    for path in group.findall(f"{SVG}path"):
        at = 0
        assert path.attrib["d"].startswith("M0 0m") and "scale(.001 1)" in path.attrib["transform"]
        for gap, length in re.findall(r"m(-?\d+) 0h(\d+)", path.attrib["d"]):
            found.append(((at + int(gap)) / 1_000, int(length) / 1_000, path.attrib["stroke"]))
            at += int(gap) + int(length)
    return sorted(found)


def idle(group: ElementTree.Element) -> tuple[float, float]:
    [rect] = [rect for rect in group.findall(f"{SVG}rect") if rect.get("class") == "idle"]
    return float(rect.attrib["x"]), float(rect.attrib["width"])


def numbers_in(text: str) -> list[int]:
    """The microbatches that bars show, sorted."""
    groups = ElementTree.fromstring(text).iter(f"{SVG}g")
    return sorted(int(number.text or "") for group in groups for number in group if group.get("pointer-events"))


@pytest.mark.parametrize(("bars_of", "most_bars"), [(rectangles, 10_000), (strokes, 10)], ids=["small", "large"])
@pytest.mark.parametrize(("name", "chunks", "costs"), CASES, ids=[name for name, _, _ in CASES])
def test_every_compute_is_a_bar_to_scale_and_what_is_left_is_the_bubble(
    name: ScheduleName,
    chunks: int,
    costs: Costs,
    bars_of: Callable[[ElementTree.Element], Bars],
    most_bars: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(picture, "_MOST_BARS", most_bars)
    timeline = played(name, chunks, costs)
    groups = rank_groups(ElementTree.fromstring(svg_of(timeline, title="A title")))
    assert len(groups) == 3
    colours: dict[tuple[str, int], set[str]] = {}
    for rank, (group, spans) in enumerate(zip(groups, timeline.spans, strict=True)):
        left, whole = idle(group)
        bars = bars_of(group)
        assert len(bars) == len(spans) == 7 * chunks * (2 if name in ("gpipe", "1f1b", "interleaved") else 3)
        stages = sorted({span.action.stage for span in spans})
        for (x, width, colour), span in zip(bars, spans, strict=True):
            assert (x - left) / whole == pytest.approx(span.start / timeline.makespan, abs=1e-5)
            assert width / whole == pytest.approx((span.end - span.start) / timeline.makespan, abs=1e-5)
            colours.setdefault((span.action.kind.value, stages.index(span.action.stage)), set()).add(colour)
        for (x, width, _), (after, _, _) in pairwise(bars):
            assert x + width <= after + 1e-2
        assert sum(width for _, width, _ in bars) / whole == pytest.approx(1 - timeline.bubbles[rank], abs=1e-4)
    # A kind and a chunk have one colour, and no two the same.
    assert all(len(found) == 1 for found in colours.values())
    assert all(a != b for a, b in combinations(colours.values(), 2))


def test_rows_do_not_overlap() -> None:
    groups = rank_groups(ElementTree.fromstring(svg_of(played("1f1b", 1, Costs()), title="A title")))
    rects = [next(rect for rect in group.iter(f"{SVG}rect") if rect.get("class") == "idle") for group in groups]
    tops = [float(rect.attrib["y"]) for rect in rects]
    assert all(
        top + float(rect.attrib["height"]) < below for top, rect, below in zip(tops, rects, tops[1:], strict=False)
    )
    for group, top in zip(groups, tops, strict=True):
        bars = [rect for rect in group.iter(f"{SVG}rect") if rect.get("class") == "compute"]
        assert {float(rect.attrib["y"]) for rect in bars} == {top}


def test_a_bar_names_its_compute_and_shows_its_microbatch_where_it_is_wide_enough() -> None:
    text = svg_of(played("interleaved", 2, Costs()), title="A title")
    assert "<title>forward, stage 3, microbatch 0: 1.5 to 2</title>" in text
    assert numbers_in(text) == sorted([*range(7)] * 3 * 2 * 2)
    # Drawn at a smaller scale: forwards are too narrow for two digits.
    text = svg_of(played("gpipe", 1, Costs(backward=20), microbatches=12), title="A title")
    assert numbers_in(text) == sorted([*range(12)] * 3)


def test_title_description_legend_and_axis_are_there() -> None:
    text = svg_of(played("zb_v", 2, Costs()), title="5 < 6 & more")
    root = ElementTree.fromstring(text)
    assert root.get("role") == "img" and root.get("aria-labelledby") == "title desc"
    assert root.findtext(f"{SVG}title") == "5 < 6 & more"
    described = root.findtext(f"{SVG}desc")
    assert described is not None and "3 ranks" in described and "bubble" in described
    words = {element.text for element in root.iter(f"{SVG}text")}
    assert words >= {"forward", "backward, input", "backward, weights", "idle", "rank 2", "time", "0", "20"}
    assert "backward" not in words


def test_a_long_timeline_is_no_wider_than_the_widest_and_a_short_one_no_narrower_than_its_title() -> None:
    long = ElementTree.fromstring(svg_of(played("1f1b", 1, Costs(), pp=2, microbatches=3_000), title="A title"))
    short = ElementTree.fromstring(svg_of(played("1f1b", 1, Costs(), pp=1, microbatches=1), title="A title"))
    assert 2_000 < float(long.attrib["width"]) < 2_200
    assert 640 < float(short.attrib["width"]) < 800


def test_a_compute_that_takes_no_time_is_not_drawn() -> None:
    groups = rank_groups(ElementTree.fromstring(svg_of(played("zb_h1", 1, Costs(backward_weight=0)), title="A title")))
    assert [len(rectangles(group)) for group in groups] == [14, 14, 14]


def test_png_has_the_shape_and_the_colours_of_the_svg(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    timeline = played("1f1b", 1, Costs())
    write_svg(timeline, tmp_path / "a.svg", title="A title")
    write_png(timeline, tmp_path / "a.png", title="A title")
    root = ElementTree.fromstring((tmp_path / "a.svg").read_text(encoding="utf-8"))
    width, height = struct.unpack(">II", (tmp_path / "a.png").read_bytes()[16:24])
    assert width == pytest.approx(2 * float(root.attrib["width"]), abs=2)
    assert height == pytest.approx(2 * float(root.attrib["height"]), abs=2)
    pixels = (image.imread(tmp_path / "a.png")[:, :, :3] * 255).round().astype(int)
    for group in rank_groups(root):
        left, whole = idle(group)
        rect = next(rect for rect in group.iter(f"{SVG}rect") if rect.get("class") == "idle")
        # Just under the upper edge of the row, where no number stands.
        row = pixels[round(2 * (float(rect.attrib["y"]) + 3))]
        share = sum(
            (abs(row - [int(colour[at : at + 2], 16) for at in (1, 3, 5)]).max(axis=1) < 3).sum()
            for colour in {colour for _, _, colour in rectangles(group)}
        ) / (2 * whole)
        rank = rank_groups(root).index(group)
        # White seams between bars take about a pixel each.
        assert share == pytest.approx(1 - timeline.bubbles[rank], abs=0.05)
        assert left > 0

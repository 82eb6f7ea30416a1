"""Bars lie where their numbers say, to one scale for all panels of a unit; labels and legends can be read."""

from typing import Any

import pytest

from lightning_megatron.metrics import timeline_figure as drawer
from lightning_megatron.metrics.timeline_figure import Area, AreaPanel, Bar, Panel, Row, timeline_figure

pytest.importorskip("matplotlib")

RED, PINK, BLUE = "#cc0000", "#ffaaaa", "#0000cc"
BARS = (Bar(0, 10, RED, "work", "0"), Bar(10, 30, PINK, "work", "1"), Bar(25, 40, BLUE, "rest"))
UPPER = Panel(heading="above", rows=[Row("first", BARS, note="3 bars"), Row("empty", ())], unit="s", idle="nothing")
LOWER = Panel(heading="below", rows=[Row("second", BARS[:1])], unit="s", idle="nothing")
OTHER = Panel(rows=[Row("third", [Bar(0, 5, BLUE, "rest"), Bar(5, 6, RED, "more")])], unit="GB", limit=8)


def drawn(axes: Any) -> list[tuple[float, float, float, str]]:
    """Start, end, middle of the height and colour of every bar, without the grey background, in order of drawing."""
    from matplotlib.colors import to_hex

    found = []
    for collection in axes.collections:
        for path, colour in zip(collection.get_paths(), collection.get_facecolors(), strict=True):
            bounds = path.get_extents()
            found.append((bounds.x0, bounds.x1, (bounds.y0 + bounds.y1) / 2, to_hex(colour)))
    return [bar for bar in found if bar[3] != drawer._IDLE]


def legend_of(axes: Any) -> list[str]:
    legend = axes.get_legend()
    return [] if legend is None else [text.get_text() for text in legend.get_texts()]


def test_every_bar_is_drawn_where_it_begins_and_ends_in_its_row_later_ones_on_top() -> None:
    upper, lower, other = timeline_figure([UPPER, LOWER, OTHER], title="A title").axes
    assert [bar[:2] for bar in drawn(upper)] == [(0, 10), (10, 30), (25, 40)]
    assert [bar[3] for bar in drawn(upper)] == [RED, PINK, BLUE]
    assert {bar[2] for bar in drawn(upper)} == {0}
    # To one scale where the unit is one, and to its own with its limit elsewhere.
    assert upper.get_xlim() == lower.get_xlim() == (0, 40) and other.get_xlim() == (0, 8)
    assert upper.get_position().width == other.get_position().width
    [limit] = [line for line in other.lines if list(line.get_xdata()) == [8, 8]]
    assert limit.get_linestyle() == "--" and not upper.lines
    assert [axes.get_xlabel() for axes in (upper, lower, other)] == ["s", "s", "GB"]


def test_areas_lie_on_top_of_each_other_to_the_scale_of_the_panels_below() -> None:
    areas = [Area("work", RED, [1, 2, 2]), Area("other", BLUE, [0, 3, 1])]
    panel = AreaPanel(moments=[0, 10, 50], areas=areas, unit="s", height_unit="GB", limit=8)
    over_time, upper = timeline_figure([panel, UPPER], title="A title").axes
    assert over_time.get_xlim() == upper.get_xlim() == (0, 50) and over_time.get_ylim() == pytest.approx((0, 8.4))
    corners = [{tuple(map(float, point)) for point in area.get_paths()[0].vertices} for area in over_time.collections]
    assert {(10, 0), (0, 1), (10, 2), (50, 2)} <= corners[0] and {(0, 1), (10, 5), (50, 3)} <= corners[1]
    assert [list(line.get_ydata()) for line in over_time.lines] == [[8, 8]]
    assert legend_of(over_time) == ["work", "other"] and over_time.get_ylabel() == "GB"


def test_rows_are_labelled_in_order_and_do_not_overlap() -> None:
    upper, lower, _ = timeline_figure([UPPER, LOWER, OTHER], title="A title").axes
    assert [text.get_text() for text in upper.get_yticklabels()] == ["first", "empty"]
    # The first row is the upper one, and panels lie below each other.
    assert upper.get_ylim() == (1.5, -0.5)
    assert upper.get_position().y0 > lower.get_position().y1
    heights = [path.get_extents().height for collection in upper.collections for path in collection.get_paths()]
    assert max(heights) < 1
    assert upper.get_position().height == pytest.approx(2 * lower.get_position().height)


def test_labels_stand_on_the_bars_that_are_wide_enough() -> None:
    [axes] = timeline_figure([UPPER], title="A title").axes
    assert [(text.get_text(), text.get_position()) for text in axes.texts] == [
        ("0", (5, 0)),
        ("1", (20, 0)),
        ("3 bars", (4, 0)),
    ]
    assert axes.texts[2].xy == (40, 0)
    narrow = [Bar(1e5 * n, 1e5 * n + 1, RED, "work", "12") for n in range(20)]
    wide = Bar(2e6, 4e6, BLUE, "rest", "34")
    [axes] = timeline_figure([Panel(rows=[Row("a", [*narrow, wide])], unit="s")], title="A title").axes
    assert [text.get_text() for text in axes.texts] == ["34"]
    # Black on a light bar and white on a dark one.
    assert axes.texts[0].get_color() == "#ffffff"
    [axes] = timeline_figure([UPPER], title="A title").axes
    assert [text.get_color() for text in axes.texts[:2]] == ["#ffffff", "#000000"]


def test_a_legend_names_each_colour_once_over_all_panels() -> None:
    figure = timeline_figure([UPPER, LOWER, OTHER], title="A title")
    assert [legend_of(axes) for axes in figure.axes] == [["work", "rest", "nothing"], [], ["more"]]
    assert [text.get_text() for text in figure.texts] == ["A title", "above", "below"]


def test_a_figure_is_as_wide_as_its_labels_need_within_bounds() -> None:
    def width(length: float, num_bars: int) -> float:
        bars = [Bar(length * n, length * (n + 1), RED, "work", "123") for n in range(num_bars)]
        figure = timeline_figure([Panel(rows=[Row("a", bars)], unit="s")], title="A title")
        return float(figure.get_size_inches()[0]) * 72

    assert width(1.0, 2) == pytest.approx(640) and width(1.0, 3_000) == pytest.approx(2_000)
    assert 640 < width(1.0, 50) < 2_000 and width(1.0, 50) == pytest.approx(width(1e-6, 50))


def test_many_bars_are_an_image_without_labels_of_the_same_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    [small] = timeline_figure([UPPER], title="A title").axes
    monkeypatch.setattr(drawer, "_MOST_BARS", 2)
    [large] = timeline_figure([UPPER], title="A title").axes
    assert drawn(large) == drawn(small)
    assert [text.get_text() for text in large.texts] == ["3 bars"]
    assert [c.get_rasterized() for c in (*small.collections, *large.collections)].count(True) == 1


def test_thousands_of_rows_fit_on_a_figure_that_can_be_written() -> None:
    rows = [Row(f"rank {rank}", [Bar(0, 1, RED, "work")]) for rank in range(3_000)]
    figure = timeline_figure([Panel(rows=rows, unit="s")], title="A title")
    assert figure.get_size_inches()[1] * 144 < 2**16
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert labels[:2] == ["rank 0", "rank 12"] and len(drawn(figure.axes[0])) == 3_000


def test_bars_without_length_take_no_part_in_the_width() -> None:
    bars = [Bar(1.0, 1.0, "#111111", "nothing", "12")] * 3 + [Bar(1.0, 3.0, "#222222", "work", "3")]
    narrow = timeline_figure([Panel(rows=[Row("rank 0", bars)], unit="ms")], title="a step")
    alone = timeline_figure([Panel(rows=[Row("rank 0", bars[3:])], unit="ms")], title="a step")
    assert narrow.get_figwidth() == alone.get_figwidth()

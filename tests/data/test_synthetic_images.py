"""The pictures that are drawn tell what their rows ask for, and nothing else does."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from lightning_megatron.data.synthetic_images import COLOURS, FACTS, PLACES, SIDE, draw_images


def test_a_picture_has_the_colour_and_the_position_of_its_answer(tmp_path: Path) -> None:
    table = draw_images(tmp_path / "shapes", 80)
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    assert [len(row["images"]) for row in rows[:4]] == [1, 1, 2, 0] and len(rows) == 80
    for row in rows:
        asked, said = (turn["value"] for turn in row["conversations"])
        assert asked.count("<image>") == len(row["images"])
        pictures = [np.asarray(Image.open(table.parent / name)) for name in row["images"]]
        seen = [_seen(picture) for picture in pictures]
        if "What do you see" in asked:
            colour, position = seen[0]
            assert said.startswith(f"A {colour} ") and said.endswith(f"at the {position}.")
        elif "Which colour" in asked:
            assert said == f"It is {seen[0][0]}."
        elif "Where" in asked:
            colours = [colour for colour, _ in seen]
            number = colours.index(asked.split()[-2])
            assert said == f"In the {('first', 'second')[number]} picture, at the {seen[number][1]}."
        else:
            assert (asked, said) in FACTS and not pictures
    assert all(len({row["conversations"][1]["value"] for row in rows[kind::4]}) > 4 for kind in range(4))


def _seen(picture: np.ndarray) -> tuple[str, str]:
    """The colour and the place of the only shape."""
    is_drawn = (picture != 255).any(axis=2)
    colours = {name for name, colour in COLOURS.items() if (picture[is_drawn] == colour).all()}
    half = SIDE // 2
    quarters = {p: is_drawn[_half(p, "bottom", half), _half(p, "right", half)].any() for p in PLACES}
    [colour], [position] = colours, [p for p, any_of_it in quarters.items() if any_of_it]
    return colour, position


def _half(position: str, word: str, half: int) -> slice:
    return slice(half, None) if word in position else slice(0, half)


def test_pictures_are_drawn_once_and_the_same_each_time(tmp_path: Path) -> None:
    table = draw_images(tmp_path / "one", 8)
    written = table.stat().st_mtime_ns
    assert draw_images(tmp_path / "one", 8).stat().st_mtime_ns == written
    other = draw_images(tmp_path / "two", 8)
    assert other.read_text() == table.read_text()
    assert {p.name: p.read_bytes() for p in other.parent.iterdir()} == {
        p.name: p.read_bytes() for p in table.parent.iterdir()
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]

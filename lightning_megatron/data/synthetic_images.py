"""Synthetic images of coloured shapes, with questions about them, for training without a data set.

A table in LLaVA's form and a folder of pictures. Of four rows one asks for all that is in a picture, one for its
colour, one shows two pictures and asks for the position of a colour, and one has none. Pictures are a function of the
row's number alone, and uniform: a model that does not see can only guess.
"""

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.images import write_image

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 210, 50),
    "purple": (150, 60, 190),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle")
PLACES = ("top left", "top right", "bottom left", "bottom right")
# Questions and answers of rows without a picture.
FACTS = (
    ("What colour is the sky?", "The sky is blue."),
    ("What colour is grass?", "Grass is green."),
    ("How many corners has a square?", "A square has four corners."),
    ("How many corners has a triangle?", "A triangle has three corners."),
    ("How many corners has a circle?", "A circle has none."),
)
# Of a picture, in pixels.
SIDE = 32
TABLE = "table.jsonl"
"""The name of the table in the folder that `draw_images` writes."""


def draw_images(folder: Path, num_rows: int) -> Path:
    """The table of `num_rows` rows in `folder`, drawn unless it is there.

    Several processes at once do the work more than once and do no harm.
    """
    if (folder / TABLE).is_file():
        return folder / TABLE
    made = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
    try:
        made.mkdir(parents=True)
        rows = [_row(number, made) for number in range(num_rows)]
        (made / TABLE).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        try:
            made.rename(folder)
        except OSError:
            # Another process was faster.
            if not (folder / TABLE).is_file():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder / TABLE


def _row(number: int, folder: Path) -> dict[str, Any]:
    # The older generator of numpy, whose draws are promised to stay.
    draw = np.random.RandomState(number)
    kind = number % 4
    if kind == 3:
        question, answer = FACTS[draw.randint(len(FACTS))]
        return _conversation(number, [], question, answer)
    first, second = draw.permutation(list(COLOURS))[:2].tolist()
    seen = [(colour, str(draw.choice(SHAPES)), str(draw.choice(PLACES))) for colour in (first, second)[: 1 + kind // 2]]
    images = [f"{number}-{place}.png" for place in range(len(seen))]
    for name, (colour, shape, place) in zip(images, seen, strict=True):
        write_image(_picture(colour, shape, place), folder / name)
    colour, shape, place = seen[0]
    if kind == 0:
        return _conversation(number, images, "What do you see?", f"A {colour} {shape} at the {place}.")
    if kind == 1:
        return _conversation(number, images, "Which colour is it?", f"It is {colour}.")
    chosen = int(draw.randint(2))
    answer = f"In the {('first', 'second')[chosen]} picture, at the {seen[chosen][2]}."
    return _conversation(number, images, f"Where is the {seen[chosen][0]} one?", answer)


def _conversation(number: int, images: list[str], question: str, answer: str) -> dict[str, Any]:
    text = "<image>\n" * len(images) + question
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": answer}]
    return {"id": str(number), "images": images, "conversations": turns}


def _picture(colour: str, shape: str, place: str) -> NDArray[np.uint8]:
    """One shape in a quarter of a white picture: [SIDE, SIDE, 3]."""
    half = SIDE // 2
    y, x = np.mgrid[:half, :half] - (half - 1) / 2
    radius = half / 2 - 2
    is_shape = {
        "circle": x**2 + y**2 <= radius**2,
        "square": np.maximum(abs(x), abs(y)) <= radius,
        "triangle": (2 * abs(x) <= y + radius) & (y <= radius),
    }[shape]
    picture = np.full((SIDE, SIDE, 3), 255, dtype=np.uint8)
    top, left = half * place.startswith("bottom"), half * place.endswith("right")
    picture[top : top + half, left : left + half][is_shape] = COLOURS[colour]
    return picture

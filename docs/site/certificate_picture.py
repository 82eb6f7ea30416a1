"""The certificate in small, `docs/pictures/certificate.svg`: a square for each cell of `docs/certificate.md`.

python docs/site/certificate_picture.py
"""

import math
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
TARGET = DOCS / "pictures" / "certificate.svg"

# Width and height of a cell, room for the names of models, and the line above the table, in pixels.
WIDTH, HEIGHT, LEFT, TOP = 5, 12, 170, 26
# Tolerances of the page, by the precision of a column.
TOLERANCES = {"64-true": 1e-10, "32-true": 1e-5}
NOT_RUN, OUTSIDE = "#eef0f2", "#d62728"
# From far below the tolerance to just within it; the colour-blind can distinguish their lightness.
WITHIN = ("#0b6e4f", "#2f9c77", "#7cc6a6", "#c9e8d8")


def cells(page: str) -> tuple[list[str], list[str], list[list[str]]]:
    """Layouts, columns and cells of the first table of the certificate."""
    lines = re.search(r"(?:^\|.*\n)+", page, re.MULTILINE)
    assert lines is not None
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines.group().splitlines()]
    return [row[0] for row in rows[2:]], rows[0][2:], [row[2:] for row in rows[2:]]


def colour(cell: str, tolerance: float) -> str:
    """Colour of a cell: how far below the tolerance it is, in four steps of its orders of magnitude."""
    if cell == "–":
        return NOT_RUN
    # Zero, and deviations without a digit such as e-16, are among the smallest.
    deviation = float(cell.replace("*", "") if cell[0].isdigit() or cell[0] == "*" else f"1{cell}")
    if cell.startswith("**") or deviation > tolerance:
        return OUTSIDE
    orders = math.log10(tolerance / deviation) if deviation else 99.0
    return WITHIN[min(3, max(0, 3 - int(orders)))]


def picture(page: str) -> str:
    """The table as SVG, columns of the page as rows of the picture."""
    layouts, columns, table = cells(page)
    run = [cell for row in table for cell in row if cell != "–"]
    height = TOP + HEIGHT * len(columns) + 26
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH * len(layouts) + 10}" height="{height}" '
        'font-family="sans-serif" font-size="10">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="16" font-size="12">{len(layouts)} layouts, each against one device: '
        f"{len(run):,} comparisons of losses, gradients and weights</text>",
    ]
    for j, column in enumerate(columns):
        y, tolerance = TOP + HEIGHT * j, TOLERANCES[column.rpartition(", ")[2]]
        lines.append(f'<text x="{LEFT - 6}" y="{y + 9}" text-anchor="end">{column.replace("-true", " bit")}</text>')
        places: dict[str, list[int]] = {}
        for i, row in enumerate(table):
            places.setdefault(colour(row[j], tolerance), []).append(LEFT + WIDTH * i)
        lines += [
            f'<path fill="{fill}" d="{"".join(f"M{x} {y}h{WIDTH - 1}v{HEIGHT - 2}h{1 - WIDTH}z" for x in own)}"/>'
            for fill, own in places.items()
        ]
    legend = [*zip(WITHIN, ("1000 times below the tolerance", "100", "10", "within"), strict=True)]
    x, y = LEFT, TOP + HEIGHT * len(columns) + 6
    for fill, text in [*legend, (OUTSIDE, "outside"), (NOT_RUN, "no such cell")]:
        lines.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{fill}"/>')
        lines.append(f'<text x="{x + 14}" y="{y + 9}">{text}</text>')
        x += 30 + 6 * len(text)
    return "\n".join([*lines, "</svg>\n"])


if __name__ == "__main__":
    TARGET.write_text(picture((DOCS / "certificate.md").read_text()))

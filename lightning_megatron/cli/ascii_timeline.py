"""A timeline as lines of text, one per rank, to scale: as many characters as a compute takes time.

The last step of `lightning-megatron schedule`, with the picture.
"""

import math
from fractions import Fraction

from lightning_megatron.pipeline.simulate import Span, Timeline

# How many cells the shortest compute may take, so that the others come out exactly.
_FINEST = 6


def ascii_timeline(timeline: Timeline, *, message_time: float, columns: int) -> str:
    """The grid, its lines no longer than `columns` characters, with a legend above.

    A cell is the time that divides all computes and the message, in the unit of the timeline, or else that of the
    shortest compute. It is as wide as the numbers of the microbatches, if that fits, or one character. What does not
    fit is cut off, and a last line says so.
    """
    cell_time = _cell_time(timeline, message_time)
    num_cells = round(timeline.makespan / cell_time)
    room = columns - _prefix_width(timeline)
    longest = 1 + len(str(max(span.action.microbatch for spans in timeline.spans for span in spans)))
    width = next((width for width in (longest + 1, longest) if num_cells * width <= room), 1)
    shown = min(num_cells, max(room // width, 1))
    lines = [_how_to_read(timeline, cell_time, width, longest)]
    for rank, spans in enumerate(timeline.spans):
        line = "".join(_cells(spans, cell_time, width, longest, shown)).rstrip()
        lines.append(f"rank {rank}".ljust(_prefix_width(timeline)) + line)
    if shown < num_cells:
        needed = _prefix_width(timeline) + num_cells
        lines.append(
            f"... {num_cells - shown} of {num_cells} cells cut off at time {shown * cell_time:g} of "
            f"{timeline.makespan:g}; see all with --max-columns {needed}, --out FILE.svg or --json"
        )
    return "\n".join(lines)


def _prefix_width(timeline: Timeline) -> int:
    return len(f"rank {len(timeline.spans) - 1}  ")


def _how_to_read(timeline: Timeline, cell_time: float, width: int, longest: int) -> str:
    numbers = ", then its microbatch" if width >= longest else " (no room for microbatches)"
    has_chunks = any(len({span.action.stage for span in spans}) > 1 for spans in timeline.spans)
    chunks = ", small on the odd chunks of a rank" if has_chunks else ""
    unit = "character" if width == 1 else f"{width} characters"
    return f"{unit} = time {cell_time:g}; letter = compute{chunks}{numbers}; = goes on, . is idle"


def _cell_time(timeline: Timeline, message_time: float) -> float:
    lengths = {span.end - span.start for spans in timeline.spans for span in spans}
    shortest = min(length for length in lengths if length > 0)
    # Every moment is a sum of computes and messages; as differences of moments, lengths are wrong in their last digits.
    multiples = {round(time / shortest, 6) for time in (*lengths, message_time)}
    exact = [Fraction(multiple).limit_denominator(1_000) for multiple in multiples if multiple > 0]
    common = Fraction(math.gcd(*(f.numerator for f in exact)), math.lcm(*(f.denominator for f in exact)))
    return shortest * float(common) if common * _FINEST >= 1 else shortest


def _cells(spans: tuple[Span, ...], cell_time: float, width: int, longest: int, shown: int) -> list[str]:
    """The cells of a rank. A compute has those whose middle lies in its time."""
    chunk_of = {stage: chunk for chunk, stage in enumerate(sorted({span.action.stage for span in spans}))}
    cells = [".".ljust(width)] * shown
    for span in spans:
        first, end = (math.ceil(round(time / cell_time - 0.5, 6)) for time in (span.start, span.end))
        if first >= shown:
            break
        end = min(end, shown)
        if end <= first:
            continue
        letter = span.action.kind.value
        if chunk_of[span.action.stage] % 2:
            letter = letter.lower()
        label = f"{letter}{span.action.microbatch:0{longest - 1}}" if width >= longest else letter
        text = label.ljust((end - first) * width - (width > longest), "=").ljust((end - first) * width)
        cells[first:end] = [text[at : at + width] for at in range(0, len(text), width)]
    return cells

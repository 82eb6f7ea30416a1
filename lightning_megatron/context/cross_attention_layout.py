"""Layout of cross-attention: each segment of the queries sees one segment of another stream, all of it.

Both streams are cut over the same ranks, each by a layout of its own: the decoder's by zig-zag, say, and the encoder's
into contiguous parts.
"""

from dataclasses import dataclass

from lightning_megatron.context.context_layout import AttentionBlock, ContextLayout

NOTHING = -1
"""Source of a segment that sees nothing."""


@dataclass(frozen=True, eq=False)
class CrossAttentionLayout:
    """The stream of keys and values of cross-attention."""

    layout: ContextLayout
    """Layout of the tokens of this stream."""
    segments: tuple[int, ...]
    """Segment of this stream that each segment of the queries sees, or NOTHING."""

    def blocks(self, queries: ContextLayout, group: int, source: int) -> tuple[AttentionBlock, ...]:
        """Attention blocks of one group's queries with another group's keys."""
        spans = {segment: (row, num) for segment, row, num in self.layout.spans(source)}
        return tuple(
            AttentionBlock(row, num, *spans[self.segments[segment]], "full")
            for segment, row, num in queries.spans(group)
            if self.segments[segment] in spans
        )

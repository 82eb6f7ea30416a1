"""Attention to another stream: which segment of the source each segment of the queries sees, all of it.

Both streams are cut over the same ranks, each by a layout of its own: a decoder's by zig-zag, say, and the encoder's
that it looks at into contiguous parts.
"""

from dataclasses import dataclass

from lightning_megatron.context.context_layout import AttentionBlock, ContextLayout

NOTHING = -1
"""What a segment sees whose source there is not."""


@dataclass(frozen=True, eq=False)
class CrossAttentionLayout:
    """A stream that holds keys and values for the queries of another."""

    layout: ContextLayout
    """Of its tokens."""
    segments: tuple[int, ...]
    """For each segment of the queries' stream the one of this stream that it sees, or NOTHING."""

    def blocks(self, queries: ContextLayout, group: int, place: int) -> tuple[AttentionBlock, ...]:
        """What the queries of one group have to do with the keys of another."""
        spans = {segment: (row, num) for segment, row, num in self.layout.spans(place)}
        return tuple(
            AttentionBlock(row, num, *spans[self.segments[segment]], "full")
            for segment, row, num in queries.spans(group)
            if self.segments[segment] in spans
        )

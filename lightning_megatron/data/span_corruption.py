"""Span corruption (T5): spans of text replaced by sentinels, and predicted.

Between a corpus and the sampler. In the text each span is replaced by its own sentinel; the target is each sentinel
followed by its span:

    text              a b c d e f g h i            spans: c d, and g
    encoder_tokens    a b <0> e f <1> h i end
    decoder_tokens    start <0> c d <1> g
    labels            <0> c d <1> g end

Lengths of spans are geometric, up to a longest, until the share of tokens is reached; the last is cut to fit. Then all
ways to put that many spans between the other tokens, no two side by side, are equally likely. Source: Raffel et al.
2020, sections 3.1.4 and 3.3.4.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron.data.corpus import TokenCorpus
from lightning_megatron.data.packed_rows import IGNORE_INDEX, NO_SEGMENT
from lightning_megatron.data.packing import Numbers, cut_documents
from lightning_megatron.data.seeded_random import random_order, uniforms


@dataclass(frozen=True, kw_only=True)
class SpanCorruption:
    """Share of tokens that are masked in spans, the spans' lengths, and the tokens of samples."""

    sentinels: tuple[int, ...]
    """Token ids, in the order in which they are used."""
    start_token: int
    """First token of the decoder's text."""
    end_token: int
    """Token that ends both texts."""
    padding_token: int
    """Token at unused positions."""
    encoder_length: int
    """Tokens of the encoder's text, end and padding included."""
    decoder_length: int
    """Tokens of the decoder's text, end and padding included."""
    mask_prob: float = 0.15
    """Fraction of the tokens that are masked."""
    span_stop_prob: float = 0.2
    """Probability that a span ends after each token: the mean length is about its inverse."""
    max_span_length: int = 10
    """Most tokens of a span."""

    def __post_init__(self) -> None:
        faults = []
        if not 0 < self.mask_prob < 1:
            faults.append(f"mask_prob ({self.mask_prob}) must lie between 0 and 1, as 0.15 does")
        if not 0 < self.span_stop_prob <= 1:
            faults.append(f"span_stop_prob ({self.span_stop_prob}) must be above 0 and at most 1 (spans of 1)")
        if self.max_span_length < 1:
            faults.append(f"max_span_length ({self.max_span_length}) must be at least 1 token")
        if self.encoder_length < 3:
            faults.append(f"encoder_length ({self.encoder_length}) must be at least 3: a sentinel, a token and the end")
        if len(set(self.sentinels)) != len(self.sentinels) or not self.sentinels:
            faults.append(f"sentinels ({len(self.sentinels)}) must be at least one, and all different")
        if not faults:
            # With the fewest spans that take out so much, each with its sentinel, and the end.
            goal = self.goal(self.most_tokens)
            fewest = -(-goal // self.max_span_length)
            if self.decoder_length < goal + fewest + 1:
                faults.append(
                    f"decoder_length ({self.decoder_length}) must be at least {goal + fewest + 1}: of"
                    f" {self.most_tokens} tokens {goal} are taken out in {fewest} spans or more, and about"
                    f" {goal + round(2 * goal * self.span_stop_prob) + 1} has room for nearly all draws"
                )
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def most_tokens(self) -> int:
        """Tokens of a piece of text that the encoder has room for, whatever is taken out."""
        return self.encoder_length - 1

    def goal(self, num_tokens: int) -> int:
        """Number of `num_tokens` that are masked: at least one, and not all of two or more."""
        return max(1, min(round(self.mask_prob * num_tokens), num_tokens - 1))


@dataclass(frozen=True, kw_only=True)
class Corrupted:
    """The encoder's and the decoder's text, without start and padding, each with its end."""

    encoder: Numbers
    target: Numbers


def corrupt_spans(tokens: Numbers, corruption: SpanCorruption, *, seed: int, sample: int) -> Corrupted:
    """The text with masked spans, and the spans to predict: a function of (seed, sample, tokens) alone.

    There are no more spans than sentinels, nor than the decoder has room for: those drawn beyond that stay in the text.
    """
    tokens = np.asarray(tokens, dtype=np.int64)
    starts, lengths = _spans(len(tokens), corruption, seed, sample)
    sentinels = np.array(corruption.sentinels[: len(starts)], dtype=np.int64)
    edges = np.stack([starts, starts + lengths], axis=1).ravel()
    # Unmasked, masked, unmasked, masked, ..., unmasked.
    pieces = np.split(tokens, edges)
    unmasked, spans = pieces[0::2], pieces[1::2]
    encoder = [part for i, piece in enumerate(unmasked) for part in (piece, sentinels[i : i + 1])]
    target = [part for i, piece in enumerate(spans) for part in (sentinels[i : i + 1], piece)]
    end = np.array([corruption.end_token], dtype=np.int64)
    return Corrupted(encoder=np.concatenate([*encoder, end]), target=np.concatenate([*target, end]))


class T5Pieces(Dataset[dict[str, Tensor]]):
    """Samples of pieces of documents: each document is cut every `most_tokens`, and pieces do not cross documents.

    Indices go on over epochs, as those of `EpochSampler`: sample n is piece n modulo the number of pieces, and its
    masked spans depend on (seed, n) and the piece alone, so they differ in every epoch.
    """

    def __init__(self, corpus: TokenCorpus, corruption: SpanCorruption, *, seed: int = 0) -> None:
        self.corpus = corpus
        self.corruption = corruption
        self.seed = seed
        self.pieces = cut_documents(corpus.document_sizes(), corruption.most_tokens, "split")

    def __len__(self) -> int:
        """Number of pieces, which are the samples of one epoch."""
        return len(self.pieces.lengths)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """`encoder_tokens` and `encoder_segments` [encoder_length]; `decoder_tokens`, `decoder_segments`, `labels` and
        `loss_mask` [decoder_length]. Segments are 0 where there is text and -1 at padding."""
        piece = number % len(self)
        first = self.corpus.document_start(int(self.pieces.documents[piece])) + int(self.pieces.starts[piece])
        tokens = self.corpus.tokens[first : first + int(self.pieces.lengths[piece])].astype(np.int64)
        corrupted = corrupt_spans(tokens, self.corruption, seed=self.seed, sample=number)
        to, padding = self.corruption, self.corruption.padding_token
        labels = _filled(corrupted.target, to.decoder_length, IGNORE_INDEX)
        return {
            "encoder_tokens": _filled(corrupted.encoder, to.encoder_length, padding),
            "encoder_segments": _filled(np.zeros_like(corrupted.encoder), to.encoder_length, NO_SEGMENT),
            "decoder_tokens": _filled(np.append(to.start_token, corrupted.target[:-1]), to.decoder_length, padding),
            "decoder_segments": _filled(np.zeros_like(corrupted.target), to.decoder_length, NO_SEGMENT),
            "labels": labels,
            "loss_mask": (labels != IGNORE_INDEX).float(),
        }


def _spans(num_tokens: int, corruption: SpanCorruption, seed: int, sample: int) -> tuple[Numbers, Numbers]:
    """Starts of the spans, in order, and their lengths."""
    goal = corruption.goal(num_tokens)
    drawn = uniforms(goal, seed, "lengths of spans", sample)
    stays = np.log1p(-corruption.span_stop_prob) if corruption.span_stop_prob < 1 else -np.inf
    lengths = np.minimum(1 + np.floor(np.log(drawn) / stays).astype(np.int64), corruption.max_span_length)
    ends = np.cumsum(lengths)
    num_spans = int(np.searchsorted(ends, goal)) + 1
    lengths = lengths[:num_spans]
    lengths[-1] -= ends[num_spans - 1] - goal
    # As many as fit: sentinels, room in the decoder, and unmasked tokens between them.
    room = corruption.decoder_length - 1
    fitting = np.cumsum(lengths) + np.arange(1, num_spans + 1) <= room
    num_spans = min(num_spans, len(corruption.sentinels), int(fitting.sum()), num_tokens - goal + 1)
    lengths = lengths[:num_spans]
    num_unmasked = num_tokens - int(lengths.sum())
    # Span k is before unmasked token gaps[k]: different gaps, so at least one token is between two spans.
    gaps = np.sort(random_order(num_unmasked + 1, seed, "places of spans", sample)[:num_spans])
    return gaps + np.cumsum(lengths) - lengths, lengths


def _filled(values: Numbers, length: int, fill: int) -> Tensor:
    return torch.from_numpy(np.pad(values, (0, length - len(values)), constant_values=fill).astype(np.int64))

"""Pairs of text spans for BERT: in their order or swapped, with masked words.

Between a corpus of sentences and the sampler. A span is consecutive sentences of one document, at least two, of about
as many tokens as fit; now and then it is meant to be shorter. A sample splits a span between two sentences and swaps
the parts or not:

    tokens                 [CLS] first part [SEP] second part [SEP] padding ...
    token_types              0     0 ...      0      1 ...       1     0 ...
    padding_mask             1     1 ...      1      1 ...       1     0 ...
    labels                 -100, and the token that was there where one is hidden
    sentence_order_labels  1 where the parts are swapped, 0 where they follow each other

Without sentence-order labels, a span of one sentence or more is one part, and there is one [SEP].

Sources: Devlin et al. 2019, appendix A.2; sentence order: Lan et al. 2020, section 3.1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron.data.corpus import TokenArray, TokenCorpus
from lightning_megatron.data.masking import Masking, mask_words
from lightning_megatron.data.packed_rows import IGNORE_INDEX
from lightning_megatron.data.packing import Numbers
from lightning_megatron.data.seeded_random import uniforms, uniforms_at

_FEWEST_TOKENS = 2
"""Fewest tokens of a span that is made short on purpose."""


@dataclass(frozen=True, kw_only=True)
class BertSampleConfig:
    """Length and parts of samples, and their special tokens."""

    sequence_length: int
    """Tokens of a sample, special ones and padding included."""
    class_token: int
    """Id of the token that begins a sample ([CLS])."""
    separator_token: int
    """Id of the token that ends each part ([SEP])."""
    padding_token: int
    """Id of the token at unused positions ([PAD])."""
    short_seq_prob: float = 0.1
    """Fraction of the spans that have a random length, from 2 tokens to all that fit."""
    swapped_share: float = 0.5
    """Fraction of the samples whose parts are swapped."""
    is_pair: bool = True
    """Whether a sample has two parts, swapped or not; else one, and no sentence_order_labels."""

    def __post_init__(self) -> None:
        faults = []
        if self.most_tokens < _FEWEST_TOKENS:
            faults.append(
                f"sequence_length ({self.sequence_length}) must be at least {self.num_special + _FEWEST_TOKENS}:"
                f" {self.num_special} special tokens and {_FEWEST_TOKENS} of the text"
            )
        for name, share in (("short_seq_prob", self.short_seq_prob), ("swapped_share", self.swapped_share)):
            if not 0 <= share <= 1:
                faults.append(f"{name} ({share}) must be from 0 to 1")
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def num_special(self) -> int:
        """Number of special tokens: [CLS], and a [SEP] after each part."""
        return 3 if self.is_pair else 2

    @property
    def most_tokens(self) -> int:
        """Tokens of a span that a sample has room for."""
        return self.sequence_length - self.num_special


def sentence_spans(
    lengths: Numbers, document_bounds: Numbers, most_tokens: int, short_seq_prob: float, seed: int, *, fewest: int = 2
) -> Numbers:
    """First sentence, last sentence + 1, and target number of tokens of each span: [spans, 3].

    A span takes sentences until it has the tokens that it is meant to have, and at least `fewest`, 1 or 2. A single
    sentence that would be left of its document, and is too few, joins the span before it. Sentences without tokens do
    not count, and a document with too few others gives no span. All documents are gone through at once, span by span.
    """
    full = np.flatnonzero(lengths)
    ends = np.cumsum(lengths[full], dtype=np.int64)
    starts = ends - lengths[full]
    bounds = np.searchsorted(full, document_bounds)
    at, stop = bounds[:-1], bounds[1:]
    at, stop = at[stop - at >= fewest], stop[stop - at >= fewest]
    found = []
    while len(at):
        is_short = uniforms_at(at, seed, "short spans") < short_seq_prob
        room = most_tokens - _FEWEST_TOKENS + 1
        short = _FEWEST_TOKENS + (uniforms_at(at, seed, "lengths of short spans") * room).astype(np.int64)
        meant = np.where(is_short, short, most_tokens)
        last = np.searchsorted(ends, starts[at] + meant, side="left") + 1
        last = np.clip(last, at + fewest, stop)
        last = np.where(stop - last < fewest, stop, last)
        found.append(np.stack([full[at], full[last - 1] + 1, meant], axis=1))
        at, stop = last[last < stop], stop[last < stop]
    if not found:
        raise ValueError(
            f"none of the {len(document_bounds) - 1} documents has two sentences, and a sample is parted between two;"
            " prepare the text with its sentences split, one sequence each, or ask nothing about the order by"
            " is_pair=False"
            if fewest == 2
            else f"none of the {len(document_bounds) - 1} documents has a token"
        )
    spans = np.concatenate(found)
    ordered: Numbers = spans[np.argsort(spans[:, 0])]
    return ordered


class BertSpans(Dataset[dict[str, Tensor]]):
    """Samples of spans of a corpus whose sequences are sentences. `starts_word` returns which tokens begin a word.

    Indices go on over epochs, as those of `EpochSampler`: sample n is span n modulo the number of spans. Its split and
    masked tokens depend on (seed, n) and the span alone, so they differ in every epoch.
    """

    def __init__(
        self,
        corpus: TokenCorpus,
        config: BertSampleConfig,
        masking: Masking,
        starts_word: Callable[[Numbers], NDArray[np.bool_]],
        *,
        seed: int = 0,
    ) -> None:
        special = {config.class_token, config.separator_token, config.padding_token}
        if missing := sorted(special - set(masking.special_tokens)):
            raise ValueError(
                f"tokens {missing} stand for class, separator or padding and must be among special_tokens"
                f" ({masking.special_tokens}) of the masking: they would be hidden"
            )
        self.corpus = corpus
        self.config = config
        self.masking = masking
        self.starts_word = starts_word
        self.seed = seed
        self.spans = sentence_spans(
            corpus.lengths,
            corpus.document_bounds,
            config.most_tokens,
            config.short_seq_prob,
            seed,
            fewest=2 if config.is_pair else 1,
        )

    def __len__(self) -> int:
        """Number of spans, which are the samples of one epoch."""
        return len(self.spans)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """`tokens`, `token_types`, `padding_mask`, `labels`, `loss_mask` [s] each, and of a pair
        `sentence_order_labels` []."""
        first, last, meant = self.spans[number % len(self.spans)].tolist()
        sentences = [self.corpus.sequence(i) for i in range(first, last) if self.corpus.lengths[i]]
        room, order = min(meant, self.config.most_tokens), {}
        begin, separator = np.array([self.config.class_token]), np.array([self.config.separator_token])
        if self.config.is_pair:
            one, other, is_swapped = part_and_swap(
                sentences, room, self.config.swapped_share, seed=self.seed, sample=number
            )
            parts = [begin, one, separator, other, separator]
            order = {"sentence_order_labels": torch.tensor(int(is_swapped))}
        else:
            one = _cut(np.concatenate(sentences), room, float(uniforms(1, self.seed, "cutting", number)[0]))
            parts = [begin, one, separator]
        tokens = np.concatenate(parts).astype(np.int64)
        masked = mask_words(tokens, self.starts_word(tokens), self.masking, seed=self.seed, sample=number)
        num_used, num_first = len(tokens), len(one) + 2
        unused = self.config.sequence_length - num_used
        labels = torch.from_numpy(np.pad(masked.labels, (0, unused), constant_values=IGNORE_INDEX))
        position = torch.arange(self.config.sequence_length)
        return {
            "tokens": torch.from_numpy(np.pad(masked.tokens, (0, unused), constant_values=self.config.padding_token)),
            "token_types": ((position >= num_first) & (position < num_used)).long(),
            "padding_mask": position < num_used,
            "labels": labels,
            "loss_mask": (labels != IGNORE_INDEX).float(),
            **order,
        }


def part_and_swap(
    sentences: Sequence[TokenArray], most_tokens: int, swapped_share: float, *, seed: int, sample: int
) -> tuple[TokenArray, TokenArray, bool]:
    """The two parts of a span, of together at most `most_tokens`, and whether they are swapped.

    The excess is cut from the longer part until both are alike, and then from both, at the front or the end at random;
    at least one token of each part is left.
    """
    where, swap, *fronts = uniforms(4, seed, "parting", sample).tolist()
    pivot = 1 + int(where * (len(sentences) - 1))
    parts = [np.concatenate(sentences[:pivot]), np.concatenate(sentences[pivot:])]
    is_swapped = swap < swapped_share
    if is_swapped:
        parts.reverse()
    sizes = [len(part) for part in parts]
    shorter = min(min(sizes), most_tokens // 2)
    longer = min(max(sizes), most_tokens - shorter)
    by_size = [shorter, longer] if sizes[0] <= sizes[1] else [longer, shorter]
    one, other = (_cut(part, count, front) for part, count, front in zip(parts, by_size, fronts, strict=True))
    return one, other, is_swapped


def _cut(part: TokenArray, most: int, front: float) -> TokenArray:
    """The tokens cut to a length, the share `front` of the excess at the front, the rest at the end."""
    num_cut = int(front * (max(len(part) - most, 0) + 1))
    return part[num_cut : num_cut + most]

"""Masked language modelling (BERT): whole words masked in short runs, and their replacements.

Under the samples of `bert_samples.py`. Words are gone through in a random order; at each a run of 1 to `max_ngram`
words is drawn, of n with chance in proportion to 1/n, and cut short where it would meet a hidden word, a special token
or more tokens than are left to mask. So no more is masked than `mask_prob`, and less only where every word that is
left is longer than what is missing. A run goes forward, so the first words of a text, which no run before them reaches,
are hidden less often than the others. Sources: Devlin et al. 2019, section 3.1; whole words and n-grams: Joshi et al.
2020, section 3.1, and Lan et al. 2020, section 4.1.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.packed_rows import IGNORE_INDEX
from lightning_megatron.data.packing import Numbers
from lightning_megatron.data.seeded_random import uniforms


@dataclass(frozen=True, kw_only=True)
class Masking:
    """Share of masked tokens, and their replacements."""

    vocab_size: int
    """Tokens of the vocabulary, from which random tokens are drawn."""
    mask_token: int
    special_tokens: tuple[int, ...]
    """Tokens that are never masked and never drawn as a random token; the mask token is one of them."""
    mask_prob: float = 0.15
    """Fraction of the tokens that are masked, special ones left out."""
    max_ngram: int = 3
    """Most words that are masked in a row."""
    mask_token_prob: float = 0.8
    """Fraction of the masked tokens that become the mask token."""
    random_token_prob: float = 0.1
    """Fraction of the masked tokens that become a random token; the rest stay as they are."""

    def __post_init__(self) -> None:
        faults = []
        if not 0 < self.mask_prob < 1:
            faults.append(f"mask_prob ({self.mask_prob}) must lie between 0 and 1, as 0.15 does")
        if self.max_ngram < 1:
            faults.append(f"max_ngram ({self.max_ngram}) must be at least 1 word")
        probs = (self.mask_token_prob, self.random_token_prob)
        if min(probs) < 0 or sum(probs) > 1 + 1e-12:
            faults.append(
                f"mask_token_prob ({probs[0]}) and random_token_prob ({probs[1]}) must be at least 0 and"
                " together at most 1"
            )
        outside = sorted(i for i in {self.mask_token, *self.special_tokens} if not 0 <= i < self.vocab_size)
        if outside:
            faults.append(f"special tokens {outside} must lie in the vocabulary, from 0 to {self.vocab_size - 1}")
        elif len(self.untouched) >= self.vocab_size:
            faults.append(f"vocab_size ({self.vocab_size}) must leave room for tokens that are not special")
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def untouched(self) -> Numbers:
        """The special tokens in order, the mask token among them."""
        return np.array(sorted({self.mask_token, *self.special_tokens}), dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Masked:
    """A sample's masked tokens and their labels."""

    tokens: Numbers
    labels: Numbers
    """The original token where one is masked, else -100."""


def mask_words(tokens: Numbers, starts_word: NDArray[np.bool_], masking: Masking, *, seed: int, sample: int) -> Masked:
    """The tokens with words masked: a function of (seed, sample, tokens) alone. `starts_word` is True where a token
    begins a word; all three arrays are [s]."""
    tokens = np.asarray(tokens, dtype=np.int64)
    is_ordinary = ~np.isin(tokens, masking.untouched)
    hidden = _hidden(is_ordinary, starts_word, masking, seed, sample)
    labels = np.where(hidden, tokens, IGNORE_INDEX)
    drawn = uniforms(2 * len(tokens), seed, "what stands for hidden tokens", sample)
    kind, which = drawn[: len(tokens)], drawn[len(tokens) :]
    others = _ordinary_token((which * (masking.vocab_size - len(masking.untouched))).astype(np.int64), masking)
    seen = np.where(kind < masking.mask_token_prob, masking.mask_token, tokens)
    is_random = (kind >= masking.mask_token_prob) & (kind < masking.mask_token_prob + masking.random_token_prob)
    return Masked(tokens=np.where(hidden, np.where(is_random, others, seen), tokens), labels=labels)


def _hidden(
    is_ordinary: NDArray[np.bool_], starts_word: NDArray[np.bool_], masking: Masking, seed: int, sample: int
) -> NDArray[np.bool_]:
    """Whether each token is masked: [s]."""
    hidden = np.zeros(len(is_ordinary), dtype=np.bool_)
    follows = np.concatenate([[False], is_ordinary[:-1]])
    # A word also begins after a special token, and at the very start.
    firsts = np.flatnonzero(is_ordinary & (starts_word | ~follows))
    if len(firsts) == 0:
        return hidden
    sizes = np.diff(np.cumsum(np.append(0, is_ordinary))[np.append(firsts, len(is_ordinary))]).tolist()
    goes_on = follows[firsts].tolist()
    num_left = max(1, round(masking.mask_prob * int(is_ordinary.sum())))
    drawn = uniforms(2 * len(firsts), seed, "hidden words", sample)
    chances = np.cumsum(1.0 / np.arange(1, masking.max_ngram + 1))
    runs = (np.searchsorted(chances, drawn[len(firsts) :] * chances[-1], side="right") + 1).tolist()
    is_hidden = [False] * len(firsts)
    for word in np.argsort(drawn[: len(firsts)], kind="stable").tolist():
        for other in range(word, min(word + runs[word], len(firsts))):
            is_apart = other > word and not goes_on[other]
            if is_hidden[other] or is_apart or sizes[other] > num_left:
                break
            is_hidden[other] = True
            num_left -= sizes[other]
            hidden[firsts[other] : firsts[other] + sizes[other]] = True
        if num_left == 0:
            break
    return hidden


def _ordinary_token(number: Numbers, masking: Masking) -> Numbers:
    """The `number`-th of the tokens that are not special."""
    token = number.copy()
    for special in masking.untouched:
        token += token >= special
    return token

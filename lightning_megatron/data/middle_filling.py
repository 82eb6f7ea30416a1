"""Fill-in-the-middle: documents reordered so that next-token prediction learns to fill a gap.

Under the samples of `gpt_samples.py`. A document is cut at two random positions, and reordered:

    prefix, suffix, middle    <prefix> first part <suffix> last part <middle> middle part
    suffix, prefix, middle    <prefix> <suffix> last part <middle> first part middle part

Source: Bavarian et al. 2022, section 3.
"""

import numpy as np

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.data.packing import Numbers
from lightning_megatron.data.seeded_random import uniforms


@config_dataclass
class FillInTheMiddle:
    """Fill-in-the-middle: how many documents are reordered, in which order, and by which tokens."""

    prefix_token: int
    """Id of the token before the prefix."""
    suffix_token: int
    """Id of the token before the suffix."""
    middle_token: int
    """Id of the token before the middle."""
    rate: float = 0.5
    """Fraction of the documents that are reordered."""
    suffix_first_rate: float = 0.5
    """Fraction of the reordered documents whose suffix comes first, then prefix and middle."""

    def __post_init__(self) -> None:
        faults = [
            f"{name} ({rate}) must be from 0 to 1"
            for name, rate in (("rate", self.rate), ("suffix_first_rate", self.suffix_first_rate))
            if not 0 <= rate <= 1
        ]
        if len({self.prefix_token, self.suffix_token, self.middle_token}) < 3:
            faults.append(
                f"prefix_token ({self.prefix_token}), suffix_token ({self.suffix_token}) and middle_token"
                f" ({self.middle_token}) must be three tokens"
            )
        if faults:
            raise ValueError("; ".join(faults))


def fill_in_the_middle(tokens: Numbers, fill: FillInTheMiddle, *, seed: int, sample: int, document: int = 0) -> Numbers:
    """One document's tokens as they are, or reordered with three tokens more.

    A function of the tokens and of (seed, sample, document), of which `document` is a number within the sample.
    """
    tokens = np.asarray(tokens, dtype=np.int64)
    is_put, suffix_first, one, other = uniforms(4, seed, "fill in the middle", sample, document).tolist()
    if is_put >= fill.rate or len(tokens) == 0:
        return tokens
    cuts = sorted(int(fraction * (len(tokens) + 1)) for fraction in (one, other))
    first, middle, last = np.split(tokens, cuts)
    prefix, suffix, gap = fill.prefix_token, fill.suffix_token, fill.middle_token
    if suffix_first < fill.suffix_first_rate:
        return np.concatenate([[prefix, suffix], last, [gap], first, middle])
    return np.concatenate([[prefix], first, [suffix], last, [gap], middle])


def fill_documents(tokens: Numbers, fill: FillInTheMiddle, end_of_text: int, *, seed: int, sample: int) -> Numbers:
    """A sample's tokens with each of its documents reordered: as many tokens, so the last are cut off.

    Documents end with `end_of_text`, which stays where a document ends; the first and last may be parts of one.
    """
    tokens = np.asarray(tokens, dtype=np.int64)
    ends = np.flatnonzero(tokens == end_of_text)
    # Each but the first starts with the end of text before it.
    first, *others = np.split(tokens, ends)
    put = [fill_in_the_middle(first, fill, seed=seed, sample=sample)]
    for number, part in enumerate(others, start=1):
        put += [part[:1], fill_in_the_middle(part[1:], fill, seed=seed, sample=sample, document=number)]
    return np.concatenate(put)[: len(tokens)]

"""Tokens with a role, and tokens that begin a word: what BERT's and T5's samples need of a tokenizer.

A role has another name in each family of tokenizers; the first known one counts.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.packing import Numbers
from lightning_megatron.data.tokenizer import Tokenizer

Role = Literal["class", "separator", "mask", "padding"]

NAMES: dict[Role, tuple[str, ...]] = {
    "class": ("[CLS]", "<cls>", "<s>"),
    "separator": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "padding": ("[PAD]", "<pad>"),
}
"""Names of the token of each role, tried in this order."""

SENTINEL = "<extra_id_{}>"
"""Names of T5's sentinels, from 0."""

_CONTINUES = "##"
"""Prefix of a piece that continues a word (WordPiece)."""

_SPACES = ("Ġ", "Ċ", "ĉ", "▁", " ", "\n", "\t")
"""Prefixes of a piece that starts a word: space, line feed and tab of byte-level ones, sentencepiece's, themselves."""


def special_tokens(tokenizer: Tokenizer, roles: Sequence[Role] = get_args(Role)) -> dict[Role, int]:
    """The ids of the roles. Raises ValueError that names all roles that the tokenizer has no token for."""
    found = {role: [i for name in NAMES[role] if (i := tokenizer.token_id(name)) is not None] for role in roles}
    if missing := [f"{role} ({' or '.join(NAMES[role])})" for role, ids in found.items() if not ids]:
        raise ValueError(
            f"the tokenizer has no token for {', '.join(missing)}; take one that has, or train one with special_tokens"
        )
    return {role: ids[0] for role, ids in found.items()}


def sentinels(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids of the sentinels, as far as they are numbered without a gap. Raises ValueError where there is none."""
    found: list[int] = []
    while (next_id := tokenizer.token_id(SENTINEL.format(len(found)))) is not None:
        found.append(next_id)
    if not found:
        raise ValueError(
            f"the tokenizer has no sentinels ({SENTINEL.format(0)} and on); take one of T5's kind, or train one with"
            " special_tokens"
        )
    return tuple(found)


class WordStarts:
    """Finds the tokens that begin a word by the pieces of the vocabulary; special tokens do.

    WordPiece marks the pieces that continue a word. The others mark spaces: with them a word begins after one, and
    where letters, digits and other signs meet, so that "f(x)" is four words.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = tokenizer.pieces()
        marks_rest = any(piece.startswith(_CONTINUES) and len(piece) > len(_CONTINUES) for piece in pieces.values())
        self._begins = np.ones(tokenizer.vocab_size, dtype=np.bool_)
        # Of the first and the last character of each token.
        self._kinds = np.zeros((2, tokenizer.vocab_size), dtype=np.int8)
        special = set(tokenizer.special_ids())
        for i, piece in pieces.items():
            if i in special or not piece:
                continue
            self._begins[i] = not piece.startswith(_CONTINUES) if marks_rest else piece.startswith(_SPACES)
            if not marks_rest:
                self._kinds[:, i] = _kind(piece[0]), _kind(piece[-1])
                if not piece.strip("".join(_SPACES)):
                    self._kinds[1, i] = _SPACE

    def __call__(self, ids: Numbers) -> NDArray[np.bool_]:
        """Whether each token begins a word: [tokens]. The first of a text always does."""
        starts: NDArray[np.bool_] = self._begins[ids]
        if len(starts):
            starts[0] = True
            before = self._kinds[1, ids[:-1]]
            starts[1:] |= (self._kinds[0, ids[1:]] != before) & (before != _SPACE)
        return starts


_SPACE = 3
"""The kind of a token that is nothing but spaces: the word that it begins goes on, whatever comes."""


def _kind(character: str) -> int:
    """Letter, digit or another sign; a byte of a character that is not ASCII counts as a letter."""
    if character.isdigit() and character.isascii():
        return 1
    return 2 if character.isascii() and not character.isalpha() else 0

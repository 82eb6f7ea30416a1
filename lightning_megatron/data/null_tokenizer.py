"""A tokenizer for texts that are numbers already: tests and timings need no vocabulary.

"12 7 9" is the tokens 12, 7 and 9; as in Megatron, there are N numbers and one token more, the end of text.
"""

from collections.abc import Iterable, Sequence

from lightning_megatron.data.tokenizer import END_OF_TEXT, Tokenizer


class NullTokenizer(Tokenizer):
    """Numbers below `num_tokens` as they are written; the end of text is `num_tokens` itself."""

    def __init__(self, num_tokens: int) -> None:
        if num_tokens < 1:
            raise ValueError(f"a null tokenizer of {num_tokens} tokens: give it at least 1, as in null:50000")
        self.end_of_text = num_tokens
        self.vocab_size = num_tokens + 1

    @property
    def fingerprint(self) -> str:
        return f"null-{self.end_of_text}"

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._numbers(text) for text in texts]

    def _numbers(self, text: str) -> list[int]:
        words = text.split()
        for index, word in enumerate(words):
            if not (word.isascii() and word.isdigit() and int(word) < self.end_of_text):
                raise ValueError(
                    f"word {index} ({word[:40]!r}) must be a number from 0 to {self.end_of_text - 1} for a null"
                    " tokenizer; give text of numbers, or another tokenizer"
                )
        return [int(word) for word in words]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(END_OF_TEXT if i == self.end_of_text else str(i) for i in ids)

    def pieces(self) -> dict[int, str]:
        return {i: str(i) for i in range(self.end_of_text)} | {self.end_of_text: END_OF_TEXT}

    def special_ids(self) -> list[int]:
        return [self.end_of_text]

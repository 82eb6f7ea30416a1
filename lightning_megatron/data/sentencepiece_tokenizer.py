"""Tokenizers of sentencepiece, from the `.model` file they come in: the one door to `sentencepiece`.

Beside `tokenizer.py`.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_megatron.data.optional_packages import optional_package
from lightning_megatron.data.tokenizer import Tokenizer, known_end_of_text, named_end_of_text


class SentencePieceTokenizer(Tokenizer):
    """The tokenizer of a model; its end of text is the model's own, `</s>` mostly, unless it is named."""

    def __init__(self, file: str | Path, end_of_text: str | None = None) -> None:
        sentencepiece = optional_package("sentencepiece", "a tokenizer of this kind")
        try:
            self._engine: Any = sentencepiece.SentencePieceProcessor(model_file=str(file))
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"tokenizer ({str(file)!r}) is not a model of sentencepiece: {error}; give its .model"
            ) from error
        self.vocab_size = int(self._engine.get_piece_size())
        ids = {piece: i for i, piece in self.pieces().items()}
        if end_of_text is None:
            own = int(self._engine.eos_id())
            end_of_text = self._engine.id_to_piece(own) if own >= 0 else known_end_of_text(ids, str(file))
        self.end_of_text = named_end_of_text(end_of_text, ids)

    @property
    def fingerprint(self) -> str:
        text = f"sentencepiece {self.end_of_text} ".encode() + self._engine.serialized_model_proto()
        return hashlib.sha256(text).hexdigest()[:16]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        # One thread: with several, the package starts as many for each call.
        ids: list[list[int]] = self._engine.encode(list(texts), out_type=int, num_threads=1)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        special = set(self.special_ids())
        parts: list[str] = []
        run: list[int] = []
        for i in (*map(int, ids), None):
            if i is not None and i not in special:
                run.append(i)
                continue
            parts += [self._engine.decode(run)] if run else []
            parts += [] if i is None else [self._engine.id_to_piece(i)]
            run = []
        return "".join(parts)

    def token_id(self, name: str) -> int | None:
        # An unknown piece has the id of the unknown token.
        found = int(self._engine.piece_to_id(name))
        return found if 0 <= found < self.vocab_size and self._engine.id_to_piece(found) == name else None

    def pieces(self) -> dict[int, str]:
        return {i: self._engine.id_to_piece(i) for i in range(self.vocab_size)}

    def special_ids(self) -> list[int]:
        return [i for i in range(self.vocab_size) if self._engine.is_control(i) or self._engine.is_unknown(i)]

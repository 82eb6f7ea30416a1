"""Documents as one long row of tokens, cut into samples of one length.

Third on the path from text to batches. Each document is followed by the end of text; sample i of length s covers
the tokens [i*s, i*s + s + 1). Neighbours share one token: the last target of one is the first input of the next, so
every token but the first is a target once, and N samples need N*s + 1 tokens. What is left at the end is no sample.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron.data.atomic_file import written_whole
from lightning_megatron.data.sources import corpus_fingerprint
from lightning_megatron.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lightning_megatron.data.sources import Documents

Tokens = NDArray[np.integer[Any]]


class TokenBlocks:
    """Blocks of `sequence_length` + 1 tokens, each starting at the last token of the one before."""

    def __init__(self, tokens: Tokens, sequence_length: int) -> None:
        if sequence_length < 1:
            raise ValueError(f"sequence_length ({sequence_length}) must be at least 1")
        if len(tokens) < sequence_length + 1:
            raise ValueError(
                f"{len(tokens)} tokens are too few for one sample of sequence_length ({sequence_length}), which takes"
                f" {sequence_length + 1}; give more text, or a sequence_length of at most {max(len(tokens) - 1, 0)}"
            )
        self.tokens = tokens
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.sequence_length

    def __getitem__(self, index: int) -> Tokens:
        """Tokens of block `index`: [s + 1], s the sequence length."""
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start = index * self.sequence_length
        return self.tokens[start : start + self.sequence_length + 1]


class PackedTokens(Dataset[dict[str, Tensor]]):
    """Samples for next-token prediction from a file that `prepare_tokens` wrote.

    All processes of a machine map the same file, and a copy sent to a loader's worker carries the path alone.
    """

    def __init__(self, path: str | Path, sequence_length: int) -> None:
        self.path = Path(path)
        self.blocks = TokenBlocks(mapped_tokens(self.path), sequence_length)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`tokens` [s], `labels` [s] (that of position t is the token after it) and `loss_mask` [s], all ones."""
        block = self.blocks[index]
        # Two copies: a label that is changed in place must not change the token of the next position.
        tokens = torch.from_numpy(block[:-1].astype(np.int64))
        labels = torch.from_numpy(block[1:].astype(np.int64))
        return {"tokens": tokens, "labels": labels, "loss_mask": torch.ones(len(tokens))}

    def __reduce__(self) -> tuple[type["PackedTokens"], tuple[Path, int]]:
        # A memory-mapped array pickles as all of its tokens.
        return PackedTokens, (self.path, self.blocks.sequence_length)


def pack_documents(token_ids: Iterable[Sequence[int]], sequence_length: int, end_of_text: int) -> TokenBlocks:
    """Blocks in memory of the documents' tokens, each document followed by the end of text."""
    row = array("i")
    for ids in token_ids:
        row.extend(ids)
        row.append(end_of_text)
    return TokenBlocks(np.array(row, dtype=np.int32), sequence_length)


def prepare_tokens(documents: "Documents", tokenizer: Tokenizer, directory: str | Path, batch_size: int = 1000) -> Path:
    """The `.npy` file in `directory` that holds the documents' tokens as one row, written unless it is there.

    Its name says corpus and tokenizer, so other text or another tokenizer makes another file. Empty documents are left
    out. One process calls this first and the others after it; several at once do the work twice and do no harm.
    """
    key = hashlib.sha256(f"{corpus_fingerprint(documents)} {tokenizer.fingerprint}".encode()).hexdigest()[:16]
    path = Path(directory) / f"tokens-{key}.npy"
    if path.is_file():
        return path
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32)
    with written_whole(path) as temporary, temporary.open("wb") as file:
        # `numpy` leaves room in a header for the first dim to grow, so the count can be put in at the end.
        _write_header(file, dtype, num_tokens=0)
        start = file.tell()
        num_tokens = 0
        for batch in documents.iter(batch_size=batch_size):
            texts = [text for text in batch["text"] if text]
            for ids in tokenizer.encode(texts):
                np.array([*ids, tokenizer.end_of_text], dtype=dtype).tofile(file)
                num_tokens += len(ids) + 1
        file.seek(0)
        _write_header(file, dtype, num_tokens)
        assert file.tell() == start, "the header of the token file outgrew its room"
    return path


def _write_header(file: BinaryIO, dtype: np.dtype[Any], num_tokens: int) -> None:
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (num_tokens,)}
    np.lib.format.write_array_header_1_0(file, description)


def mapped_tokens(path: Path) -> Tokens:
    """The tokens of a file, mapped into memory."""
    if not path.is_file():
        raise ValueError(f"token file ({str(path)!r}) does not exist; prepare_tokens writes it and says its path")
    tokens: Tokens = np.load(path, mmap_mode="r")
    return tokens

"""Sources of text, one or several by weight, and the split of their documents.

Between the options of a data module of text and its samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.data import MegatronCorpus, load_documents
from lightning_megatron.data.blend import Blend
from lightning_megatron.data.megatron_files import is_megatron_prefix
from lightning_megatron.data.sources import files_of


@config_dataclass
class BlendSource:
    """One source of a blend."""

    weight: float
    """Share of the samples, in proportion to the weights of the other sources."""
    path: str | None = None
    """File, directory or glob pattern of the text, or the prefix of Megatron's .bin and .idx files."""
    dataset: str | None = None
    """Name of a data set that `datasets` loads, or the directory of a local one, in place of path."""
    text_column: str = "text"
    """Column of tables that holds the text."""

    @property
    def has_tokens(self) -> bool:
        """Whether the source is token files."""
        return self.path is not None and is_megatron_prefix(self.path)

    def faults(self) -> list[str]:
        """One sentence for each thing that keeps it from being read, as far as it shows without reading text."""
        faults = []
        if self.path is not None and self.dataset is not None:
            faults.append(f"path ({self.path!r}) and dataset ({self.dataset!r}) are both given; one source is read")
        try:
            if self.has_tokens:
                MegatronCorpus(str(self.path))
            elif self.path is not None:
                _refuse_ending(Path(self.path))
                files_of(self.path)
        except ValueError as error:
            faults.append(str(error))
        return faults

    def read(self, cache: Path | None) -> "ReadSource":
        """The documents of the source. Raises ValueError where there is none."""
        if self.has_tokens:
            corpus = MegatronCorpus(str(self.path))
            if corpus.num_documents == 0:
                raise ValueError(f"token files ({self.path}) hold no document")
            return ReadSource(corpus=corpus, num_documents=corpus.num_documents)
        # A named dataset may lie in the cache of `datasets` already.
        documents = load_documents(
            path=self.path,
            dataset=self.dataset,
            text_column=self.text_column,
            cache_dir=cache if self.dataset is None else None,
        )
        return ReadSource(documents=documents, num_documents=len(documents))

    def __str__(self) -> str:
        return self.path or self.dataset or "the standard library"


@dataclass(frozen=True, kw_only=True)
class ReadSource:
    """The documents of a source: text, or a corpus of tokens."""

    num_documents: int
    documents: Any = None
    corpus: MegatronCorpus | None = None

    def token_faults(self, vocab_size: int, cache: Path) -> list[str]:
        """The fault of tokens that a model of `vocab_size` does not know."""
        if self.corpus is None:
            return []
        smallest, largest = self.corpus.token_bounds(cache)
        if smallest >= 0 and largest < vocab_size:
            return []
        return [
            f"token files ({self.corpus.prefix}) hold tokens from {smallest} to {largest}, and those of a model of"
            f" vocab_size ({vocab_size}) are from 0 to {vocab_size - 1}; set it to {largest + 1} or more, or give files"
            " of the model's own tokenizer"
        ]


def blend_faults(blend: Sequence[BlendSource]) -> list[str]:
    """One sentence for each thing that is wrong with a blend's sources or weights."""
    if not blend:
        return ["blend has no source; give at least one, or path or dataset in its place"]
    faults = []
    for number, source in enumerate(blend):
        own = source.faults()
        if source.path is None and source.dataset is None:
            own.append("neither path nor dataset is given")
        faults += [f"source {number} of the blend: {fault}" for fault in own]
    try:
        Blend([source.weight for source in blend])
    except ValueError as error:
        faults.append(str(error))
    return faults


def split_faults(split: str) -> list[str]:
    """The fault of a split of documents, which is written as Megatron writes it: '969,30,1'."""
    try:
        weights = [float(part) for part in split.split(",")]
        Blend(weights)
    except ValueError:
        weights = []
    if len(weights) == 3 and weights[0] > 0:
        return []
    return [
        f"document_split ({split!r}) must be three numbers, for training, validation and test, of which the first is"
        " above 0 and none below; '969,30,1' is a common one"
    ]


def split_bounds(split: str, num_documents: int) -> list[int]:
    """Ends of the documents for training, validation and test, which follow each other in this order."""
    weights = [float(part) for part in split.split(",")]
    # Rounded as Megatron rounds, so that the same documents are for the same.
    return [round(part / sum(weights) * num_documents) for part in accumulate(weights)]


def _refuse_ending(path: Path) -> None:
    if path.suffix in (".bin", ".idx") and is_megatron_prefix(path.with_suffix("")):
        raise ValueError(
            f"path ({str(path)!r}) is one of two token files; give their prefix, {str(path.with_suffix(''))!r}"
        )

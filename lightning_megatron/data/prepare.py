"""Preparation of a corpus: documents of text become token files that samples are cut from.

Between sources and tokenizer on one side and samples on the other. What is written are Megatron's `.bin` and `.idx`,
to the byte as Megatron's own tool writes them: a document is one sequence, or one for each sentence, and its end of
text. Documents are cut into shards, which processes tokenize side by side into a folder beside the output; shards that
are whole are kept whatever happens, and put together in order at the end. So who is killed goes on where he was, and
the bytes do not depend on how many took part.
"""

import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lightning_megatron.data.corpus_shards import (
    Counts,
    DocumentForm,
    ShardWriter,
    counts_path,
    placed,
    read_counts,
    write_counts,
)
from lightning_megatron.data.document_files import MAX_DOCUMENT_BYTES, BadDocuments
from lightning_megatron.data.megatron_files import MegatronCorpus, megatron_paths, megatron_writer
from lightning_megatron.data.processes import Tell, run_jobs
from lightning_megatron.data.sources import corpus_bytes, corpus_fingerprint, save_token_rows
from lightning_megatron.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lightning_megatron.data.sources import Documents

logger = logging.getLogger(__name__)

TokenFormat = Literal["megatron", "arrow"]
"""Token files, or a directory that `datasets.load_from_disk` reads."""

SHARD_BYTES = 1 << 22
"""Bytes of text in a shard, about; more where there would be too many shards."""

_MAX_SHARDS = 4096

_SHARDS_FORM = 2
"""Version of the folder of shards: one of another version is not resumed."""

_BYTES_FOR_PROCESSES = 1 << 26
"""Bytes of a corpus from which on worker processes are worth their start."""


def prepare_corpus(
    documents: "Documents",
    tokenizer: Tokenizer,
    directory: str | Path,
    *,
    has_ends: bool = True,
    sentences: bool = False,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    bad_documents: BadDocuments = "skip",
) -> Path:
    """The prefix in `directory` of the documents' token files, written unless they are there.

    Its name says corpus, tokenizer and form, so other text makes other files. Each document is followed by the end of
    text, unless `has_ends` is false, and is one sequence, or with `sentences` one for each of them. One process calls
    this first and the others after it; of several at once one works and the others wait. A large corpus is tokenized
    by as many processes as there are cores. `DocumentForm` says which documents are bad; `left_out` tells of them
    whenever the files are used.
    """
    form = DocumentForm(
        has_ends=has_ends, sentences=sentences, max_document_bytes=max_document_bytes, bad_documents=bad_documents
    )
    prefix = Path(directory) / f"tokens-{_key(documents, tokenizer, form)}"
    if not all(path.is_file() for path in megatron_paths(prefix)):
        cores = len(os.sched_getaffinity(0))
        workers = cores if corpus_bytes(documents) >= _BYTES_FOR_PROCESSES else 0
        keep = partial(write_counts, prefix)
        counts = write_tokens(documents, tokenizer, prefix, form=form, num_workers=workers, finish=keep)
        if told := counts.left_out():
            logger.log(logging.WARNING if counts.num_bad else logging.INFO, "%s: %s", prefix, told)
    return prefix


def left_out(prefix: Path) -> str:
    """One line about documents without tokens in files of `prepare_corpus`; empty where there are none."""
    return read_counts(prefix).left_out() if counts_path(prefix).is_file() else ""


def write_tokens(
    documents: "Documents",
    tokenizer: Tokenizer,
    prefix: str | Path,
    *,
    form: DocumentForm,
    token_format: TokenFormat = "megatron",
    num_workers: int = 0,
    shard_bytes: int = SHARD_BYTES,
    watch: Callable[[Counts], None] = lambda counts: None,
    finish: Callable[[Counts], None] = lambda counts: None,
) -> Counts:
    """Writes the documents' tokens at `prefix` and returns their counts.

    With 0 workers this process tokenizes, with as many threads as the tokenizer has. `watch` is called now and then
    with what is done, earlier runs included, and `finish` with all of it, before the files are in their place. What
    this or an earlier run has finished is kept when anything ends this one, in a folder beside `prefix`. Raises
    ValueError for bad documents that are to be refused, and where none has a token.
    """
    prefix = Path(prefix)
    num_shards = max(1, min(len(documents), _MAX_SHARDS, corpus_bytes(documents) // shard_bytes))
    folder = Path(f"{prefix}.shards-{_key(documents, tokenizer, form)}-{num_shards}-{_SHARDS_FORM}")
    bounds = [shard * len(documents) // num_shards for shard in range(num_shards + 1)]
    shards = [folder / f"{shard:04d}" for shard in range(num_shards)]
    writer = ShardWriter(documents, tokenizer, form)
    with _held(folder):
        total = Counts()
        if not _is_there(prefix, token_format):
            _write_shards(writer, shards, bounds, num_workers, watch)
            for shard in shards:
                total.add(read_counts(shard))
            total.bad = placed(total.bad, documents)
            if total.num_tokens == 0:
                shutil.rmtree(folder)
                raise ValueError(_no_token(total))
            finish(total)
            _concatenate(shards, folder / "whole", prefix, writer, token_format)
        # Out of the way at once: half of a folder would look like work that is left.
        finished = Path(f"{folder}.done")
        shutil.rmtree(finished, ignore_errors=True)
        folder.rename(finished)
        shutil.rmtree(finished)
    return total


def _write_shards(
    writer: ShardWriter,
    shards: Sequence[Path],
    bounds: Sequence[int],
    num_workers: int,
    watch: Callable[[Counts], None],
) -> None:
    """Writes the shards that are not there yet."""
    missing = [number for number, shard in enumerate(shards) if not counts_path(shard).is_file()]
    kept = Counts()
    for shard in shards:
        if counts_path(shard).is_file():
            kept.add(read_counts(shard))

    def write(number: int, tell: Tell) -> None:
        writer.write(shards[number], bounds[number], bounds[number + 1], lambda counts: tell(counts.numbers()))

    def watch_all(added: Sequence[int]) -> None:
        watch(Counts.of_numbers([a + b for a, b in zip(kept.numbers(), added, strict=True)]))

    num_processes = min(num_workers, len(missing))
    run_jobs(missing, write, num_processes=num_processes, num_sums=len(kept.numbers()), watch=watch_all)


def _no_token(counts: Counts) -> str:
    named = f": {'; '.join(map(str, counts.bad))}" if counts.bad else ""
    return (
        f"none of the {counts.num_documents} documents has a token: {counts.num_empty} are empty, and"
        f" {counts.num_bad} are bad{named}; give text, and a tokenizer for it"
    )


def _concatenate(
    shards: Sequence[Path], whole: Path, prefix: Path, writer: ShardWriter, token_format: TokenFormat
) -> None:
    """Concatenates the shards at `prefix`. All is written beside them first, so that an interrupted run can go on."""
    if token_format == "arrow":
        shutil.rmtree(whole, ignore_errors=True)
        corpora = (MegatronCorpus(shard) for shard in shards)
        save_token_rows(((corpus.document_sizes(), corpus.tokens) for corpus in corpora), whole)
        whole.rename(prefix)
        return
    with megatron_writer(whole, writer.dtype) as megatron:
        for shard in shards:
            megatron.append(shard)
    # The .bin comes first into its place: where there is a new .idx, there is its .bin.
    for made, place in zip(megatron_paths(whole), megatron_paths(prefix), strict=True):
        made.replace(place)


def _is_there(prefix: Path, token_format: TokenFormat) -> bool:
    return prefix.is_dir() if token_format == "arrow" else all(path.is_file() for path in megatron_paths(prefix))


def _key(documents: "Documents", tokenizer: Tokenizer, form: DocumentForm) -> str:
    """Hash of everything that the tokens depend on."""
    text = f"{corpus_fingerprint(documents)} {tokenizer.fingerprint} {form}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Locks the folder, made unless it is there, for this process; waits while another process holds it."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            # Who was waited for may have taken the folder away.
            if folder.is_dir() and os.path.samestat(os.fstat(held), folder.stat()):
                _sweep(folder)
                try:
                    yield
                finally:
                    _sweep(folder)
                    with suppress(OSError):
                        # Where nothing is whole, nothing is kept.
                        folder.rmdir()
                return
        finally:
            os.close(held)


def _sweep(folder: Path) -> None:
    """Removes temporary files of processes that were killed."""
    for begun in folder.glob(".*.tmp"):
        begun.unlink()

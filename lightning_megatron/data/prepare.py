"""Preparation of a corpus: documents of text become token files that samples are cut from.

Between sources and tokenizer on one side and samples on the other. The output is Megatron's `.bin` and `.idx`, to the
byte as Megatron's own tool writes them: a document is one sequence, or one for each sentence, and its end of text.
Documents are cut into shards, which processes tokenize in parallel into a folder next to the output; complete shards
survive an interruption, and are concatenated in order at the end. So a run that was killed resumes, and the bytes do
not depend on the number of processes.
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
from lightning_megatron.data.processes import Report, run_jobs
from lightning_megatron.data.sources import corpus_bytes, corpus_fingerprint, save_token_rows
from lightning_megatron.data.tokenizer import Tokenizer
from lightning_megatron.progress import progress_bar

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

    Its name is a hash of corpus, tokenizer and form, so other text makes other files. Each document is followed by the
    end of text, unless `has_ends` is false, and is one sequence, or with `sentences` one for each of them. One process
    calls this first and the others after it; of several at once one works and the others wait. A large corpus is
    tokenized by as many processes as there are cores. `DocumentForm` defines which documents are bad; `left_out`
    describes them whenever the files are used.
    """
    form = DocumentForm(
        has_ends=has_ends, sentences=sentences, max_document_bytes=max_document_bytes, bad_documents=bad_documents
    )
    prefix = Path(directory) / f"tokens-{_key(documents, tokenizer, form)}"
    if not all(path.is_file() for path in megatron_paths(prefix)):
        cores = len(os.sched_getaffinity(0))
        workers = cores if corpus_bytes(documents) >= _BYTES_FOR_PROCESSES else 0
        keep = partial(write_counts, prefix)
        with progress_bar("tokenizing", "documents") as watch:
            counts = write_tokens(
                documents,
                tokenizer,
                prefix,
                form=form,
                num_workers=workers,
                watch=lambda counts: watch(counts.num_documents, len(documents)),
                finish=keep,
            )
        if line := counts.left_out():
            logger.log(logging.WARNING if counts.num_bad else logging.INFO, "%s: %s", prefix, line)
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
    with the counts so far, earlier runs included, and `finish` with all of them, before the files are renamed to
    `prefix`. Shards that this or an earlier run has finished stay in a folder next to `prefix` if this one is
    interrupted. Raises ValueError for bad documents that are to be refused, and where none has a token.
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
        # Renamed at once: half of a folder would look like work that is left.
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
    finished_counts = Counts()
    for shard in shards:
        if counts_path(shard).is_file():
            finished_counts.add(read_counts(shard))

    def write(number: int, report: Report) -> None:
        writer.write(shards[number], bounds[number], bounds[number + 1], lambda counts: report(counts.numbers()))

    def watch_all(added: Sequence[int]) -> None:
        watch(Counts.of_numbers([a + b for a, b in zip(finished_counts.numbers(), added, strict=True)]))

    num_processes = min(num_workers, len(missing))
    run_jobs(missing, write, num_processes=num_processes, num_sums=len(finished_counts.numbers()), watch=watch_all)


def _no_token(counts: Counts) -> str:
    named = f": {'; '.join(map(str, counts.bad))}" if counts.bad else ""
    return (
        f"none of the {counts.num_documents} documents has a token: {counts.num_empty} are empty, and"
        f" {counts.num_bad} are bad{named}; give text, and a tokenizer for it"
    )


def _concatenate(
    shards: Sequence[Path], joined: Path, prefix: Path, writer: ShardWriter, token_format: TokenFormat
) -> None:
    """Concatenates the shards at `prefix`. All is written next to them first, so that an interrupted run can resume."""
    if token_format == "arrow":
        shutil.rmtree(joined, ignore_errors=True)
        corpora = (MegatronCorpus(shard) for shard in shards)
        save_token_rows(((corpus.document_sizes(), corpus.tokens) for corpus in corpora), joined)
        joined.rename(prefix)
        return
    with megatron_writer(joined, writer.dtype) as megatron:
        for shard in shards:
            megatron.append(shard)
    # The .bin is renamed first: where there is a new .idx, there is its .bin.
    for made, target in zip(megatron_paths(joined), megatron_paths(prefix), strict=True):
        made.replace(target)


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
            # The process that was waited for may have removed the folder.
            if folder.is_dir() and os.path.samestat(os.fstat(held), folder.stat()):
                _sweep(folder)
                try:
                    yield
                finally:
                    _sweep(folder)
                    with suppress(OSError):
                        # Without a complete shard there is nothing to resume from.
                        folder.rmdir()
                return
        finally:
            os.close(held)


def _sweep(folder: Path) -> None:
    """Removes temporary files of processes that were killed."""
    for begun in folder.glob(".*.tmp"):
        begun.unlink()

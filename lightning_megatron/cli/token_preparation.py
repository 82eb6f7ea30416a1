"""What `lightning-megatron prepare-data` does: tokenizes text into files for training.

The work is `data.prepare`'s; here are the errors, the progress and the messages.
"""

import argparse
import errno
import glob
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lightning_megatron.cli.target import require_writable
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.data import Tokenizer, load_documents, load_tokenizer, train_tokenizer
from lightning_megatron.data.corpus_shards import Counts, DocumentForm, usable_texts
from lightning_megatron.data.megatron_files import megatron_paths, token_dtype
from lightning_megatron.data.prepare import write_tokens
from lightning_megatron.data.sources import files_of, has_columns
from lightning_megatron.data.tokenizer import SMALLEST_VOCABULARY
from lightning_megatron.rules.limits import MOST_PROCESSES, limit_faults

# Between two lines of progress where stderr is no terminal.
_QUIET_SECONDS = 30.0
# Memory for so many tokens is taken before any is learnt.
_MOST_TRAINED = 10_000_000
# Exit code of a command that Ctrl-C ends.
_INTERRUPTED = 130


def run_prepare_data(options: argparse.Namespace) -> int:
    """Writes the files, and prints a summary. Raises UsageError with all errors."""
    workers = options.workers or len(os.sched_getaffinity(0))
    with _usage_errors():
        faults, tokenizer = _faults(options)
        if faults:
            raise UsageError(faults)
        outputs = _outputs(options)
        require_writable(options.output.parent, f"--output ({options.output})")
        records: list[dict[str, Any]] = []
        # All columns are checked before any is written.
        columns = _columns(list(outputs), options)
        for column, documents in columns.items():
            prefix = outputs[column]
            form = DocumentForm(
                has_ends=not options.no_append_eod,
                sentences=options.split_sentences,
                max_document_bytes=options.max_document_bytes,
                bad_documents=options.bad_documents,
            )
            try:
                with _removing_unused_tokenizer(options):
                    if tokenizer is None:
                        tokenizer = _trained(documents, options)
                    started_seconds = time.monotonic()
                    with _progress(column, len(documents)) as watch:
                        counts = write_tokens(
                            documents,
                            tokenizer,
                            prefix,
                            form=form,
                            token_format=options.format,
                            num_workers=workers,
                            watch=watch,
                        )
            except KeyboardInterrupt:
                print("stopped; the same command goes on with what is finished", file=sys.stderr)
                return _INTERRUPTED
            seconds = time.monotonic() - started_seconds
            record = asdict(counts) | {"bad": [str(one) for one in counts.bad]}
            records.append({"column": column, "output": str(prefix), "seconds": seconds, **record})
            if not options.json:
                print(_report(prefix, options.format, tokenizer, counts, seconds))
    if options.json:
        print(json.dumps(records))
    return 0


def _faults(options: argparse.Namespace) -> tuple[list[str], Tokenizer | None]:
    """Errors that show before any text is read, and the tokenizer that was given."""
    faults: list[str] = []
    tokenizer, files = None, list[Path]()
    if (options.tokenizer is None) == (options.train_vocab_size is None):
        faults.append("one of --tokenizer and --train-vocab-size must be given, and not both")
    smallest = SMALLEST_VOCABULARY + len(options.special_tokens)
    if options.train_vocab_size is not None and options.train_vocab_size < smallest:
        faults.append(
            f"--train-vocab-size ({options.train_vocab_size}) must be at least {smallest}: the 256 bytes, the end of"
            " text and the special tokens"
        )
    faults += limit_faults({"--train-vocab-size": options.train_vocab_size}, _MOST_TRAINED)
    if options.train_vocab_size is not None and options.end_of_text is not None:
        faults.append("--end-of-text acts on --tokenizer alone; leave it out")
    if options.special_tokens and options.train_vocab_size is None:
        faults.append("--special-tokens acts on --train-vocab-size alone; leave it out")
    if options.tokenizer is not None:
        try:
            tokenizer = load_tokenizer(options.tokenizer, options.end_of_text)
        except ValueError as error:
            faults.append(str(error))
    if options.path is not None and options.dataset is not None:
        faults.append(f"--path ({options.path}) and --dataset ({options.dataset}) are both given; one source is read")
    elif options.path is not None:
        try:
            files = files_of(options.path)
        except ValueError as error:
            faults.append(str(error))
    for name, least in (("workers", 0), ("max_document_bytes", 1)):
        if (value := getattr(options, name)) < least:
            faults.append(f"--{name.replace('_', '-')} ({value}) must be at least {least}")
    faults += limit_faults({"--workers": options.workers}, MOST_PROCESSES)
    if options.output.name in ("", ".."):
        faults.append(f"--output ({options.output}) is a folder; name the files in it, as in {options.output}/corpus")
    if options.format == "arrow" and options.split_sentences:
        faults.append("--split-sentences is for --format megatron, whose files tell sentences apart; leave one out")
    is_of_texts = files and not has_columns(files) if options.path is not None else options.dataset is None
    if is_of_texts and options.text_column != ["text"]:
        where = f"--path ({options.path})" if options.path is not None else "the standard library"
        faults.append(
            f"--text-column ({' '.join(options.text_column)}) names columns of tables, and {where} leads to files of "
            "text, each of which is one document; leave it out"
        )
    if len(set(options.text_column)) < len(options.text_column):
        faults.append(f"--text-column ({' '.join(options.text_column)}) names a column twice")
    if len(set(options.special_tokens)) < len(options.special_tokens):
        faults.append(f"--special-tokens ({' '.join(options.special_tokens)}) names a token twice")
    outputs = _outputs(options).values()
    for prefix in outputs:
        faults += _faults_of_output(prefix, options.format)
    if options.train_vocab_size is not None and not any(map(_is_begun, outputs)):
        faults += _taken([_trained_path(options)])
    return faults, tokenizer


def _columns(names: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """The documents of each column. Raises UsageError with all columns that cannot be read."""
    found: dict[str, Any] = {}
    faults: list[str] = []
    for name in names:
        try:
            found[name] = load_documents(
                path=options.path,
                dataset=options.dataset,
                split=options.split,
                text_column=name,
                cache_dir=options.cache_directory,
            )
        except ValueError as error:
            faults.append(" ".join(str(error).split()))
    if faults:
        raise UsageError(faults)
    return found


def _outputs(options: argparse.Namespace) -> dict[str, Path]:
    """The prefix of each column."""
    if len(options.text_column) == 1:
        return {options.text_column[0]: options.output}
    return {column: Path(f"{options.output}_{column}") for column in options.text_column}


def _faults_of_output(prefix: Path, token_format: str) -> list[str]:
    if prefix.suffix in (".bin", ".idx"):
        return [f"--output ({prefix}) is the path without its ending: {prefix.with_suffix('')}"]
    if token_format == "arrow":
        return _taken([prefix])
    bin_path, idx_path = megatron_paths(prefix)
    # The .idx comes last: a .bin alone is of a run that was ended, if its shards are there.
    if _is_begun(prefix) and not idx_path.exists():
        return []
    return _taken([bin_path, idx_path])


def _taken(paths: Sequence[Path]) -> list[str]:
    found = [path for path in paths if path.exists()]
    there = " and ".join(map(str, found))
    return (
        [f"--output: {there} {'exists' if len(found) == 1 else 'exist'}; remove it, or name another"] if found else []
    )


def _is_begun(prefix: Path) -> bool:
    """Whether there are shards of an interrupted run next to the prefix."""
    return any(prefix.parent.glob(f"{glob.escape(prefix.name)}.shards-*"))


@contextmanager
def _removing_unused_tokenizer(options: argparse.Namespace) -> Iterator[None]:
    """Removes the tokenizer that this run trained where an error ends it, unless there are tokens made with it."""
    path = _trained_path(options)
    is_ours = options.train_vocab_size is not None and not path.exists()
    try:
        yield
    except BaseException:
        if is_ours and not any(map(_is_begun, _outputs(options).values())):
            path.unlink(missing_ok=True)
        raise


def _trained(documents: Any, options: argparse.Namespace) -> Tokenizer:
    path = _trained_path(options)
    print(f"training a tokenizer of {options.train_vocab_size} tokens: {path}", file=sys.stderr)
    texts = usable_texts(documents, options.max_document_bytes)
    return train_tokenizer(texts, options.train_vocab_size, path, options.special_tokens)


def _trained_path(options: argparse.Namespace) -> Path:
    return Path(f"{options.output}.tokenizer.json")


@contextmanager
def _progress(column: str, num_documents: int) -> Iterator[Callable[[Counts], None]]:
    """A bar on stderr, or a line of it now and then in a file; yields the function to be called with the counts."""
    started_seconds = time.monotonic()
    first: list[Counts] = []
    interval = 0.5 if sys.stderr.isatty() else _QUIET_SECONDS
    with tqdm(total=num_documents, desc=column, unit=" documents", mininterval=interval, file=sys.stderr) as bar:

        def watch(counts: Counts) -> None:
            if not first:
                # Counts of an earlier run are not progress of this one.
                first.append(counts)
                bar.initial = bar.n = counts.num_documents
            seconds = max(time.monotonic() - started_seconds, 1e-9)
            num_bytes, num_tokens = counts.num_bytes - first[0].num_bytes, counts.num_tokens - first[0].num_tokens
            bar.set_postfix_str(f"{num_bytes / seconds / 1e6:.1f} MB/s, {num_tokens / seconds:,.0f} tokens/s", False)
            bar.update(counts.num_documents - bar.n)

        yield watch


def _report(prefix: Path, token_format: str, tokenizer: Tokenizer, counts: Counts, seconds: float) -> str:
    where = prefix if token_format == "arrow" else " and ".join(map(str, megatron_paths(prefix)))
    lines = [
        f"{where}: {counts.num_documents:,} documents, {counts.num_tokens:,} tokens of"
        f" {token_dtype(tokenizer.vocab_size)}, from {counts.num_bytes / 1e6:.1f} MB of text in {seconds:.1f} s"
    ]
    if left_out := counts.left_out():
        lines.append(left_out)
    return "\n".join(lines)


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Turns errors about the user's text, files and packages into a usage error of one line."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise UsageError([" ".join(str(error).split())]) from error
        raise UsageError(
            ["the disk is full; what is finished is kept: make room, about twice the tokens, and give the same command"]
        ) from error
    except (ValueError, ImportError, RuntimeError) as error:
        raise UsageError([" ".join(str(error).split())]) from error

"""`lightning-megatron prepare-data`: tokenizes text with a given or a trained tokenizer, into files for training."""

import argparse
from pathlib import Path
from typing import Any

from lightning_megatron.cli.commands import add_command

MAX_DOCUMENT_BYTES = 10**8
"""Default of `--max-document-bytes`: that of `data.document_files`, which a test compares with it."""
_EPILOG = """\
An interrupted run resumes when the same command is started again. The files do not depend on the number of workers, and
are byte for byte those that Megatron's own tool writes for the same tokens.

examples:
  lightning-megatron prepare-data --path corpus.jsonl --tokenizer tokenizer.json --output data/corpus
  lightning-megatron prepare-data --path 'texts/**/*.txt' --train-vocab-size 32000 --output data/texts
  lightning-megatron prepare-data --dataset wikitext:wikitext-103-raw-v1 --tokenizer llama/ --split-sentences \\
    --output data/wikitext
"""
_PATH_HELP = (
    "a file, a directory or a pattern such as 'texts/**/*.txt': text files, each one document, or JSON, CSV, Parquet or"
    " Arrow files, each record one document; they may be compressed (.gz, .bz2, .xz, .zst)"
)


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command and its options."""
    parser = add_command(
        commands,
        "prepare-data",
        "Tokenizes text with all cores and writes Megatron's .bin and .idx files, or a Hugging Face dataset.",
        run=_run,
        epilog=_EPILOG,
    )
    source = parser.add_argument_group("text: one of --path and --dataset, or neither for Python's standard library")
    source.add_argument("--path", metavar="PATH", help=_PATH_HELP)
    source.add_argument(
        "--dataset", metavar="NAME", help="'name' or 'name:config' on the Hugging Face hub, or a local dataset"
    )
    source.add_argument("--split", default="train", metavar="NAME", help="part of the dataset (default: train)")
    source.add_argument(
        "--text-column",
        nargs="+",
        default=["text"],
        metavar="NAME",
        help="columns with text; several are written to separate files, PREFIX_NAME each (default: text)",
    )
    source.add_argument(
        "--cache-directory", type=Path, metavar="FOLDER", help="cache of the package datasets (default: its own)"
    )
    tokenizer = parser.add_argument_group("tokenizer: one of --tokenizer and --train-vocab-size")
    tokenizer.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a tokenizer.json, .model or .tiktoken, a directory with one, tiktoken:NAME or null:SIZE",
    )
    tokenizer.add_argument(
        "--train-vocab-size",
        type=int,
        metavar="SIZE",
        help="train a byte-level BPE tokenizer of this vocabulary size on the text, written as PREFIX.tokenizer.json",
    )
    tokenizer.add_argument(
        "--special-tokens",
        nargs="+",
        default=[],
        metavar="NAME",
        help="special tokens of the trained tokenizer, as '[MASK]'",
    )
    tokenizer.add_argument(
        "--end-of-text", metavar="NAME", help="token at the end of a document (default: the tokenizer's)"
    )
    out = parser.add_argument_group("output")
    out.add_argument("--output", type=Path, required=True, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx")
    out.add_argument(
        "--format",
        choices=("megatron", "arrow"),
        default="megatron",
        help="token files, or a directory PREFIX for datasets.load_from_disk (default: megatron)",
    )
    out.add_argument("--no-append-eod", action="store_true", help="write no end-of-text token after a document")
    out.add_argument("--split-sentences", action="store_true", help="write each sentence as its own sequence, for BERT")
    work = parser.add_argument_group("work")
    work.add_argument(
        "--workers", type=int, default=0, metavar="NUMBER", help="worker processes (default: one per core)"
    )
    work.add_argument(
        "--bad-documents",
        choices=("skip", "refuse"),
        default="skip",
        help="what to do with documents that are not UTF-8 or not JSON, damaged, larger than --max-document-bytes, or "
        "refused by the tokenizer: write no tokens and report them, or end with an error (default: skip)",
    )
    work.add_argument(
        "--max-document-bytes",
        type=int,
        default=MAX_DOCUMENT_BYTES,
        metavar="BYTES",
        help=f"largest document that is tokenized (default: {MAX_DOCUMENT_BYTES})",
    )
    work.add_argument("--json", action="store_true", help="print what was done as JSON")


def _run(options: argparse.Namespace) -> int:
    # What reads text takes seconds to import, which a look at the help need not wait for.
    from lightning_megatron.cli.token_preparation import run_prepare_data

    return run_prepare_data(options)

"""Documents of text from files, from a named dataset or from Python's own library: the one door to `datasets`.

First on the path from text to batches. One process calls `load_documents` first and so fills the cache of
`datasets`; the others then call it with the same arguments and map the same Arrow files into memory.

| given | documents |
|---|---|
| `path`: a file, a directory or a pattern | a text file is one document; a row of JSON, CSV, Parquet or Arrow is one |
| `dataset`: `name` or `name:config` of the hub, or a local dataset | one row is one document |
| neither | the `.py` files of the running interpreter's standard library |
"""

import glob
import hashlib
import logging
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from lightning_megatron.data.corpus import Tokens
from lightning_megatron.data.packing import Numbers

if TYPE_CHECKING:
    from datasets import Dataset

    Documents: TypeAlias = Dataset

logger = logging.getLogger(__name__)

# fmt: off
TEXT_SUFFIXES = frozenset((
    ".txt", ".text", ".md", ".rst", ".tex", ".html", ".htm", ".xml", ".toml", ".yaml", ".yml", ".ini", ".cfg", ".py",
    ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".java", ".kt", ".scala", ".js", ".jsx", ".ts",
    ".tsx", ".go", ".rs", ".rb", ".php", ".swift", ".sh", ".sql", ".r", ".jl", ".lua", ".pl", ".hs",
))
# fmt: on
"""Files of which each is one document."""

ROW_SUFFIXES = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".arrow": "arrow",
}
"""Files of which each row is one document, and the builder of `datasets` that reads them."""

COMPRESSED_SUFFIXES = frozenset((".gz", ".bz2", ".xz", ".zst"))
"""Endings after one of `ROW_SUFFIXES` that its builder unpacks."""

_ROWS_READ = 128
"""Rows of a table that are looked up together."""

WAYS_OUT = (
    "give a file, a directory or a pattern such as 'corpus/**/*.txt' as path, a dataset of the hub as dataset,"
    " or neither for Python's standard library"
)


def load_documents(
    *,
    path: str | Path | None = None,
    dataset: str | None = None,
    text_column: str = "text",
    split: str = "train",
    cache_dir: str | Path | None = None,
) -> "Documents":
    """Documents in a fixed order, with the one column `text`.

    `split` chooses among the splits of a `dataset`; `cache_dir` is None for the cache that `datasets` chooses.
    Raises ValueError for both sources at once, a source that is missing, and one without a document.
    """
    if path is not None and dataset is not None:
        raise ValueError(
            f"path ({str(path)!r}) and dataset ({dataset!r}) are both given, but one source is read; {WAYS_OUT}"
        )
    if path is not None and split != "train":
        raise ValueError(
            f"split ({split!r}) chooses a part of a dataset, but path ({str(path)!r}) names files, which are all"
            " 'train'; leave split out, or give the files of that part as path"
        )
    if dataset is not None:
        documents = _named_dataset(dataset, split, cache_dir)
        documents = _text_only(documents, text_column, f"dataset ({dataset!r})")
        source = f"dataset ({dataset!r}), split ({split!r})"
    else:
        source = "the standard library" if path is None else f"path ({str(path)!r})"
        files = standard_library_files() if path is None else files_of(path)
        documents = _documents_in(files, text_column, cache_dir)
    if len(documents) == 0:
        raise ValueError(f"{source} holds no document, and a corpus needs at least one of UTF-8 text; {WAYS_OUT}")
    return documents


def load_rows(
    *,
    path: str | Path | None = None,
    dataset: str | None = None,
    split: str = "train",
    cache_dir: str | Path | None = None,
) -> "Documents":
    """Rows with all of their columns, in a fixed order, from tables: files at `path`, or a named `dataset`.

    Raises ValueError for none or both of the two, a source that is missing, and one that has no rows.
    """
    ways = "give a .json, .jsonl, .parquet, .csv or .arrow file, a directory or pattern of one kind as path, or dataset"
    if (path is None) == (dataset is None):
        raise ValueError(f"path ({path!r}) and dataset ({dataset!r}): one of them must be given; {ways}")
    if dataset is not None:
        source, rows = f"dataset ({dataset!r}), split ({split!r})", _named_dataset(dataset, split, cache_dir)
    else:
        assert path is not None
        source, files = f"path ({str(path)!r})", files_of(path)
        builders = sorted({_row_builder(file) for file in files})
        if len(builders) > 1 or builders == [""]:
            kinds = ", ".join(sorted({file.suffix or file.name for file in files}))
            raise ValueError(f"{source} leads to files of kinds {kinds}, and rows come from tables of one kind; {ways}")
        rows = _rows(builders[0], files, cache_dir)
    if len(rows) == 0:
        raise ValueError(f"{source} has no rows; {ways}")
    return rows


class TextStream:
    """Texts that are read as they come, again and again from the first on; it knows where it is.

    `path` and `dataset` are those of `load_documents`, of which one must be given: files are read as they are asked
    for, a `dataset` of the hub comes over the network. Files that are not UTF-8 text are left out, and said.
    """

    def __init__(
        self, *, path: str | Path | None = None, dataset: str | None = None, text_column: str = "text"
    ) -> None:
        if (path is None) == (dataset is None):
            raise ValueError(f"path ({path!r}) and dataset ({dataset!r}): one of them must be given to be streamed")
        if dataset is not None:
            rows = _named_dataset(dataset, "train", None, streaming=True)
            self._rows = _streamed_texts(rows, text_column, f"dataset ({dataset!r})")
        else:
            assert path is not None
            self._rows = _streamed_files(files_of(path), text_column)

    def texts(self, number: int, state: Any) -> Iterator[str | None]:
        """The texts of pass `number` behind a state of it, all of them where there is none."""
        self._rows.set_epoch(number)
        if state is not None:
            self._rows.load_state_dict(state)
        # Not iter(rows), which would give each worker of a loader other rows.
        return (rows["text"][0] for rows in self._rows.iter(batch_size=1))

    def state_dict(self) -> Any:
        """Where the pass is."""
        return self._rows.state_dict()


def files_of(path: str | Path) -> list[Path]:
    """Sorted files with something in them that a path stands for: itself, a directory's, or those that match.

    Of a directory the files with a known ending, hidden ones left out; a file that is named or matched may have any.
    """
    if os.path.isfile(path):
        files: Iterable[Path] = [Path(path)]
    elif os.path.isdir(path):
        files = (file for file in _walk(Path(path)) if file.suffix.lower() in TEXT_SUFFIXES or _row_builder(file))
    elif glob.has_magic(str(path)):
        files = (Path(match) for match in glob.glob(str(path), recursive=True) if os.path.isfile(match))
    else:
        raise ValueError(f"path ({str(path)!r}) does not exist; {WAYS_OUT}")
    files = sorted(file for file in files if file.stat().st_size > 0)
    if not files:
        raise ValueError(
            f"path ({str(path)!r}) leads to no file with something in it; of a directory the files with a known ending"
            f" are read (.txt .md .py .jsonl .parquet and such), by a pattern any; {WAYS_OUT}"
        )
    return files


def standard_library_files() -> list[Path]:
    """Sorted source files of the running interpreter's standard library, its tests and installed packages left out."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = (file for file in _walk(root) if file.suffix == ".py" and not left_out & set(file.relative_to(root).parts))
    found = sorted(file for file in files if file.stat().st_size > 0)
    if not found:
        raise ValueError(f"the standard library ({str(root)!r}) has no source files here; {WAYS_OUT}")
    return found


def split_documents(documents: "Documents", held_out_fraction: float) -> "tuple[Documents, Documents]":
    """The documents to train on, and those held out, which are spread evenly over the corpus."""
    if not 0 < held_out_fraction < 1:
        raise ValueError(f"held_out_fraction ({held_out_fraction}) must lie between 0 and 1; 0.05 holds out one in 20")
    if len(documents) < 2:
        raise ValueError("a corpus of 1 document cannot be split in two; give more documents, or a second source")
    num_held_out = min(max(1, round(len(documents) * held_out_fraction)), len(documents) - 1)
    held_out = [(2 * i + 1) * len(documents) // (2 * num_held_out) for i in range(num_held_out)]
    chosen = set(held_out)
    return documents.select([i for i in range(len(documents)) if i not in chosen]), documents.select(held_out)


def joined_documents(parts: "Sequence[Documents]") -> "Documents":
    """The documents of all parts, one part after the other."""
    if len(parts) == 1:
        return parts[0]
    datasets = _datasets()
    # Builders differ in the width of a string's offsets, and only equal types are put together.
    strings = datasets.Features({"text": datasets.Value("string")})
    return datasets.concatenate_datasets([part if part.features == strings else part.cast(strings) for part in parts])


def corpus_fingerprint(documents: "Documents") -> str:
    """What the documents were made from, as a short text that is the same in every process."""
    return str(documents._fingerprint)


def corpus_bytes(documents: "Documents") -> int:
    """Roughly the bytes of all documents."""
    rows = documents.data
    return int(rows.nbytes * len(documents) // max(len(rows), 1))


def document_bytes(documents: "Documents", first: int, last: int) -> Iterator[memoryview | None]:
    """Each document from `first` to before `last` as it lies in memory or in the file; None for one that is null."""
    rows = documents.with_format("arrow")
    for start in range(first, last, _ROWS_READ):
        for text in rows[start : min(start + _ROWS_READ, last)]["text"]:
            held = text.as_buffer()
            yield None if held is None else memoryview(held)


def save_token_rows(parts: Iterable[tuple[Numbers, Tokens]], directory: str | Path) -> None:
    """Writes what `datasets.load_from_disk` reads: of each document its `input_ids`.

    Each part is the lengths of its documents and their tokens, one after the other.
    """
    datasets = _datasets()
    import pyarrow as pa

    tables = []
    for lengths, tokens in parts:
        ends = np.append(0, np.cumsum(lengths, dtype=np.int64))
        rows = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(tokens))
        tables.append(datasets.Dataset(datasets.table.InMemoryTable(pa.table({"input_ids": rows}))))
    datasets.concatenate_datasets(tables).save_to_disk(str(directory))


def _datasets() -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            "reading documents needs the package 'datasets': pip install 'lightning_megatron[data]'"
        ) from error
    module: ModuleType = datasets
    return module


def _walk(root: Path) -> Iterator[Path]:
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if not name.startswith(".")]
        yield from (Path(directory, name) for name in names if not name.startswith("."))


def _row_builder(file: Path) -> str:
    """The builder that reads a file's rows, and "" for a file that is one document."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED_SUFFIXES:
        suffixes.pop()
    return ROW_SUFFIXES.get(suffixes[-1], "") if suffixes else ""


def _documents_in(files: list[Path], text_column: str, cache_dir: str | Path | None) -> "Documents":
    """Text files first, then those of rows, builder by builder."""
    of_builder: dict[str, list[Path]] = {}
    for file in files:
        of_builder.setdefault(_row_builder(file), []).append(file)
    parts = []
    for builder, members in sorted(of_builder.items()):
        if builder == "":
            parts.append(_text_documents(members, cache_dir))
        else:
            rows = _rows(builder, members, cache_dir)
            parts.append(_text_only(rows, text_column, f"the {builder} files at {str(members[0])!r}"))
    return joined_documents(parts)


# Note: text files are read here and not by the builder "text" of `datasets`
# That builder stops at the first file that is not UTF-8 and takes "[" in a file's name for a pattern.
def _text_documents(files: list[Path], cache_dir: str | Path | None) -> "Documents":
    datasets = _datasets()
    stats = [file.stat() for file in files]
    stamp = hashlib.sha256(repr([(stat.st_size, stat.st_mtime_ns) for stat in stats]).encode()).hexdigest()
    # A tuple, since `datasets` takes a list for shards and would call the generator once per file.
    arguments = {"files": tuple(str(file.resolve()) for file in files), "stamp": stamp}
    try:
        return datasets.Dataset.from_generator(
            _read_texts,
            features=datasets.Features({"text": datasets.Value("string")}),
            cache_dir=None if cache_dir is None else str(cache_dir),
            gen_kwargs=arguments,
        )
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(f"the text files at {str(files[0])!r} could not be read: {error.__cause__}") from error


def _read_texts(files: tuple[str, ...], stamp: str) -> Iterator[dict[str, str]]:
    """One row per file that is UTF-8. The stamp makes a changed file another entry of the cache."""
    skipped: list[str] = []
    for file in files:
        try:
            text = Path(file).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            skipped.append(file)
            continue
        yield {"text": text}
    if len(skipped) == len(files):
        raise ValueError(f"none of the {len(files)} is UTF-8 text; convert them, or choose others by a pattern as path")
    if skipped:
        logger.warning("skipped %d of %d files that are not UTF-8 text, first %s", len(skipped), len(files), skipped[0])


def _rows(builder: str, files: list[Path], cache_dir: str | Path | None) -> "Documents":
    datasets = _datasets()
    names = [glob.escape(str(file.resolve())) for file in files]
    try:
        return datasets.load_dataset(
            builder, data_files=names, split="train", cache_dir=None if cache_dir is None else str(cache_dir)
        )
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
        raise ValueError(
            f"the {builder} files at {str(files[0])!r} could not be read as rows with the same columns"
            f" ({error.__cause__ or error}); choose the files to read by a pattern as path"
        ) from error


def _streamed_files(files: list[Path], text_column: str) -> Any:
    """As `_documents_in`, read when it is asked for."""
    datasets = _datasets()
    of_builder: dict[str, list[str]] = {}
    for file in files:
        of_builder.setdefault(_row_builder(file), []).append(str(file.resolve()))
    parts = []
    for builder, names in sorted(of_builder.items()):
        if builder == "":
            # A list is taken for shards: the state of the stream counts files.
            parts.append(
                datasets.IterableDataset.from_generator(
                    _streamed_text_files,
                    features=datasets.Features({"text": datasets.Value("string")}),
                    gen_kwargs={"files": names},
                )
            )
        else:
            escaped = [glob.escape(name) for name in names]
            rows = datasets.load_dataset(builder, data_files=escaped, split="train", streaming=True)
            parts.append(_streamed_texts(rows, text_column, f"the {builder} files at {names[0]!r}"))
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


def _streamed_text_files(files: list[str]) -> Iterator[dict[str, str]]:
    for file in files:
        try:
            yield {"text": Path(file).read_text(encoding="utf-8-sig")}
        except UnicodeDecodeError:
            logger.warning("skipped %s, which is not UTF-8 text", file)


def _streamed_texts(rows: Any, text_column: str, source: str) -> Any:
    """The column of texts alone, as far as a stream tells what it has."""
    columns = rows.column_names if rows.column_names is not None else list(next(iter(rows), {}))
    if text_column not in columns:
        raise ValueError(
            f"text_column ({text_column!r}) is not a column of {source}, which has {', '.join(columns) or 'no rows'};"
            " name the column that holds the text, or choose other files by a pattern as path"
        )
    rows = rows.select_columns([text_column])
    return rows if text_column == "text" else rows.rename_column(text_column, "text")


def _named_dataset(name: str, split: str, cache_dir: str | Path | None, *, streaming: bool = False) -> Any:
    datasets = _datasets()
    try:
        if Path(name, "state.json").is_file() or Path(name, "dataset_dict.json").is_file():
            saved = datasets.load_from_disk(name)
            rows = saved[split] if Path(name, "dataset_dict.json").is_file() else saved
            return rows.to_iterable_dataset() if streaming else rows
        base, _, config = (name, "", "") if Path(name).exists() else name.partition(":")
        cache = None if cache_dir is None else str(cache_dir)
        return datasets.load_dataset(base, config or None, split=split, cache_dir=cache, streaming=streaming)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"dataset ({name!r}) with split ({split!r}) could not be loaded: {error}; give 'name' or 'name:config' of"
            " a dataset that the hub or this machine's cache has, the directory of a local one, or text files as path"
        ) from error


def _text_only(documents: "Documents", text_column: str, source: str) -> "Documents":
    datasets = _datasets()
    columns = documents.column_names
    if text_column not in columns:
        raise ValueError(
            f"text_column ({text_column!r}) is not a column of {source}, which has {', '.join(columns)};"
            " name the column that holds the text, or choose other files by a pattern as path"
        )
    feature = documents.features[text_column]
    if feature not in (datasets.Value("string"), datasets.Value("large_string")):
        raise ValueError(
            f"text_column ({text_column!r}) of {source} holds {feature}, but documents are strings;"
            f" the columns are {', '.join(columns)}"
        )
    documents = documents.select_columns([text_column])
    return documents if text_column == "text" else documents.rename_column(text_column, "text")

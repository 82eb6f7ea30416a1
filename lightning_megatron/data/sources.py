"""Documents of text from files, from a named dataset or from Python's own library: the one door to `datasets`.

First on the path from text to batches. One process calls `load_documents` first and so fills the cache of
`datasets`; the others then call it with the same arguments and map the same Arrow files into memory.

| given | documents |
|---|---|
| `path`: a file, a directory or a pattern | a text file is one document; a row of JSON, CSV, Parquet or Arrow is one |
| `dataset`: `name` or `name:config` of the hub, or a local dataset | one row is one document |
| neither | the `.py` files of the running interpreter's standard library |
"""

import copy
import glob
import hashlib
import importlib.util
import json
import logging
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from lightning_megatron.data.corpus import TokenArray
from lightning_megatron.data.document_files import (
    DAMAGES,
    MAX_DOCUMENT_BYTES,
    BadDocuments,
    is_of_disk,
    is_zstandard,
    json_fault,
    read_documents,
    require_column,
)
from lightning_megatron.data.optional_packages import optional_package
from lightning_megatron.data.packing import Numbers
from lightning_megatron.hub import telling_who_is_asked

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
"""Suffixes of files that are one document each."""

ROW_SUFFIXES = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".arrow": "arrow",
}
"""Suffixes of files whose rows are documents, with the builder of `datasets` that reads them."""

COMPRESSED_SUFFIXES = frozenset((".gz", ".bz2", ".xz", ".zst"))
"""Suffixes after one of `ROW_SUFFIXES` that its builder decompresses."""

_ROWS_READ = 128
"""Rows of a table that are read together."""

_DESCRIBED = "documents of files: "
"""Prefix of the description that holds, as JSON, the files of the documents."""

_NAMED = 5
"""Number of bad documents of a stream that are named one by one."""

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
    """Documents in a fixed order, with the column `text`, and `fault` where some of them cannot be read: they have no
    text, and `fault` says why. All others have none.

    `split` chooses among the splits of a `dataset`; `cache_dir` is None for the cache that `datasets` chooses.
    Raises ValueError for both sources at once, a source that is missing, and one without a document.
    """
    if path is not None and dataset is not None:
        raise ValueError(
            f"path ({str(path)!r}) and dataset ({dataset!r}) are both given, but one source is read; {WAYS_OUT}"
        )
    _refuse_split_of_files(path, split)
    if dataset is not None:
        documents = _named_dataset(dataset, split, cache_dir)
        documents = _text_only(documents, text_column, f"dataset ({dataset!r})", documents.column_names)
        source = f"dataset ({dataset!r}), split ({split!r})"
    else:
        source = "the standard library" if path is None else f"path ({str(path)!r})"
        files = standard_library_files() if path is None else files_of(path)
        documents = _documents_in(files, text_column, cache_dir)
    if len(documents) == 0:
        raise ValueError(f"{source} holds no document, and a corpus needs at least one of UTF-8 text; {WAYS_OUT}")
    if "fault" in documents.column_names and all(documents["fault"]):
        raise ValueError(
            f"none of the {len(documents)} documents of {source} can be read: the first {documents['fault'][0]};"
            f" convert them, or {WAYS_OUT}"
        )
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
    _refuse_split_of_files(path, split)
    if dataset is not None:
        source, rows = f"dataset ({dataset!r}), split ({split!r})", _named_dataset(dataset, split, cache_dir)
    else:
        assert path is not None
        source, files = f"path ({str(path)!r})", files_of(path)
        builders = sorted({_row_builder(file) for file in files})
        if len(builders) > 1 or builders == [""]:
            kinds = ", ".join(sorted({file.suffix or file.name for file in files}))
            raise ValueError(f"{source} leads to files of kinds {kinds}, and rows come from tables of one kind; {ways}")
        try:
            rows = _rows(builders[0], files, cache_dir)
        except ValueError as error:
            found = [fault for file in files if (fault := json_fault(str(file)))] if builders == ["json"] else []
            if not found:
                raise
            raise ValueError(
                f"{source} leads to rows that cannot be read: {'; '.join(found[:_NAMED])}; mend them, or take them out"
            ) from error
    if len(rows) == 0:
        raise ValueError(f"{source} has no rows; {ways}")
    return rows


class TextStream:
    """An endless stream of texts, epoch after epoch, whose position is its state.

    `path` and `dataset` are those of `load_documents`, of which one must be given: files are read on demand, a
    `dataset` of the hub comes over the network. Documents that cannot be read, or are larger than `max_document_bytes`,
    are left out and, where `is_logging`, logged; or they are refused by a ValueError.
    """

    def __init__(
        self,
        *,
        path: str | Path | None = None,
        dataset: str | None = None,
        text_column: str = "text",
        bad_documents: BadDocuments = "skip",
        max_document_bytes: int = MAX_DOCUMENT_BYTES,
        is_logging: bool = True,
    ) -> None:
        if (path is None) == (dataset is None):
            raise ValueError(f"path ({path!r}) and dataset ({dataset!r}): one of them must be given to be streamed")
        self.bad_documents = bad_documents
        self.max_document_bytes = max_document_bytes
        self._is_logging = is_logging
        self._num_bad = 0
        if dataset is not None:
            rows = _named_dataset(dataset, "train", None, streaming=True)
            self._rows = _streamed_texts(rows, text_column, f"dataset ({dataset!r})")
        else:
            assert path is not None
            self._rows = _streamed_files(files_of(path), text_column, max_document_bytes)

    def require_text(self) -> None:
        """Raises ValueError where no document can be read or, where bad ones are refused, the first one cannot."""
        if not any(self.texts(0, None)):
            raise ValueError("the stream holds no document that can be read, and a corpus needs at least one")

    def texts(self, number: int, state: Any) -> Iterator[str | None]:
        """The texts of pass `number` after a state of it, all of them where that is None; None for a bad document."""
        self._rows.set_epoch(number)
        if state is not None:
            self._rows.load_state_dict(state)
        # Not iter(rows), which would split the rows over the workers of a loader.
        for rows in self._rows.iter(batch_size=1):
            text, [fault], [where] = rows["text"][0], rows.get("fault", [""]), rows.get("where", [""])
            fault = fault or self._fault(text, where)
            if fault:
                self.take_bad(fault, is_logging=self._is_logging)
            yield None if fault else text

    def take_bad(self, fault: str, *, is_logging: bool = True) -> None:
        """Logs a bad document, or raises ValueError where such are refused."""
        if self.bad_documents == "refuse":
            raise ValueError(f"a document {fault}; mend it, or let such be skipped by bad_documents='skip'")
        self._num_bad += 1
        # The first ones, and then fewer and fewer: a stream has no end at which they could be counted.
        if is_logging and (self._num_bad <= _NAMED or self._num_bad.bit_count() == 1):
            logger.warning("skipped, as number %d so far, a document that %s", self._num_bad, fault)

    def state_dict(self) -> Any:
        """The position within the epoch."""
        return self._rows.state_dict()

    def _fault(self, text: Any, where: str) -> str:
        if text is None:
            return ""
        if not isinstance(text, str):
            return f"is not text but {str(text)[:100]!r}"
        # A character is four bytes at most.
        if 4 * len(text) > self.max_document_bytes and (size := len(text.encode())) > self.max_document_bytes:
            location = where or f"it begins with {text[:40]!r}"
            return f"has {size} bytes, above max_document_bytes ({self.max_document_bytes}) ({location})"
        return ""


def files_of(path: str | Path) -> list[Path]:
    """Sorted files that a path leads to and that are not empty: itself, a directory's, or those that match.

    Of a directory the files with a known ending, hidden ones left out; a file that is named or matched may have any.
    """
    if os.path.isfile(path):
        files: Iterable[Path] = [Path(path)]
    elif os.path.isdir(path):
        files = (file for file in _walk(Path(path)) if file.suffix.lower() in TEXT_SUFFIXES or _row_builder(file))
    elif glob.has_magic(str(path)):
        files = (Path(match) for match in glob.glob(str(path), recursive=True) if os.path.isfile(match))
    elif os.path.lexists(path):
        raise ValueError(f"path ({str(path)!r}) is a pipe, a device or a link that leads to nothing; {WAYS_OUT}")
    else:
        raise ValueError(f"path ({str(path)!r}) does not exist; {WAYS_OUT}")
    files = sorted(file for file in files if file.stat().st_size > 0)
    if not files:
        raise ValueError(
            f"path ({str(path)!r}) leads to no file with something in it; of a directory the files with a known ending"
            f" are read (.txt .md .py .jsonl .parquet and such), by a pattern any; {WAYS_OUT}"
        )
    return files


def has_columns(files: Iterable[Path]) -> bool:
    """Whether any of the files is a table, whose rows have columns."""
    return any(map(_row_builder, files))


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
    num_held_out = held_out_of(len(documents), held_out_fraction)
    held_out = [(2 * i + 1) * len(documents) // (2 * num_held_out) for i in range(num_held_out)]
    chosen = set(held_out)
    training = [i for i in range(len(documents)) if i not in chosen]
    return part_of(documents, training), part_of(documents, held_out)


def part_of(documents: "Documents", numbers: Sequence[int]) -> "Documents":
    """A selection of the documents whose locations stay known."""
    part = documents.select(numbers)
    if (described := _description(documents)) is not None and len(part.data) < len(documents.data):
        # A run of numbers is cut out of the table.
        _describe(part, {**described, "first": described["first"] + numbers[0], "count": len(part)})
    return part


def held_out_of(num_documents: int, fraction: float) -> int:
    """Number of documents that a fraction holds out: at least one, and not all."""
    return min(max(1, round(num_documents * fraction)), num_documents - 1)


def joined_documents(parts: "Sequence[Documents]") -> "Documents":
    """The documents of all parts, one part after the other."""
    if len(parts) == 1:
        return parts[0]
    datasets = _datasets()
    # Builders differ in the width of a string's offsets, and only equal types can be concatenated.
    features = [datasets.Features(dict.fromkeys(part.column_names, datasets.Value("string"))) for part in parts]
    plain = [_undescribed(part) for part in parts]
    joined: Documents = datasets.concatenate_datasets(
        [part if part.features == own else part.cast(own) for part, own in zip(plain, features, strict=True)]
    )
    return joined


def corpus_fingerprint(documents: "Documents") -> str:
    """Fingerprint of the documents, equal in every process."""
    return str(documents._fingerprint)


def corpus_bytes(documents: "Documents") -> int:
    """Bytes of all documents, roughly."""
    rows = documents.data
    return int(rows.nbytes * len(documents) // max(len(rows), 1))


class HeldDocument(NamedTuple):
    """The bytes of one document."""

    content: memoryview | None
    """The document's bytes, UTF-8 unless the file holds something else; None for one that is null or bad."""
    fault: str
    """Error of the document; empty: none."""


def held_documents(documents: "Documents", first: int, last: int) -> Iterator[HeldDocument]:
    """Each document from `first` to before `last`."""
    rows = documents.with_format("arrow")
    for start in range(first, last, _ROWS_READ):
        some = rows[start : min(start + _ROWS_READ, last)]
        faults = some["fault"].to_pylist() if "fault" in some.column_names else [None] * len(some)
        for text, fault in zip(some["text"], faults, strict=True):
            held = text.as_buffer()
            yield HeldDocument(None if held is None else memoryview(held), fault or "")


def document_places(documents: "Documents", numbers: Sequence[int]) -> list[str]:
    """The location of each of some documents: file, and line, item or row within it. Rereads the files.

    Empty for documents that are not of files of `load_documents`, or of a `part_of` them, and for those after a line
    that the builder of `datasets` took for another number of rows than one: their locations are unknown.
    """
    described, indices = _description(documents), documents._indices
    if described is None:
        return [""] * len(numbers)
    rows = [number if indices is None else int(indices.column(0)[number].as_py()) for number in numbers]
    wanted = [described["first"] + row for row in rows]
    locations, last = {}, max(wanted, default=-1)
    for number, where in zip(range(last + 1), _locations(described["files"], described["text_column"]), strict=False):
        if number in wanted:
            locations[number] = where
    return [locations.get(number, "") for number in wanted]


def _locations(files: Sequence[tuple[str, str, bool]], text_column: str) -> Iterator[str]:
    for builder, file, is_built in files:
        if builder == "":
            # One document, which need not be read.
            yield file
            continue
        for document in read_documents(file, builder, text_column):
            if is_built and not document.where:
                return
            yield document.where


def _undescribed(documents: "Documents") -> "Documents":
    """The documents without the description of `_describe`, which holds for that selection alone."""
    if not (documents.info.description or "").startswith(_DESCRIBED):
        return documents
    plain = copy.copy(documents)
    plain._info = documents.info.copy()
    plain._info.description = ""
    return plain


def _describe(documents: "Documents", description: dict[str, Any]) -> None:
    documents.info.description = _DESCRIBED + json.dumps(description)


def _description(documents: "Documents") -> dict[str, Any] | None:
    """The description of `_describe`; None where it is of other rows."""
    description = documents.info.description or ""
    if not description.startswith(_DESCRIBED):
        return None
    described: dict[str, Any] = json.loads(description.removeprefix(_DESCRIBED))
    return described if described["count"] == len(documents.data) else None


def plain_rows(rows: "Documents", first: int = 0, last: int | None = None) -> Iterator[dict[str, Any]]:
    """Rows from `first` to before `last` as the table holds them: an image is its bytes and its path, not opened."""
    plain, end = rows.with_format("arrow"), len(rows) if last is None else last
    for start in range(first, end, _ROWS_READ):
        yield from plain[start : min(start + _ROWS_READ, end)].to_pylist()


def save_token_rows(parts: Iterable[tuple[Numbers, TokenArray]], directory: str | Path) -> None:
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


def _refuse_split_of_files(path: str | Path | None, split: str) -> None:
    if path is not None and split != "train":
        raise ValueError(
            f"split ({split!r}) chooses a part of a dataset, but path ({str(path)!r}) names files, which are all"
            " 'train'; leave split out, or give the files of that part as path"
        )


def _datasets() -> ModuleType:
    return optional_package("datasets", "reading documents")


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


# A cell of CSV is the text that it is, as in a stream; the builder of `datasets` would make numbers of some.
_READ_ONE_BY_ONE = ("", "csv")


def _documents_in(files: list[Path], text_column: str, cache_dir: str | Path | None) -> "Documents":
    """The documents of files: text files first, then tables, builder by builder."""
    of_builder: dict[str, list[Path]] = {}
    for file in files:
        of_builder.setdefault(_row_builder(file), []).append(file)
    parts, listed = [], []
    for builder, members in sorted(of_builder.items()):
        if builder in _READ_ONE_BY_ONE:
            parts.append(_documents_one_by_one(members, builder, text_column, cache_dir))
        else:
            parts.append(_table_documents(members, builder, text_column, cache_dir))
        is_built = "fault" not in parts[-1].column_names
        listed += [(builder, str(file.resolve()), is_built) for file in members]
    documents = joined_documents(parts)
    _describe(documents, {"text_column": text_column, "files": listed, "first": 0, "count": len(documents)})
    return documents


def _table_documents(files: list[Path], builder: str, text_column: str, cache_dir: str | Path | None) -> "Documents":
    """The documents of tables: read at once, or one by one where a row is bad, so that the others are read."""
    for file in files:
        require_column(str(file), builder, text_column)
    if any(is_zstandard(str(file)) for file in files):
        return _documents_one_by_one(files, builder, text_column, cache_dir)
    try:
        rows = _rows(builder, files, cache_dir)
    except ValueError:
        return _documents_one_by_one(files, builder, text_column, cache_dir)
    return _text_only(rows, text_column, f"the {builder} files at {str(files[0])!r}", rows.column_names)


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


# Note: text files are read here and not by the builder "text" of `datasets`
# That builder stops at the first file that is not UTF-8 and takes "[" in a file's name for a pattern. Tables of which a
# row is broken are read the same way: the builders would give none of them.
def _documents_one_by_one(
    files: list[Path], builder: str, text_column: str, cache_dir: str | Path | None
) -> "Documents":
    datasets = _datasets()
    stats = [file.stat() for file in files]
    stamp = hashlib.sha256(repr([(stat.st_size, stat.st_mtime_ns) for stat in stats]).encode()).hexdigest()
    # A tuple, since `datasets` takes a list for shards and would call the generator once per file.
    names = tuple(str(file.resolve()) for file in files)
    arguments = {"files": names, "builder": builder, "text_column": text_column, "stamp": stamp}
    what = f"the {builder or 'text'} files at {str(files[0])!r}"
    try:
        return datasets.Dataset.from_generator(
            _read_one_by_one,
            features=_document_features(datasets),
            cache_dir=None if cache_dir is None else str(cache_dir),
            gen_kwargs=arguments,
        )
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(f"{what} could not be read: {error.__cause__}") from error
    except ValueError as error:
        # The error is that there is nothing to make a data set of.
        raise ValueError(f"{what} hold no document, and a corpus needs at least one; {WAYS_OUT}") from error


def _document_features(datasets: ModuleType) -> Any:
    return datasets.Features({"text": datasets.Value("string"), "fault": datasets.Value("string")})


def _read_one_by_one(files: tuple[str, ...], builder: str, text_column: str, stamp: str) -> Iterator[dict[str, Any]]:
    """All documents, bad ones too. The stamp makes a changed file another entry of the cache."""
    for file in files:
        for document in read_documents(file, builder, text_column):
            yield {"text": document.text, "fault": document.fault or None}


def _rows(builder: str, files: list[Path], cache_dir: str | Path | None) -> "Documents":
    datasets = _datasets()
    packed = [str(file) for file in files if is_zstandard(str(file))]
    if packed and importlib.util.find_spec("zstandard") is None:
        raise ImportError(f"reading rows of {packed[0]} needs the package 'zstandard': pip install zstandard")
    names = [glob.escape(str(file.resolve())) for file in files]
    try:
        return datasets.load_dataset(
            builder,
            data_files=names,
            split="train",
            cache_dir=None if cache_dir is None else str(cache_dir),
        )
    except (datasets.exceptions.DatasetGenerationError, *DAMAGES) as error:
        if is_of_disk(cause := _first_cause(error)):
            raise cause from None
        raise ValueError(
            f"the {builder} files at {str(files[0])!r} could not be read as rows with the same columns"
            f" ({error.__cause__ or error}); choose the files to read by a pattern as path"
        ) from error


def _streamed_files(files: list[Path], text_column: str, max_bytes: int) -> Any:
    """The documents of files as a stream, read on demand."""
    datasets = _datasets()
    named = sorted((_row_builder(file), str(file.resolve())) for file in files)
    for builder, name in named:
        require_column(name, builder, text_column)
    # A list is taken for shards: the state of the stream counts files.
    arguments = {"files": named, "text_column": text_column, "max_bytes": max_bytes}
    features = datasets.Features({**_document_features(datasets), "where": datasets.Value("string")})
    return datasets.IterableDataset.from_generator(_stream_one_by_one, features=features, gen_kwargs=arguments)


def _stream_one_by_one(files: list[tuple[str, str]], text_column: str, max_bytes: int) -> Iterator[dict[str, Any]]:
    for builder, file in files:
        for document in read_documents(file, builder, text_column, max_bytes):
            yield {"text": document.text, "fault": document.fault or None, "where": document.where}


def _streamed_texts(rows: Any, text_column: str, source: str) -> Any:
    """The column of texts alone, as far as a stream knows its columns."""
    columns = rows.column_names if rows.column_names is not None else list(next(iter(rows), {}))
    return _text_only(rows, text_column, source, columns)


def _named_dataset(name: str, split: str, cache_dir: str | Path | None, *, streaming: bool = False) -> Any:
    datasets = _datasets()
    try:
        if Path(name, "state.json").is_file() or Path(name, "dataset_dict.json").is_file():
            saved = datasets.load_from_disk(name)
            rows = saved[split] if Path(name, "dataset_dict.json").is_file() else saved
            return rows.to_iterable_dataset() if streaming else rows
        is_here = Path(name).exists()
        base, _, config = (name, "", "") if is_here else name.partition(":")
        cache = None if cache_dir is None else str(cache_dir)
        with nullcontext() if is_here else telling_who_is_asked(name):
            return datasets.load_dataset(base, config or None, split=split, cache_dir=cache, streaming=streaming)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"dataset ({name!r}) with split ({split!r}) could not be loaded: {error}; give 'name' or 'name:config' of"
            " a dataset that the hub or this machine's cache has, the directory of a local one, or text files as path"
        ) from error


def _text_only(rows: Any, text_column: str, source: str, columns: Sequence[str]) -> Any:
    """The rows with their column of texts alone, as `text`; a stream may not know the types of its columns."""
    if text_column not in columns:
        raise ValueError(
            f"text_column ({text_column!r}) is not a column of {source}, which has {', '.join(columns) or 'no rows'};"
            " name the column that holds the text, or choose other files by a pattern as path"
        )
    if rows.features is not None:
        _require_strings(rows.features[text_column], columns, text_column, source)
    rows = rows.select_columns([text_column])
    return rows if text_column == "text" else rows.rename_column(text_column, "text")


def _require_strings(feature: Any, columns: Sequence[str], text_column: str, source: str) -> None:
    datasets = _datasets()
    if feature not in (datasets.Value("string"), datasets.Value("large_string")):
        raise ValueError(
            f"text_column ({text_column!r}) of {source} holds {feature}, but documents are strings;"
            f" the columns are {', '.join(columns)}"
        )

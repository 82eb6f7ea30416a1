"""Documents of files, one after the other, and the errors of those that cannot be read.

Under `sources.py`. What is wrong is a property of the file alone: whoever reads it meets the same documents and the
same errors. A disk that cannot be read just now is none of these, and ends the reading.

| file | a document is |
|---|---|
| text | all of it |
| JSON | a line, or an item of the one list that the file is |
| CSV, Parquet, Arrow | a row |
"""

import csv
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import fsspec

BadDocuments = Literal["skip", "refuse"]
"""Treatment of documents that cannot be read or tokenized: left empty and named, or an error."""

MAX_DOCUMENT_BYTES = 10**8
"""Bytes above which a document is bad: most tokenizers take some hundred times its size in memory."""

_LARGEST_TEXT_BYTES = (1 << 31) - 1
"""Most bytes of a text file: a table of strings can hold no more in one."""

LONGEST_ROW_BYTES = 10**9
"""Most bytes of a row of JSON, or of a list of rows: as text that is read it takes several times as many."""

_ROWS_READ = 128
"""Rows of a table that are read together."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


DAMAGES = (ValueError, EOFError, OSError, zlib.error, lzma.LZMAError)
"""Errors of reading a file that is cut off, overwritten or of another kind, or a disk that cannot be read."""


def is_zstandard(file: str) -> bool:
    """Whether a file is compressed by zstd, by its name."""
    return file.lower().endswith(".zst")


def is_of_disk(error: BaseException) -> bool:
    """Whether an error is of the disk and not of the file's content: other processes may read on."""
    return isinstance(error, OSError) and error.errno is not None


class FileDocument(NamedTuple):
    """A document of a file."""

    text: str | None
    """The text; None for a null or bad document."""
    fault: str = ""
    """The error and its location, to be read after "a document"; empty: no error."""
    where: str = ""
    """File, and line, item or row within it; empty for damage and for a line that is no JSON."""


def read_documents(
    file: str, kind: str, text_column: str, max_bytes: int = _LARGEST_TEXT_BYTES
) -> Iterator[FileDocument]:
    """The documents of a file of a kind: "" (text), "json", "csv", "parquet" or "arrow".

    All of the file after damage is one bad document, and so is a text file above `max_bytes`.
    """
    if kind == "":
        yield _text_document(file, min(max_bytes, _LARGEST_TEXT_BYTES))
        return
    number = 0
    try:
        for document in _READERS[kind](file, text_column):
            number += 1
            yield document
    except DAMAGES as error:
        if is_of_disk(error):
            raise
        yield FileDocument(None, f"is damaged ({file}, behind document {number} of it: {_one_line(error)})")


def require_column(file: str, kind: str, text_column: str) -> None:
    """Raises ValueError where a table has no such column, or one that holds no text, as far as its beginning shows."""
    if kind == "":
        return
    if kind == "json":
        try:
            row = next((row for _, row in _json_rows(file) if isinstance(row, dict)), None)
        except DAMAGES as error:
            if is_of_disk(error):
                raise
            # Before its first row: a bad document, which is reported when it is read.
            return
        if row is not None:
            _require_among(text_column, row, file)
            if fault := _row_document(row, text_column, f"{file}, its first row").fault:
                raise ValueError(f"text_column ({text_column!r}) must hold text, and a document {fault}")
        return
    for document in read_documents(file, kind, text_column):
        if document.fault.startswith("has no text"):
            raise ValueError(f"text_column ({text_column!r}) must be a column of text; a document {document.fault}")
        return


def json_fault(file: str) -> str:
    """The first row of JSON that cannot be read, and why; empty where there is none."""
    try:
        faults = (f"{where}: {row}" for where, row in _json_rows(file) if isinstance(row, ValueError | RecursionError))
        return next(faults, "")
    except DAMAGES as error:
        return f"{file} is damaged: {_one_line(error)}"


# --- text -------------------------------------------------------------------------------------------------------------


def _text_document(file: str, max_bytes: int) -> FileDocument:
    num_bytes = Path(file).stat().st_size
    if num_bytes > max_bytes:
        return FileDocument(None, f"has {num_bytes} bytes, and may have {max_bytes} ({file})", file)
    try:
        return FileDocument(Path(file).read_text(encoding="utf-8-sig"), where=file)
    except UnicodeDecodeError as error:
        return FileDocument(None, f"is not UTF-8 text ({file}, byte {error.start})", file)


# --- JSON -------------------------------------------------------------------------------------------------------------


def _json_documents(file: str, text_column: str) -> Iterator[FileDocument]:
    for where, row in _json_rows(file):
        if isinstance(row, ValueError | RecursionError):
            yield FileDocument(None, f"is not JSON ({where}: {_one_line(row)})", where if _is_a_row(row) else "")
        else:
            yield _row_document(row, text_column, where)


def _json_rows(file: str) -> Iterator[tuple[str, Any]]:
    """The location of each row, and the row, or the error of one that is not JSON."""
    with _opened(file) as stream:
        for number, line in enumerate(_lines(stream), 1):
            written = line.removeprefix(_BYTE_ORDER_MARK).strip() if number == 1 else line.strip()
            is_too_long = len(line) > LONGEST_ROW_BYTES and not line.endswith(b"\n")
            if number == 1 and written.startswith(b"["):
                written += stream.read(max(0, LONGEST_ROW_BYTES + 1 - len(written)))
                if len(written) > LONGEST_ROW_BYTES:
                    yield file, ValueError(f"a list of more than {LONGEST_ROW_BYTES} bytes; write one row a line")
                else:
                    yield from _json_items(file, written)
                return
            if written:
                error = ValueError(f"a row of more than {LONGEST_ROW_BYTES} bytes")
                yield f"{file}, line {number}", error if is_too_long else _parsed(written)


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Lines of a file; the beginning of one that is longer than a row may be, without its end."""
    while line := stream.readline(LONGEST_ROW_BYTES + 1):
        rest = line
        while len(rest) > LONGEST_ROW_BYTES and not rest.endswith(b"\n"):
            rest = stream.readline(LONGEST_ROW_BYTES + 1)
        yield line


def _json_items(file: str, written: bytes) -> Iterator[tuple[str, Any]]:
    items = _parsed(written)
    if not isinstance(items, list):
        yield file, items
        return
    yield from ((f"{file}, item {number}", item) for number, item in enumerate(items))


def _parsed(written: bytes | str) -> Any:
    try:
        return json.loads(written)
    except (ValueError, RecursionError) as error:
        return error


def _is_a_row(error: ValueError | RecursionError) -> bool:
    """Whether invalid JSON would be valid if its letters were UTF-8."""
    if not isinstance(error, UnicodeDecodeError):
        return False
    return not isinstance(_parsed(error.object.decode(errors="replace")), ValueError | RecursionError)


def _row_document(row: Any, text_column: str, where: str) -> FileDocument:
    if not isinstance(row, dict):
        return FileDocument(None, f"is no object with a {text_column!r} ({where})", where)
    text = row.get(text_column)
    if text is None:
        return FileDocument(None, where=where)
    if not isinstance(text, str):
        return FileDocument(None, f"is not text but {_short(repr(text))} ({where}, {text_column!r})", where)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return FileDocument(None, f"is no text, of which half a character is missing at {error.start} ({where})", where)
    return FileDocument(text, where=where)


# --- tables -----------------------------------------------------------------------------------------------------------


def _csv_documents(file: str, text_column: str) -> Iterator[FileDocument]:
    """The documents of a CSV file row by row: a bad row leaves the others as they are."""
    csv.field_size_limit(_LARGEST_TEXT_BYTES)
    with (
        _opened(file) as stream,
        io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="") as lines,
    ):
        rows = csv.reader(lines, strict=True)
        columns = next(rows, [])
        if text_column not in columns:
            yield FileDocument(None, f"has no text ({file} has the columns {', '.join(columns)})")
            return
        column = columns.index(text_column)
        try:
            for row in filter(None, rows):
                yield _cell_document(row, column, len(columns), f"{file}, line {rows.line_num}")
        except csv.Error as error:
            raise ValueError(f"line {rows.line_num}: {error}") from error


def _cell_document(row: list[str], column: int, num_columns: int, where: str) -> FileDocument:
    if len(row) != num_columns:
        return FileDocument(None, f"has {len(row)} cells of {num_columns} ({where})", where)
    try:
        row[column].encode()
    except UnicodeEncodeError:
        return FileDocument(None, f"is not UTF-8 text ({where})", where)
    return FileDocument(row[column], where=where)


def _parquet_documents(file: str, text_column: str) -> Iterator[FileDocument]:
    from pyarrow.parquet import ParquetFile

    with _opened_to_seek(file) as stream, ParquetFile(stream) as table:
        columns = [text_column] if text_column in table.schema_arrow.names else []
        batches = table.iter_batches(batch_size=_ROWS_READ, columns=columns)
        yield from _table_documents(file, text_column, table.schema_arrow, batches)


def _arrow_documents(file: str, text_column: str) -> Iterator[FileDocument]:
    import pyarrow as pa

    with _opened_to_seek(file) as stream:
        try:
            batches: Any = pa.ipc.open_stream(stream)
        except pa.ArrowInvalid:
            stream.seek(0)
            table = pa.ipc.open_file(stream)
            schema, batches = table.schema, (table.get_batch(i) for i in range(table.num_record_batches))
        else:
            schema = batches.schema
        yield from _table_documents(file, text_column, schema, batches)


def _table_documents(file: str, text_column: str, schema: Any, batches: Any) -> Iterator[FileDocument]:
    import pyarrow as pa

    if text_column not in schema.names:
        yield FileDocument(None, f"has no text ({file} has the columns {', '.join(schema.names)})")
        return
    kind = schema.field(text_column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        yield FileDocument(None, f"has no text ({file} holds {kind} as {text_column!r})")
        return
    number = -1
    for batch in batches:
        for held in batch.column(text_column):
            number += 1
            where = f"{file}, row {number}"
            try:
                yield FileDocument(held.as_py(), where=where)
            except UnicodeDecodeError as error:
                yield FileDocument(None, f"is not UTF-8 text ({where}, byte {error.start})", where)


_READERS: dict[str, Callable[[str, str], Iterator[FileDocument]]] = {
    "json": _json_documents,
    "csv": _csv_documents,
    "parquet": _parquet_documents,
    "arrow": _arrow_documents,
}


def _opened(file: str) -> AbstractContextManager[IO[bytes]]:
    """The bytes of a file, decompressed by its ending."""
    opened: AbstractContextManager[IO[bytes]]
    if is_zstandard(file):
        import pyarrow as pa

        # Other readers end without an error where a file is truncated, or after the first of several concatenated ones.
        opened = io.BufferedReader(pa.input_stream(file, compression="zstd"))
    else:
        opened = fsspec.open(file, "rb", compression="infer")
    return opened


def _opened_to_seek(file: str) -> AbstractContextManager[IO[bytes]]:
    """The bytes of a file with random access: decompressed in memory where the stream has none."""
    if not is_zstandard(file):
        return _opened(file)
    with _opened(file) as stream:
        return io.BytesIO(stream.read())


def _require_among(text_column: str, columns: Any, file: str) -> None:
    if text_column not in columns:
        raise ValueError(
            f"text_column ({text_column!r}) is not a column of {file!r}, whose first row has {', '.join(columns)};"
            " name the column that holds the text, or choose other files by a pattern as path"
        )


def _one_line(error: BaseException) -> str:
    return _short(" ".join(str(error).split()) or type(error).__name__)


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."

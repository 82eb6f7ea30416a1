"""Files give the same documents and name the same faults, whether they are prepared or streamed."""

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import Dataset
from pyarrow import csv, parquet

from lightning_megatron.data import document_files as module
from lightning_megatron.data import load_documents, load_rows
from lightning_megatron.data.document_files import FileDocument, read_documents
from lightning_megatron.data.sources import TextStream, document_places, joined_documents, part_of, split_documents

TEXTS = ["one", "two\nlines", "", "thréé"]


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_parquet(path: Path, table: pa.Table) -> None:
    parquet.write_table(table, path, row_group_size=2)


def write_arrow(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_arrow_file(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_zstandard(path: Path, table: pa.Table) -> None:
    pack(path, lines(table.to_pylist()))


def packed(write: Callable[[Path, pa.Table], None]) -> Callable[[Path, pa.Table], None]:
    def write_packed(path: Path, table: pa.Table) -> None:
        write(path, table)
        pack(path, path.read_bytes())

    return write_packed


def pack(path: Path, data: bytes) -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as sink:
        sink.write(data)


TABLES: dict[str, tuple[str, Callable[[Path, pa.Table], None]]] = {
    "a.jsonl": ("json", lambda path, table: path.write_bytes(b"\xef\xbb\xbf" + lines(table.to_pylist())) and None),
    "a.jsonl.gz": ("json", lambda path, table: path.write_bytes(gzip.compress(lines(table.to_pylist()))) and None),
    "a.jsonl.zst": ("json", write_zstandard),
    "a.json": ("json", lambda path, table: path.write_text(json.dumps(table.to_pylist(), indent=1)) and None),
    "a.csv": ("csv", lambda path, table: csv.write_csv(table, path)),
    "a.parquet": ("parquet", write_parquet),
    "a.arrow": ("arrow", write_arrow),
    "b.arrow": ("arrow", write_arrow_file),
    "a.parquet.zst": ("parquet", packed(write_parquet)),
    "a.arrow.zst": ("arrow", packed(write_arrow)),
    "b.arrow.zst": ("arrow", packed(write_arrow_file)),
}


PLACES = {
    "a.json": [f"item {i}" for i in range(4)],
    # Behind a row: the second has two lines.
    "a.csv": ["line 2", "line 4", "line 5", "line 6"],
    **{name: [f"row {i}" for i in range(4)] for name, (kind, _) in TABLES.items() if kind in ("parquet", "arrow")},
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_give_their_rows_and_where_they_lie(name: str, tmp_path: Path) -> None:
    kind, write = TABLES[name]
    write(tmp_path / name, pa.table({"number": range(4), "text": TEXTS}))
    rows = PLACES.get(name, [f"line {i}" for i in range(1, 5)])
    assert list(read_documents(str(tmp_path / name), kind, "text")) == [
        FileDocument(text, where=f"{tmp_path / name}, {row}") for text, row in zip(TEXTS, rows, strict=True)
    ]
    assert list(TextStream(path=tmp_path / name).texts(0, None)) == TEXTS
    [fault] = [one.fault for one in read_documents(str(tmp_path / name), kind, "body")] if kind != "json" else [""]
    assert kind == "json" or fault == f"has no text ({tmp_path / name} has the columns number, text)"
    for column, shown in (
        ("body", "is not a column of|must be a column of text"),
        ("number", "must (hold|be a column of)"),
    ):
        if kind != "csv" or column == "body":
            with pytest.raises(ValueError, match=shown):
                TextStream(path=tmp_path / name, text_column=column)


BROKEN = b"".join(
    [
        b'{"text": "one"}\n',
        b'{"text"\n',
        b"\n",
        b'{"text": 5}\n',
        b'["two"]\n',
        b'{"text": null}\n',
        b'{"text": "h\\ud800lf"}\n',
        b'{"text": "caf\xe9"}\n',
        b'{"body": 1}\n',
        b"[" * 100_000 + b"\n",
        b'{"text": "end"}',
    ]
)
FAULTS = [
    "is not JSON ({file}, line 2: ",
    "is not text but 5 ({file}, line 4, 'text')",
    "is no object with a 'text' ({file}, line 5)",
    "is no text, of which half a character is missing at 1 ({file}, line 7)",
    "is not JSON ({file}, line 8: 'utf-8' codec can't decode",
    "is not JSON ({file}, line 10: ",
]


def test_each_broken_line_is_named_and_no_other_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "broken.jsonl"
    file.write_bytes(BROKEN)
    found = list(read_documents(str(file), "json", "text"))
    assert [one.text for one in found if not one.fault] == ["one", None, None, "end"]
    faults = [one.fault for one in found if one.fault]
    assert len(faults) == len(FAULTS)
    for fault, shown in zip(faults, FAULTS, strict=True):
        assert fault.startswith(shown.format(file=file)), fault
    documents = load_documents(path=file, cache_dir=tmp_path / "cache")
    assert [(one["text"], one["fault"] or "") for one in documents] == [(one.text, one.fault) for one in found]
    with pytest.raises(ValueError, match=r"rows that cannot be read: .*broken\.jsonl, line 2: "):
        load_rows(path=file, cache_dir=tmp_path / "cache")


def test_a_row_that_is_too_long_is_never_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_ROW_BYTES", 30)
    file, rows = tmp_path / "a.jsonl", [{"text": "x" * 19}, {"text": "y" * 400}, {"text": "z"}]
    assert len(json.dumps(rows[0])) == 31
    file.write_bytes(lines([{"text": "x" * 18}, *rows]))
    found = [(one.text, one.fault) for one in read_documents(str(file), "json", "text")]
    assert [text for text, _ in found] == ["x" * 18, None, None, "z"]
    assert [fault for _, fault in found] == [
        "",
        *(f"is not JSON ({file}, line {line}: a row of more than 30 bytes)" for line in (2, 3)),
        "",
    ]
    file.write_text(json.dumps(rows))
    assert [one.fault for one in read_documents(str(file), "json", "text")] == [
        f"is not JSON ({file}: a list of more than 30 bytes; write one row a line)"
    ]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow"])
def test_what_is_before_the_damage_is_read_and_the_rest_is_one_bad_document(name: str, tmp_path: Path) -> None:
    kind, write = TABLES[name]
    file, whole = tmp_path / name, tmp_path / f"whole{name[1:]}"
    texts = [f"{i} {'x' * 5000}{i * 7919 % 1000}" for i in range(400)]
    for path in (file, whole):
        write(path, pa.table({"text": texts}))
    data = bytearray(file.read_bytes())
    if kind == "parquet":
        data[len(data) // 2 : len(data) // 2 + 400] = bytes(400)
    else:
        data = data[: len(data) // 2]
    file.write_bytes(data)
    found = list(read_documents(str(file), kind, "text"))
    good = [one.text for one in found if not one.fault]
    assert good == texts[: len(good)] and len(good) < 400 and len(found) == len(good) + 1
    assert found[-1].fault.startswith(f"is damaged ({file}, behind document {len(good)} of it: ")
    assert good, "something comes before it"
    documents = load_documents(path=str(tmp_path / f"*{name[1:]}"), cache_dir=tmp_path / "cache")
    assert [text for text in documents["text"] if text is not None] == [*good, *texts]
    assert list(TextStream(path=str(tmp_path / f"*{name[1:]}"), is_logging=False).texts(0, None)) == [
        *good,
        None,
        *texts,
    ]


def test_zstandard_files_put_together_are_read_to_their_end(tmp_path: Path) -> None:
    for text in ("one", "two"):
        write_zstandard(tmp_path / f"{text}.zst", pa.table({"text": [text]}))
    both = [(tmp_path / f"{text}.zst").read_bytes() for text in ("one", "two")]
    (tmp_path / "both.jsonl.zst").write_bytes(b"".join(both))
    assert list(TextStream(path=tmp_path / "both.jsonl.zst").texts(0, None)) == ["one", "two"]
    documents = load_documents(path=tmp_path / "both.jsonl.zst", cache_dir=tmp_path / "cache")
    assert documents["text"][:] == ["one", "two"]


def test_what_reads_packed_rows_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_zstandard(tmp_path / "a.jsonl.zst", pa.table({"text": TEXTS}))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(
        ImportError, match=r"rows of .*a\.jsonl\.zst needs the package 'zstandard': pip install zstandard"
    ):
        load_rows(path=tmp_path / "a.jsonl.zst", cache_dir=tmp_path / "cache")


def test_the_location_of_a_document_is_found(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", pa.table({"text": [f"p{i}" for i in range(5)]}))
    (tmp_path / "b.jsonl").write_bytes(b"\n" + lines([{"text": f"j{i}"} for i in range(4)]))
    (tmp_path / "c.jsonl").write_bytes(lines([{"text": "k0"}]))
    (tmp_path / "d.txt").write_text("t")
    documents = load_documents(path=tmp_path, cache_dir=tmp_path / "cache")
    found = dict(zip(documents["text"], document_places(documents, range(len(documents))), strict=True))
    assert found == {
        "t": f"{tmp_path}/d.txt",
        **{f"j{i}": f"{tmp_path}/b.jsonl, line {i + 2}" for i in range(4)},
        "k0": f"{tmp_path}/c.jsonl, line 1",
        **{f"p{i}": f"{tmp_path}/a.parquet, row {i}" for i in range(5)},
    }
    for part in split_documents(documents, 0.4):
        for again in (part_of(part, range(1, len(part))), part_of(documents, range(3, 8)), part_of(documents, [4])):
            assert document_places(again, range(len(again))) == [found[text] for text in again["text"]]
            again = part_of(again, range(len(again) - 1, len(again)))
            assert document_places(again, [0]) == [found[text] for text in again["text"]]
    # What somebody else cut out begins at nobody knows which of them.
    assert document_places(documents.select(range(3, 8)), [0]) == [""]
    assert document_places(Dataset.from_dict({"text": ["a"]}), [0]) == [""]
    two = [load_documents(path=tmp_path / name, cache_dir=tmp_path / "cache") for name in ("b.jsonl", "c.jsonl")]
    assert document_places(joined_documents(two), [0, 4]) == ["", ""]


def test_a_bad_row_of_csv_leaves_the_others(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(b'text,n\nNA,1\ncaf\xe9,2\n"two\nlines",3\n1,2,3\n12,4\n,5\nbehind,6\n"never ended,7\n')
    found = list(read_documents(str(file), "csv", "text"))
    assert [one.text for one in found] == ["NA", None, "two\nlines", None, "12", "", "behind", None]
    faults = [one.fault for one in found if one.fault]
    assert faults[0] == f"is not UTF-8 text ({file}, line 3)"
    assert faults[1] == f"has 3 cells of 2 ({file}, line 6)"
    assert faults[2].startswith(f"is damaged ({file}, behind document 7 of it: line 10: ")
    documents = load_documents(path=file, cache_dir=tmp_path / "cache")
    assert documents["text"][:3] == ["NA", None, "two\nlines"]
    # Of a whole file the same texts are read, all at once.
    (tmp_path / "whole.csv").write_text("text\nNA\n12\nnull\n")
    whole = load_documents(path=tmp_path / "whole.csv", cache_dir=tmp_path / "cache")
    assert whole["text"][:] == ["NA", "12", "null"]


def test_each_file_must_have_the_column(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": "one"}]))
    (tmp_path / "b.jsonl").write_bytes(lines([{"body": "two"}]))
    with pytest.raises(ValueError, match=r"b\.jsonl"):
        load_documents(path=tmp_path, cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match=r"b\.jsonl"):
        list(TextStream(path=tmp_path).texts(0, None))


def test_rows_are_counted_over_all_parts_of_a_table(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    raw = [b"good"] * 300 + [b"caf\xe9"]
    texts = pa.Array.from_buffers(pa.string(), len(raw), pa.array(raw, pa.binary()).buffers())
    parquet.write_table(pa.table({"text": texts}), file)
    [bad] = [one.fault for one in read_documents(str(file), "parquet", "text") if one.fault]
    assert "row 300" in bad
    documents = load_documents(path=file, cache_dir=tmp_path / "cache")
    assert documents.column_names == ["text"], "nobody has seen it yet"
    assert document_places(documents, [300]) == [f"{file}, row 300"]


def test_no_location_is_reported_after_a_line_that_is_no_single_row(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    first = b'{"text": "one"}\n{"text": "caf\xe9"}\n'
    for line, num_rows in ((b'{"text": "two"} {"text": "three"}', 2), (b'{\n"text": "two"}', 1), (b"\xe9", 1)):
        file.write_bytes(first + line + b'\n{"text": "four"}\n{"text": "five"}\n')
        documents = load_documents(path=file, cache_dir=tmp_path / "cache")
        assert len(documents) == 4 + num_rows
        found = document_places(documents, range(len(documents)))
        if "fault" in documents.column_names:
            # Read line by line, and so each is where it is.
            assert line == b"\xe9" and found == [f"{file}, line {i}" if i != 3 else "" for i in range(1, 6)]
        else:
            assert found == [f"{file}, line 1", f"{file}, line 2", *[""] * (num_rows + 2)]


def test_a_disk_that_cannot_be_read_is_no_fault_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": "one"}]))

    def fails(*arguments: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setitem(module._READERS, "json", fails)
    with pytest.raises(OSError, match="Input/output error"):
        list(read_documents(str(tmp_path / "a.jsonl"), "json", "text"))


def test_a_text_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdef")
    assert list(read_documents(str(tmp_path / "a.txt"), "", "text", 6)) == [
        FileDocument("abcdef", where=str(tmp_path / "a.txt"))
    ]
    [bad] = read_documents(str(tmp_path / "a.txt"), "", "text", 5)
    assert bad == FileDocument(
        None, f"has 6 bytes, and may have 5 ({tmp_path / 'a.txt'})", where=str(tmp_path / "a.txt")
    )


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_names_bad_documents_or_refuses_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": "one"}, {"text": "é" * 30}, {"text": 5}, {"text": "two"}]))
    stream = TextStream(path=tmp_path, max_document_bytes=59)
    assert list(stream.texts(0, None)) == ["one", None, None, "two"]
    first, second = (record.message for record in caplog.records)
    position = f"({tmp_path}/a.jsonl, line 2)"
    assert f"number 1 so far, a document that has 60 bytes, above max_document_bytes (59) {position}" in first
    assert f"number 2 so far, a document that is not text but 5 ({tmp_path}/a.jsonl, line 3" in second
    caplog.clear()
    assert list(TextStream(path=tmp_path, is_logging=False).texts(0, None)) == ["one", "é" * 30, None, "two"]
    assert not caplog.records
    refusing = TextStream(path=tmp_path, bad_documents="refuse")
    with pytest.raises(ValueError, match=r"a document is not text but 5 \(.*line 3, 'text'\); mend it, or .*='skip'"):
        list(refusing.texts(0, None))


def test_many_bad_documents_do_not_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": ""}, *({"text": 5} for _ in range(200))]))
    assert list(TextStream(path=tmp_path).texts(0, None)) == ["", *[None] * 200]
    assert [record.args[0] for record in caplog.records] == [1, 2, 3, 4, 5, 8, 16, 32, 64, 128]  # type: ignore[index]


def test_a_stream_goes_on_after_bad_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(BROKEN)
    (tmp_path / "b.txt").write_text("text")
    whole = list(TextStream(path=tmp_path, is_logging=False).texts(0, None))
    for position in range(1, len(whole)):
        stream = TextStream(path=tmp_path, is_logging=False)
        begun = stream.texts(0, None)
        assert [next(begun) for _ in range(position)] == whole[:position]
        assert list(TextStream(path=tmp_path, is_logging=False).texts(0, stream.state_dict())) == whole[position:]

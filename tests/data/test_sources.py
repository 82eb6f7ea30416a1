"""Sources: which documents a path, a name or nothing at all stands for, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_megatron.data import load_documents, split_documents
from lightning_megatron.data.sources import (
    corpus_fingerprint,
    document_places,
    files_of,
    joined_documents,
    standard_library_files,
)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Five files with text, of which two hold rows, and three that are no part of a corpus."""
    root = tmp_path / "corpus"
    (root / "deep" / "er").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "b.txt").write_text("second\r\nfile\n", newline="")
    (root / "a[1].md").write_text("first file")
    (root / "deep" / "er" / "c.py").write_text("print('thírd')", encoding="utf-8")
    (root / "deep" / "rows[1].jsonl").write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(3)))
    (root / "deep" / "table.csv").write_text("text,number\ncell,1\n")
    (root / "empty.txt").write_text("")
    (root / "picture.png").write_bytes(b"\x89PNG")
    (root / ".git" / "hidden.txt").write_text("hidden")
    return root


def texts(cache: Path, **arguments: object) -> list[str]:
    return list(load_documents(cache_dir=cache, **arguments)["text"])  # type: ignore[arg-type]


def test_a_directory_gives_its_text_files_in_order_then_its_rows(corpus: Path, tmp_path: Path) -> None:
    expected = ["first file", "second\nfile\n", "print('thírd')", "cell", "row 0", "row 1", "row 2"]
    assert texts(tmp_path / "cache", path=corpus) == expected


def test_a_file_and_a_pattern_give_what_they_name_whatever_its_ending(corpus: Path, tmp_path: Path) -> None:
    (corpus / "notes.unknown").write_text("named")
    assert texts(tmp_path / "cache", path=corpus / "notes.unknown") == ["named"]
    assert texts(tmp_path / "cache", path=str(corpus / "*.unk*")) == ["named"]
    assert texts(tmp_path / "cache", path=str(corpus / "**" / "*.py")) == ["print('thírd')"]
    assert texts(tmp_path / "cache", path=corpus / "a[1].md") == ["first file"]


def test_a_changed_file_is_reread_and_an_unchanged_corpus_keeps_its_fingerprint(corpus: Path, tmp_path: Path) -> None:
    before = load_documents(path=corpus / "b.txt", cache_dir=tmp_path / "cache")
    again = load_documents(path=corpus / "b.txt", cache_dir=tmp_path / "cache")
    stat = (corpus / "b.txt").stat()
    (corpus / "b.txt").write_text("of equal size")
    os.utime(corpus / "b.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert (corpus / "b.txt").stat().st_size == stat.st_size
    after = load_documents(path=corpus / "b.txt", cache_dir=tmp_path / "cache")
    assert corpus_fingerprint(before) == corpus_fingerprint(again) != corpus_fingerprint(after)
    assert list(after["text"]) == ["of equal size"]


def test_where_documents_lie_is_no_part_of_what_is_joined(corpus: Path, tmp_path: Path) -> None:
    parts = [load_documents(path=corpus / name, cache_dir=tmp_path / "cache") for name in ("b.txt", "a[1].md")]
    joined = joined_documents(parts)
    assert list(joined["text"]) == ["second\nfile\n", "first file"] and document_places(joined, [0, 1]) == ["", ""]
    assert [document_places(part, [0]) for part in parts] == [[f"{corpus}/b.txt"], [f"{corpus}/a[1].md"]]
    for part in parts:
        part.info.description = ""
    assert corpus_fingerprint(joined_documents(parts)) == corpus_fingerprint(joined)
    parts[0].info.description = "somebody's own"
    assert joined_documents(parts).info.description == "somebody's own"


def test_another_column_replaces_text(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"body": "the text", "text": 3}) + "\n")
    assert texts(tmp_path / "cache", path=tmp_path / "rows.jsonl", text_column="body") == ["the text"]
    with pytest.raises(ValueError, match=r"text_column \('text'\) must hold text, and a document is not text but 3 "):
        load_documents(path=tmp_path / "rows.jsonl", cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match=r"text_column \('title'\) is not a column of .*rows.jsonl.* body, text"):
        load_documents(path=tmp_path / "rows.jsonl", text_column="title", cache_dir=tmp_path / "cache")


def test_a_file_that_is_not_utf8_is_a_document_with_a_fault(corpus: Path, tmp_path: Path) -> None:
    (corpus / "latin.txt").write_bytes("café".encode("latin-1"))
    documents = load_documents(path=str(corpus / "*.txt"), cache_dir=tmp_path / "cache")
    assert documents["text"][:] == ["second\nfile\n", None]
    assert documents["fault"][:] == [None, f"is not UTF-8 text ({corpus / 'latin.txt'}, byte 3)"]
    with pytest.raises(ValueError, match=r"none of the 1 documents of .* is not UTF-8 text.*latin\.txt"):
        load_documents(path=corpus / "latin.txt", cache_dir=tmp_path / "cache")


def test_two_sources_at_once_are_refused(corpus: Path) -> None:
    with pytest.raises(ValueError, match=r"path \(.*\) and dataset \('a/b'\) are both given.*one source"):
        load_documents(path=corpus, dataset="a/b")


def test_a_missing_path_is_refused_with_the_ways_out() -> None:
    with pytest.raises(ValueError, match=r"path \('/no/such/corpus'\) does not exist; give a file, a directory"):
        load_documents(path="/no/such/corpus")


@pytest.mark.parametrize("pattern", ["", "*.zzz"])
def test_a_path_without_text_is_refused(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"leads to no file with something in it.*known ending"):
        load_documents(path=str(tmp_path / pattern))


def test_rows_without_a_row_are_refused(tmp_path: Path) -> None:
    (tmp_path / "head.csv").write_text("text\n")
    with pytest.raises(ValueError, match=r"csv files at '.*head\.csv' hold no document"):
        load_documents(path=tmp_path / "head.csv", cache_dir=tmp_path / "cache")


def test_a_split_of_files_is_refused(corpus: Path) -> None:
    with pytest.raises(ValueError, match=r"split \('test'\) chooses a part of a dataset, but path"):
        load_documents(path=corpus, split="test")


def test_broken_rows_are_refused_by_the_name_of_their_files(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{broken\n")
    with pytest.raises(ValueError, match=r"none of the 1 documents of .* can be read: .*rows\.jsonl, line 1: "):
        load_documents(path=tmp_path / "rows.jsonl", cache_dir=tmp_path / "cache")


def test_a_dataset_saved_to_disk_is_loaded_by_its_directory(corpus: Path, tmp_path: Path) -> None:
    load_documents(path=corpus / "b.txt", cache_dir=tmp_path / "cache").save_to_disk(str(tmp_path / "saved"))
    assert texts(tmp_path / "cache", dataset=str(tmp_path / "saved")) == ["second\nfile\n"]


def test_a_directory_of_files_is_a_dataset_too(corpus: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "train.jsonl").write_text(json.dumps({"text": "one"}) + "\n")
    assert texts(tmp_path / "cache", dataset=str(rows)) == ["one"]
    with pytest.raises(ValueError, match=r"dataset \(.*\) with split \('dev'\) could not be loaded"):
        load_documents(dataset=str(rows), split="dev", cache_dir=tmp_path / "cache")


def test_the_standard_library_gives_over_a_hundred_documents_and_none_of_its_tests(tmp_path: Path) -> None:
    documents = load_documents(cache_dir=tmp_path)
    files = standard_library_files()
    assert 100 < len(documents) <= len(files)
    assert files == sorted(files)
    left_out = {"site-packages", "test", "tests", "idle_test"}
    root = Path(os.__file__).parent
    assert not [file for file in files if left_out & set(file.relative_to(root).parts)]
    assert Path(os.__file__) in files


def test_held_out_documents_are_spread_over_the_corpus_and_no_longer_trained_on(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"{i}"}) + "\n" for i in range(20)))
    documents = load_documents(path=tmp_path / "rows.jsonl", cache_dir=tmp_path / "cache")
    train, held_out = split_documents(documents, 0.1)
    assert list(held_out["text"]) == ["5", "15"]
    assert sorted([*train["text"], *held_out["text"]]) == sorted(documents["text"])
    assert corpus_fingerprint(train) != corpus_fingerprint(held_out)
    with pytest.raises(ValueError, match=r"held_out_fraction \(1\.5\)"):
        split_documents(documents, 1.5)


def test_files_are_sorted_whatever_the_order_on_disk(corpus: Path) -> None:
    assert files_of(corpus) == sorted(files_of(corpus))
    assert len(files_of(corpus)) == 5


def test_importing_the_room_imports_no_third_party_behind_a_door() -> None:
    # Lightning comes first: torchmetrics takes in transformers, and with it tokenizers, where they are installed.
    program = (
        "import sys, lightning; before = {*sys.modules}; import lightning_megatron.data; "
        "sys.exit(bool({'datasets', 'tokenizers'} & ({*sys.modules} - before)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_an_absent_package_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch, corpus: Path) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"'datasets': pip install 'lightning_megatron\[data\]'"):
        load_documents(path=corpus)

"""`lightning-megatron prepare-data`: the files it writes, what it says, and its mistakes."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from lightning_megatron.cli import token_preparation
from lightning_megatron.cli.main import main
from lightning_megatron.data import MegatronCorpus, load_tokenizer

ROWS = [{"text": "1 2 3", "title": "9"}, {"text": "", "title": "8 8"}, {"text": "4 5\n6", "title": "7"}]


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def prepare(*options: str) -> int:
    return main(["prepare-data", *options])


FIXED = ("--path", "rows.jsonl", "--cache-directory", "cache", "--workers", "1", "--output", "out/a")
NUMBERS = (*FIXED, "--tokenizer", "null:50")


def shown(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line of a command that ends with a mistake."""
    assert prepare(*options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[-1].startswith("error: ")
    return lines[-1]


def test_tokens_of_the_text_are_written_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare(*NUMBERS) == 0
    captured = capsys.readouterr()
    assert MegatronCorpus("out/a").tokens.tolist() == [1, 2, 3, 50, 4, 5, 6, 50]
    first, second = captured.out.splitlines()
    assert first.startswith("out/a.bin and out/a.idx: 3 documents, 8 tokens of uint16, from 0.0 MB of text in ")
    assert second == "1 documents are empty"
    assert "3/3" in captured.err and "tokens/s" in captured.err and "MB/s" in captured.err


def test_options_change_what_is_written() -> None:
    assert prepare(*NUMBERS, "--no-append-eod", "--split-sentences") == 0
    corpus = MegatronCorpus("out/a")
    assert [corpus.sequence(i).tolist() for i in range(corpus.num_sequences)] == [[1, 2, 3], [4, 5], [6]]


def test_each_of_several_columns_has_its_own_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare(*NUMBERS, "--text-column", "text", "title", "--json") == 0
    records: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [(record["column"], record["output"], record["num_tokens"]) for record in records] == [
        ("text", "out/a_text", 8),
        ("title", "out/a_title", 7),
    ]
    assert MegatronCorpus("out/a_title").tokens.tolist() == [9, 50, 8, 8, 50, 7, 50]


def test_a_tokenizer_is_trained_and_written_next_to_the_tokens() -> None:
    assert prepare(*FIXED, "--train-vocab-size", "258", "--special-tokens", "[MASK]") == 0
    tokenizer = load_tokenizer("out/a.tokenizer.json")
    assert tokenizer.vocab_size == 258 and tokenizer.token_id("[MASK]") is not None
    assert tokenizer.decode(MegatronCorpus("out/a").tokens) == "1 2 3<|endoftext|>4 5\n6<|endoftext|>"


def test_arrow_is_a_data_set() -> None:
    assert prepare(*NUMBERS, "--format", "arrow") == 0
    assert datasets.load_from_disk("out/a")["input_ids"][:] == [[1, 2, 3, 50], [], [4, 5, 6, 50]]


def test_every_mistake_is_reported_at_once(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out/a.idx").write_text("")
    line = shown(
        capsys,
        *("--path", "nowhere", "--output", "out/a", "--workers", "-1", "--max-document-bytes", "0"),
        *("--train-vocab-size", "257", "--special-tokens", "x", "--end-of-text", "y", "--text-column", "a", "a"),
    )
    for fault in (
        "path ('nowhere') does not exist",
        "--workers (-1) must be at least 0",
        "--max-document-bytes (0) must be at least 1",
        "--train-vocab-size (257) must be at least 258",
        "--end-of-text acts on --tokenizer alone",
        "names a column twice",
    ):
        assert fault in line
    assert "out/a.idx exists; remove it, or name another" in shown(capsys, *NUMBERS)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (FIXED, "one of --tokenizer and --train-vocab-size must be given"),
        ((*NUMBERS, "--train-vocab-size", "300"), "one of --tokenizer and --train-vocab-size must be given"),
        ((*NUMBERS, "--dataset", "x"), "are both given; one source is read"),
        ((*NUMBERS, "--special-tokens", "x"), "--special-tokens acts on --train-vocab-size alone"),
        ((*NUMBERS, "--format", "arrow", "--split-sentences"), "--split-sentences is for --format megatron"),
        ((*NUMBERS, "--text-column", "body"), "is not a column of"),
        ((*FIXED, "--tokenizer", "nowhere.json"), "does not exist; give a tokenizer.json"),
        ((*FIXED, "--tokenizer", "null:5", "--bad-documents", "refuse"), "document 2 is refused by the tokenizer"),
        ((*NUMBERS, "--output", "out/a.bin"), "is the path without its ending: out/a"),
        (
            (*FIXED, "--train-vocab-size", "300", "--output", "empty.jsonl/a"),
            "error: --output (empty.jsonl/a) cannot be written: Not a directory; name a path in another folder",
        ),
        ((*NUMBERS, "--path", "empty.jsonl"), "leads to no file with something in it"),
        ((*NUMBERS, "--path", "broken.jsonl", "--bad-documents", "refuse"), "broken.jsonl, line 2: "),
        (
            (*FIXED, "--train-vocab-size", "257", "--max-document-bytes", "4", "--bad-documents", "refuse"),
            "rows.jsonl, line 1); document 2 has 5 bytes, above max_document_bytes (4) (",
        ),
        (
            (*FIXED, "--tokenizer", "null:1"),
            "none of the 3 documents has a token: 1 are empty, and 2 are bad: document 0",
        ),
        ((*NUMBERS, "--text-column", "text", "body", "name"), "('body') is not a column of"),
        ((*NUMBERS, "--text-column", "text", "body", "name"), "('name') is not a column of"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], folder: Path, options: tuple[str, ...], fault: str
) -> None:
    (folder / "empty.jsonl").write_text("")
    (folder / "broken.jsonl").write_text('{"text": "1"}\n{"text"')
    assert fault in shown(capsys, *options)
    assert not list(folder.glob("out/*"))


def test_bad_documents_are_counted_and_named(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "more.jsonl").write_text('{"text": "7 8 9"}\n{"text"\n{"text": 5}\n["text"]\n{"text": "1"}')
    (folder / "latin.txt").write_bytes(b"1 2\xe9")
    assert prepare(*NUMBERS, "--path", "*.[jt]*", "--max-document-bytes", "4") == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"7 documents were left without tokens: document 0 is not UTF-8 text ({folder}/latin.txt, byte 3);"
        f" document 1 has 5 bytes, above max_document_bytes (4) ({folder}/more.jsonl, line 1);"
        f" document 2 is not JSON ({folder}/more.jsonl, line 2: Expecting ':' delimiter: line 1 column 8 (char 7));"
        f" document 3 is not text but 5 ({folder}/more.jsonl, line 3, 'text');"
        f" document 4 is no object with a 'text' ({folder}/more.jsonl, line 4); ...; 1 documents are empty"
    )


def test_an_output_of_a_run_that_was_ended_is_gone_on_with(folder: Path) -> None:
    (folder / "out/a.shards-0-1").mkdir(parents=True)
    (folder / "out/a.bin").write_bytes(b"half")
    assert prepare(*NUMBERS) == 0
    assert len(MegatronCorpus("out/a").tokens) == 8


def test_a_tokenizer_that_other_token_files_may_need_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    def ends(*arguments: Any, **options: Any) -> None:
        (folder / "out/a.shards-0-1").rmdir()
        raise ValueError("none has a token")

    trained = (*FIXED, "--train-vocab-size", "257")
    assert prepare(*trained) == 0
    made = (folder / "out/a.tokenizer.json").read_bytes()
    for name in ("a.bin", "a.idx"):
        (folder / "out" / name).rename(folder / name)
    capsys.readouterr()
    assert shown(capsys, *trained) == "error: --output: out/a.tokenizer.json exists; remove it, or name another"
    # That a run left which was ended.
    (folder / "out/a.shards-0-1").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(token_preparation, "write_tokens", ends)
        assert shown(capsys, *trained) == "error: none has a token"
    assert (folder / "out/a.tokenizer.json").read_bytes() == made
    (folder / "out/a.shards-0-1").mkdir()
    assert prepare(*trained) == 0
    assert (folder / "out/a.bin").read_bytes() == (folder / "a.bin").read_bytes()


@pytest.mark.parametrize(
    ("error", "code", "output"),
    [
        (OSError(28, "No space left on device"), 2, "error: the disk is full; what is finished is kept"),
        (PermissionError(13, "Permission denied"), 2, "error: [Errno 13] Permission denied"),
        (KeyboardInterrupt(), 130, "stopped; the same command goes on with what is finished"),
    ],
)
def test_what_ends_the_work_is_printed_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    error: BaseException,
    code: int,
    output: str,
) -> None:
    def ends(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(token_preparation, "write_tokens", ends)
    for options in (NUMBERS, (*FIXED, "--train-vocab-size", "257")):
        assert prepare(*options) == code
        captured = capsys.readouterr()
        assert output in captured.err and "Traceback" not in captured.err
    # Else the same command would find it there.
    assert not list(folder.glob("out/*"))

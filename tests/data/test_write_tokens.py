"""Token files do not depend on shards, processes or on being killed; bad documents are counted and named."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from lightning_megatron.data import MegatronCorpus, Tokenizer, prepare
from lightning_megatron.data.corpus_shards import Counts, DocumentForm, usable_texts
from lightning_megatron.data.megatron_files import MegatronWriter
from lightning_megatron.data.null_tokenizer import NullTokenizer
from lightning_megatron.data.prepare import write_tokens

TEXTS = ["1 2 3", "4", "", "5 6. 7\n8 9", "10 11 12 13", "3 3 3. 4 4.", "14", "15 16"]
FORM = DocumentForm()


class Words(NullTokenizer):
    """Numbers, full stops and all; something happens at a call."""

    def __init__(self, at_call: int = -1, happens: Callable[[], Any] = lambda: None) -> None:
        super().__init__(50)
        self.calls = 0
        self.at_call, self.happens = at_call, happens

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        if self.calls == self.at_call:
            self.happens()
        self.calls += 1
        return super().encode([text.replace(".", "") for text in texts])


@pytest.fixture
def documents(tmp_path: Path) -> Any:
    return datasets.Dataset.from_dict({"text": TEXTS})


def written(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.fixture
def expected(documents: Any, tmp_path: Path) -> tuple[bytes, bytes]:
    """Of one process and one shard."""
    write_tokens(documents, Words(), tmp_path / "expected", form=FORM, shard_bytes=10**9)
    return written(tmp_path / "expected")


def ended(run: Callable[[], object]) -> int | None:
    """The exit code of a process that runs it."""
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(300)
    return process.exitcode


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_each_document_and_its_end(expected: object, tmp_path: Path) -> None:
    corpus = MegatronCorpus(tmp_path / "expected")
    assert corpus.tokens.tolist() == [
        *(1, 2, 3, 50, 4, 50, 5, 6, 7, 8, 9, 50, 10, 11, 12, 13, 50, 3, 3, 3, 4, 4, 50, 14, 50, 15, 16, 50)
    ]
    assert corpus.document_sizes().tolist() == [4, 2, 0, 6, 5, 6, 2, 3]
    assert left_in(tmp_path) == ["expected.bin", "expected.idx"]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_shards_and_processes_do_not_change_a_byte(
    documents: Any, expected: object, tmp_path: Path, num_workers: int
) -> None:
    for shard_bytes in (1, 20):
        prefix = tmp_path / f"of{shard_bytes}"
        seen: list[Counts] = []
        counts = write_tokens(
            documents,
            Words(),
            prefix,
            form=FORM,
            num_workers=num_workers,
            shard_bytes=shard_bytes,
            watch=seen.append,
        )
        assert written(prefix) == expected
        total = sum(len(text.encode()) for text in TEXTS)
        assert counts == Counts(num_documents=8, num_bytes=total, num_tokens=28, num_empty=1)
        assert seen[-1] == counts
        assert [one.num_documents for one in seen] == sorted(one.num_documents for one in seen)
    assert left_in(tmp_path) == ["expected.bin", "expected.idx", "of1.bin", "of1.idx", "of20.bin", "of20.idx"]


def test_who_is_killed_at_any_document_goes_on_there(documents: Any, expected: object, tmp_path: Path) -> None:
    for at_call in range(len(TEXTS)):
        prefix = tmp_path / f"at{at_call}"
        killed = Words(at_call, lambda: os.kill(os.getpid(), signal.SIGKILL))
        assert ended(lambda: write_tokens(documents, killed, prefix, form=FORM, shard_bytes=1)) == -signal.SIGKILL  # noqa: B023
        assert not Path(f"{prefix}.idx").exists()
        again = Words()
        seen: list[Counts] = []
        write_tokens(documents, again, prefix, form=FORM, shard_bytes=1, watch=seen.append)
        assert again.calls == len(TEXTS) - at_call, "what was finished is not tokenized again"
        assert seen[0].num_documents == at_call + 1, "and is counted"
        assert written(prefix) == expected
        assert not list(tmp_path.glob(f"{prefix.name}.shards*"))


@pytest.mark.parametrize("position", ["append", "replace", "rename", "rmtree"])
def test_who_is_killed_while_shards_are_concatenate_goes_on(
    documents: Any, expected: object, tmp_path: Path, position: str
) -> None:
    owner = {"append": MegatronWriter, "replace": Path, "rename": Path, "rmtree": prepare.shutil}[position]
    for at_call in range(3):
        prefix = tmp_path / f"at{at_call}"

        def run(prefix: Path = prefix, at_call: int = at_call) -> None:
            calls, real = iter(range(100)), getattr(owner, position)

            def dies(*arguments: Any, **options: Any) -> Any:
                if next(calls) == at_call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **options)

            setattr(owner, position, dies)
            write_tokens(documents, Words(), prefix, form=FORM, shard_bytes=1)

        code = ended(run)
        assert code == -signal.SIGKILL or (code == 0 and at_call > 0)
        write_tokens(documents, Words(), prefix, form=FORM, shard_bytes=1)
        assert written(prefix) == expected
        assert not list(tmp_path.glob(f"{prefix.name}.shards*[0-9]"))


def test_no_process_outlives_who_started_it(documents: Any, expected: object, tmp_path: Path) -> None:
    (tmp_path / "seen").mkdir()

    def wait_here() -> None:
        (tmp_path / "seen" / str(os.getpid())).touch()
        # Or one of them does all the work before the other is there.
        while len(left_in(tmp_path / "seen")) < 2:
            time.sleep(0.01)
        time.sleep(0.3)

    def run() -> None:
        write_tokens(documents, Words(0, wait_here), tmp_path / "a", form=FORM, num_workers=2, shard_bytes=1)

    parent = multiprocessing.get_context("fork").Process(target=run)
    parent.start()
    deadline = time.monotonic() + 300
    while len(workers := left_in(tmp_path / "seen")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    parent.kill()
    parent.join()
    while any(Path("/proc", pid).exists() for pid in workers):
        assert time.monotonic() < deadline, "they look for their parent after every batch"
        time.sleep(0.05)
    write_tokens(documents, Words(), tmp_path / "a", form=FORM, shard_bytes=1)
    assert written(tmp_path / "a") == expected


def test_a_process_that_is_ended_is_reported_and_what_is_finished_is_kept(
    documents: Any, expected: object, tmp_path: Path
) -> None:
    dying = Words(4, lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError, match=r"exit code -9; .* memory ran out: take fewer workers"):
        write_tokens(documents, dying, tmp_path / "a", form=FORM, num_workers=1, shard_bytes=1)
    assert multiprocessing.active_children() == []
    again = Words()
    write_tokens(documents, again, tmp_path / "a", form=FORM, shard_bytes=1)
    assert again.calls == 4
    assert written(tmp_path / "a") == expected


def full() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_full_disk_is_reported_and_what_is_finished_is_kept(
    documents: Any, expected: object, tmp_path: Path, num_workers: int
) -> None:
    with pytest.raises(OSError, match="No space left"):
        write_tokens(documents, Words(1, full), tmp_path / "a", form=FORM, num_workers=num_workers, shard_bytes=1)
    (folder,) = tmp_path.glob("a.shards-*")
    assert list(folder.glob("*.json")) and not list(folder.glob(".*"))
    write_tokens(documents, Words(), tmp_path / "a", form=FORM, shard_bytes=1)
    assert written(tmp_path / "a") == expected


def test_shards_that_an_older_version_left_in_another_form_are_not_read(
    documents: Any, expected: object, tmp_path: Path
) -> None:
    with pytest.raises(OSError, match="No space left"):
        write_tokens(documents, Words(4, full), tmp_path / "a", form=FORM, shard_bytes=1)
    (folder,) = tmp_path.glob("a.shards-*")
    # The first form had no number in its name, and bad documents as they are listed.
    old = folder.rename(folder.with_name(folder.name.removesuffix(f"-{prepare._SHARDS_FORM}")))
    counts = json.loads((old / "0000.json").read_text())
    (old / "0000.json").write_text(json.dumps({**counts, "bad": ["document 0 is not UTF-8 at byte 1"]}))
    again = Words()
    assert write_tokens(documents, again, tmp_path / "a", form=FORM, shard_bytes=1).num_bad == 0
    assert again.calls == len(TEXTS) and written(tmp_path / "a") == expected
    assert list(tmp_path.glob("a.shards-*")) == [old]


def bad_documents(folder: Path) -> Any:
    lines = [b'{"text": "1"}', b'{"text": ""}', b'{"text": "2\xff"}', b'{"text": null}', b'{"text": "60"}']
    lines += [b'{"text": "' + b"7 " * 100 + b'"}', b'{"text": "3"}']
    (folder / "rows.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    names = [str(folder / "rows.jsonl")]
    return datasets.load_dataset("json", data_files=names, split="train", cache_dir=str(folder / "cache"))


@pytest.mark.parametrize(("num_workers", "shard_bytes"), [(0, 10**9), (0, 1), (2, 1)])
def test_bad_documents_are_named_and_left_without_tokens(tmp_path: Path, num_workers: int, shard_bytes: int) -> None:
    rows = bad_documents(tmp_path)
    form = DocumentForm(max_document_bytes=199)
    counts = write_tokens(rows, Words(), tmp_path / "a", form=form, num_workers=num_workers, shard_bytes=shard_bytes)
    assert (counts.num_documents, counts.num_empty, counts.num_bad, counts.num_tokens) == (7, 2, 3, 4)
    assert [str(one) for one in counts.bad] == [
        "document 2 is not UTF-8 at byte 1",
        "document 4 is refused by the tokenizer: word 0 ('60') must be a number from 0 to 49 for a null tokenizer; give"
        " text of numbers, or another tokenizer",
        "document 5 has 200 bytes, above max_document_bytes (199)",
    ]
    assert MegatronCorpus(tmp_path / "a").document_sizes().tolist() == [2, 0, 0, 0, 0, 0, 2]
    assert list(usable_texts(rows, 199)) == ["1", "", "60", "3"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_documents_are_a_fault_where_they_are_refused(tmp_path: Path, num_workers: int) -> None:
    form = DocumentForm(max_document_bytes=199, bad_documents="refuse")
    with pytest.raises(ValueError, match=r"document 2 is not UTF-8 at byte 1; document 4 .*; document 5 has 200 bytes"):
        write_tokens(bad_documents(tmp_path), Words(), tmp_path / "a", form=form, num_workers=num_workers)
    assert left_in(tmp_path) == ["cache", "rows.jsonl"]


def test_a_document_as_large_as_may_be_is_no_bad_one(tmp_path: Path) -> None:
    counts = write_tokens(bad_documents(tmp_path), Words(), tmp_path / "a", form=DocumentForm(max_document_bytes=200))
    assert counts.num_bad == 2


def test_sentences_are_sequences_and_the_last_has_the_end(documents: Any, tmp_path: Path) -> None:
    write_tokens(documents, Words(), tmp_path / "a", form=DocumentForm(sentences=True))
    corpus = MegatronCorpus(tmp_path / "a")
    sequences = [corpus.sequence(i).tolist() for i in range(corpus.num_sequences)]
    assert sequences[2:5] == [[5, 6], [7], [8, 9, 50]]
    assert corpus.document_bounds.tolist() == [0, 1, 2, 2, 5, 6, 8, 9, 10]
    write_tokens(documents, Words(), tmp_path / "b", form=DocumentForm(sentences=True, has_ends=False))
    assert 50 not in MegatronCorpus(tmp_path / "b").tokens
    assert MegatronCorpus(tmp_path / "b").num_sequences == corpus.num_sequences


@pytest.mark.parametrize("shard_bytes", [1, 10**9])
def test_arrow_has_the_documents_of_the_token_files(
    documents: Any, expected: object, tmp_path: Path, shard_bytes: int
) -> None:
    write_tokens(documents, Words(), tmp_path / "a", form=FORM, token_format="arrow", shard_bytes=shard_bytes)
    rows = datasets.load_from_disk(str(tmp_path / "a"))
    corpus = MegatronCorpus(tmp_path / "expected")
    assert [len(ids) for ids in rows["input_ids"]] == corpus.document_sizes().tolist()
    assert np.concatenate(rows.with_format("numpy")["input_ids"][:]).tolist() == corpus.tokens.tolist()
    assert "uint16" in str(rows.features["input_ids"])
    assert left_in(tmp_path) == ["a", "expected.bin", "expected.idx"]


def test_other_text_tokenizer_or_form_does_not_go_on_with_the_shards_of_one(documents: Any, tmp_path: Path) -> None:
    killed = Words(4, lambda: os.kill(os.getpid(), signal.SIGKILL))
    ended(lambda: write_tokens(documents, killed, tmp_path / "a", form=FORM, shard_bytes=1))
    others: Iterator[tuple[Any, Tokenizer, DocumentForm]] = iter(
        [
            (documents, NullTokenizer(60), FORM),
            (documents.map(lambda row: {"text": row["text"][:1]}), Words(), FORM),
            (documents, Words(), DocumentForm(has_ends=False)),
        ]
    )
    for number, (texts, tokenizer, form) in enumerate(others):
        if isinstance(tokenizer, Words):
            write_tokens(texts, tokenizer, tmp_path / "a", form=form, shard_bytes=1)
            assert tokenizer.calls == len(TEXTS), number
            for path in tmp_path.glob("a.*[nx]"):
                path.unlink()
        else:
            assert prepare._key(texts, tokenizer, form) != prepare._key(documents, Words(), FORM)

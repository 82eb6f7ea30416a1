"""Bars of long work: shown to whoever watches, after five seconds, and to nobody else."""

import io
from pathlib import Path

import pytest
import torch

from lightning_megatron import progress
from lightning_megatron.checkpoint import Piece, save
from lightning_megatron.checkpoint.verify import verify
from lightning_megatron.data import load_documents, prepare_corpus, train_tokenizer
from lightning_megatron.mesh import Mesh


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, delay: float) -> str:
    monkeypatch.setattr(progress, "_DELAY_SECONDS", delay)
    monkeypatch.setattr("sys.stderr", stream)
    with progress.progress_bar("verifying", "chunks") as watch:
        for number in range(1, 5):
            watch(number, 4)
    return stream.getvalue()


def test_a_bar_is_for_long_work_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "verifying: 100%" in shown(monkeypatch, Terminal(), 0.0) and "4/4" in shown(monkeypatch, Terminal(), 0.0)
    assert shown(monkeypatch, Terminal(), 60.0) == shown(monkeypatch, io.StringIO(), 0.0) == ""


def test_verification_tells_each_chunk_that_is_read(tmp_path: Path) -> None:
    pieces = {name: Piece.unsharded(torch.ones(4)) for name in ("a", "b", "c")}
    save(str(tmp_path / "one.ckpt"), pieces, {}, world=Mesh.single().world)
    seen: list[tuple[int, int]] = []
    assert verify(str(tmp_path / "one.ckpt"), watch=lambda *counts: seen.append(counts)) == []
    assert seen == [(number, len(seen)) for number in range(1, len(seen) + 1)] and len(seen) >= 3


def test_ranges_of_rows_are_told_when_they_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0.0)
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    found = list(progress.watched_ranges(7, 3, what="tokenizing", unit="rows"))
    assert found == [range(3), range(3, 6), range(6, 7)]
    assert "tokenizing: 100%" in stream.getvalue() and "7/7" in stream.getvalue()


def test_tokenizing_for_a_run_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0.0)
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    texts = ["one two", "three", "four"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    documents = load_documents(path=str(tmp_path / "*.txt"), cache_dir=tmp_path / "cache")
    prepare_corpus(documents, train_tokenizer(texts, 300, tmp_path / "tokenizer.json"), tmp_path / "cache")
    assert "tokenizing: 100%" in stream.getvalue() and " 3/3 [" in stream.getvalue()

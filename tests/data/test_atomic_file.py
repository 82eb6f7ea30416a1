"""A file appears whole or not at all."""

from pathlib import Path

import pytest

from lightning_megatron.data.atomic_file import atomic_write


def test_the_file_is_not_seen_before_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    with atomic_write(path) as temporary:
        temporary.write_text("all")
        assert not path.exists()
    assert path.read_text() == "all"
    assert list(path.parent.iterdir()) == [path]


def test_a_failure_leaves_the_old_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError), atomic_write(path) as temporary:
        temporary.write_text("new é", encoding="ascii")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_at_once_do_not_share_a_temporary_file(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "file") as first, atomic_write(tmp_path / "file") as second:
        assert first != second
        first.write_text("1")
        second.write_text("2")
    assert (tmp_path / "file").read_text() == "1"

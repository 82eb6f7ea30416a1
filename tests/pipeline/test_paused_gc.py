"""The garbage collector stands still while a plan is made, and is as before afterwards."""

import gc
from collections.abc import Iterator

import pytest

from lightning_megatron.pipeline.paused_gc import paused_gc


@pytest.fixture(autouse=True)
def collector_as_it_was() -> Iterator[None]:
    is_enabled = gc.isenabled()
    yield
    (gc.enable if is_enabled else gc.disable)()


@paused_gc()
def is_collecting() -> bool:
    return gc.isenabled()


def test_it_stands_still_inside_and_goes_on_afterwards() -> None:
    gc.enable()
    with paused_gc():
        assert not gc.isenabled()
        assert not is_collecting()
        assert not gc.isenabled()
    assert gc.isenabled()
    assert not is_collecting()
    assert gc.isenabled()


def test_it_goes_on_after_an_error() -> None:
    gc.enable()
    with pytest.raises(ValueError, match="inside"), paused_gc():
        raise ValueError("inside")
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_off() -> None:
    gc.disable()
    assert not is_collecting()
    assert not gc.isenabled()

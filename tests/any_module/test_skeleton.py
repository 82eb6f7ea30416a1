"""What a layer returns is taken apart and put together again as it was."""

import gc
import weakref

import pytest
import torch

from lightning_megatron.any_module.skeleton import put_together, taken_apart

A, B = torch.ones(2), torch.zeros(3)


@pytest.mark.parametrize("value", [A, (A,), (A, None, (B, 2)), [A, {"b": B, "c": True}], {"x": (A, "y", 1.5)}])
def test_the_parts_make_the_whole(value: object) -> None:
    text, tensors = taken_apart(value)
    assert str(put_together(text, tensors)) == str(value)
    assert put_together(text, [tensor + 1 for tensor in tensors]) is not value


def test_what_cannot_be_written_is_named() -> None:
    with pytest.raises(TypeError, match="set"):
        taken_apart((A, {1}))


def test_tensors_go_with_the_last_who_has_them() -> None:
    # Between two looks for garbage a stage would hold what it received.
    gc.collect()
    gc.disable()
    try:
        given = torch.ones(2)
        held = weakref.ref(given)
        text, tensors = taken_apart((given, None))
        made = put_together(text, tensors)
        del given, tensors
        assert held() is made[0]
        del made
        assert held() is None
    finally:
        gc.enable()

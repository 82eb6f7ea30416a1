"""Blocks come to flash attention as sequences with bounds; its part is played here by plain products."""

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from lightning_megatron.context.attention_step import AttentionStep, BackwardInputs
from lightning_megatron.context.context_layout import MaskSpec, cut
from lightning_megatron.context.flash import CAUSAL, FlashAttention, FlashVarlen, VarlenSequences
from lightning_megatron.context.fused_attention import CpuAttention, MemoryEfficientAttention
from tests.context.dense import Case, by_kernels, dense
from tests.context.plain_varlen import PlainVarlen
from tests.context.test_kernel import CASES


@settings(max_examples=50)
@given(case=CASES)
def test_parts_add_up_to_the_attention_of_one_device(case: Case) -> None:
    errors = by_kernels(case, torch.float64, FlashAttention(PlainVarlen(), CpuAttention())).errors(dense(case))
    assert max(errors.values()) < 1e-10


@pytest.mark.parametrize(
    "mask_spec", [MaskSpec(is_causal=True), MaskSpec(is_causal=True, window=300), MaskSpec(is_causal=False)]
)
def test_documents_of_one_device_take_one_call_however_many(mask_spec: MaskSpec) -> None:
    lengths, layout = PlainVarlen(), cut([40, 17, 250] * 4)
    positions = layout.group_positions[0]
    step = AttentionStep(
        blocks=layout.blocks(0, 0, mask_spec),
        query_positions=positions,
        key_positions=positions,
        mask_spec=mask_spec,
        scale=1.0,
    )
    queries = keys = torch.zeros(1, 1, layout.num_rows, 8)
    FlashAttention(lengths, CpuAttention()).forward(queries, keys, keys, step)
    assert lengths.num_calls == 1 and len(step.blocks) == 12


def test_a_window_of_one_device_needs_no_mask() -> None:
    class NoProduct(CpuAttention):
        def forward(self, *_: object) -> tuple[Tensor, Tensor]:
            raise AssertionError("a mask")

    lengths, layout, mask_spec = PlainVarlen(), cut([2000]), MaskSpec(is_causal=True, window=128)
    positions = layout.group_positions[0]
    step = AttentionStep(
        blocks=layout.blocks(0, 0, mask_spec),
        query_positions=positions,
        key_positions=positions,
        mask_spec=mask_spec,
        scale=1.0,
    )
    x = torch.zeros(1, 1, 2000, 8)
    FlashAttention(lengths, NoProduct()).forward(x, x, x, step)
    # Tiles share keys with their neighbours, and no row stands twice in a call.
    assert lengths.num_calls == 2


def test_cudas_functions_take_what_they_are_given() -> None:
    queries, keys = torch.zeros(2, 4, 40, 8), torch.zeros(2, 2, 30, 8)
    starts = torch.tensor([0, 40, 80], dtype=torch.int32), torch.tensor([0, 30, 60], dtype=torch.int32)
    sequences = VarlenSequences(*starts, 40, 30, CAUSAL)
    in_rows = [x.transpose(1, 2).flatten(0, 1) for x in (queries, keys, keys)]
    # The host knows their signatures and has none of them; other arguments than theirs are a TypeError or RuntimeError.
    mask, lse = torch.zeros(40, 30), torch.zeros(2, 4, 40)
    with pytest.raises(NotImplementedError, match="_efficient_attention_forward"):
        MemoryEfficientAttention().forward(queries, keys, keys, False, mask, 1.0)
    inputs = BackwardInputs(queries, queries, keys, keys, queries, lse)
    with pytest.raises(NotImplementedError, match="_efficient_attention_backward"):
        MemoryEfficientAttention().backward(inputs, False, mask, 1.0)
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        FlashVarlen().forward(in_rows[0], in_rows[1], in_rows[2], sequences, 1.0)
    inputs = BackwardInputs(in_rows[0], *in_rows, in_rows[0], lse.view(4, 80))
    with pytest.raises(NotImplementedError, match="_flash_attention_backward"):
        FlashVarlen().backward(inputs, sequences, 1.0)

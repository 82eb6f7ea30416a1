"""Attention by FlexAttention adds up to that of one device, as by the other kernels."""

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention

from lightning_megatron.comm import rng
from lightning_megatron.context.attention_step import (
    AttentionStep,
    BackwardInputs,
    DropoutKeys,
    RelativePositionBias,
)
from lightning_megatron.context.context_layout import MaskSpec, cut
from lightning_megatron.context.flex import FlexAttention
from lightning_megatron.context.kernel import kernel_for
from lightning_megatron.context.unfused_attention import UnfusedAttention
from tests.context.dense import SCALE, Case, bucket, by_kernels, dense
from tests.context.plain_flex import plain_flex
from tests.context.test_kernel import CASES, TABLE, WINDOWS
from tests.harness.sample import WHOLE


@pytest.mark.matrix
@settings(max_examples=60 if WHOLE in os.environ else 25)
@given(case=CASES, has_bias=st.booleans(), probability=st.sampled_from([0.0, 0.3]))
def test_parts_add_up_to_the_attention_of_one_device(case: Case, has_bias: bool, probability: float) -> None:
    case = Case(**{**vars(case), "has_bias": has_bias, "probability": probability})
    assert max(by_kernels(case, torch.float64, FlexAttention(plain_flex)).errors(dense(case)).values()) < 1e-10


def test_a_soft_cap_is_that_of_the_kernel_without_fusion() -> None:
    layout, spec = cut((5, 9), ring_size=1), MaskSpec(is_causal=True, window=4)
    positions = layout.group_positions[0]
    plain = AttentionStep(
        blocks=layout.blocks(0, 0, spec),
        query_positions=positions,
        key_positions=positions,
        mask_spec=spec,
        scale=SCALE,
    )
    capped = replace(plain, softcap=0.7)
    generator = torch.Generator().manual_seed(3)
    grad, queries, keys, values = (
        torch.randn(2, heads, layout.num_rows, 8, generator=generator, dtype=torch.float64) for heads in (4, 4, 2, 2)
    )
    output, lse = UnfusedAttention().forward(queries, keys, values, capped)
    inputs = BackwardInputs(grad, queries, keys, values, output, lse)
    kernel = FlexAttention(plain_flex)
    found = *kernel.forward(queries, keys, values, capped), *kernel.backward(inputs, capped)[:3]
    wanted = output, lse, *UnfusedAttention().backward(inputs, capped)[:3]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert (output - UnfusedAttention().forward(queries, keys, values, plain)[0]).abs().max() > 1e-2
    assert isinstance(kernel_for(queries, capped), UnfusedAttention)


@pytest.mark.parametrize("case", WINDOWS)
def test_windows_in_many_blocks_add_up_too(case: Case) -> None:
    # With a bias as well: it is of the distance, and a window bounds that.
    for one in (case, Case(**{**vars(case), "has_bias": True})):
        assert max(by_kernels(one, torch.float64, FlexAttention(plain_flex)).errors(dense(one)).values()) < 1e-10


def test_what_is_made_of_blocks_is_made_once_for_all_layers() -> None:
    layout = cut((5, 9), ring_size=1)
    positions = layout.group_positions[0]
    step = AttentionStep(
        blocks=layout.blocks(0, 0, MaskSpec(is_causal=True)),
        query_positions=positions,
        key_positions=positions,
        mask_spec=MaskSpec(is_causal=True),
        scale=SCALE,
    )
    x = torch.randn(1, 4, layout.num_rows, 8)
    block_masks = []

    def attention(*args: object, **kwargs: object) -> object:
        block_masks.append(kwargs["block_mask"])
        return plain_flex(*args, **kwargs)  # type: ignore[arg-type]

    for table in torch.randn(3, 6, 4):
        one = AttentionStep(**{**vars(step), "bias": RelativePositionBias(table=table, bucket=bucket)})
        FlexAttention(attention).forward(x, x, x, one)
    assert len(block_masks) == 3 and block_masks[0] is block_masks[1] is block_masks[2]


def test_rows_all_of_whose_keys_are_dropped_have_no_output() -> None:
    case = Case(lengths=(3, 1), probability=0.9)
    results = by_kernels(case, torch.float64, FlexAttention(plain_flex))
    assert max(results.errors(dense(case)).values()) < 1e-10
    assert (results.output == 0).all(dim=-1).any()


@pytest.mark.parametrize("probability", [0.0, 0.3])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("case", TABLE)
def test_torch_takes_the_arguments_and_gives_the_same_output(
    case: Case, has_bias: bool, probability: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not compiled, for a new shape each time; that is for outputs alone.
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    layout = cut(case.lengths, ring_size=case.ring, is_zigzag=case.is_zigzag)
    generator = torch.Generator().manual_seed(2)
    queries, keys, values = (
        torch.randn(case.batch, heads, layout.num_rows, 16, generator=generator, dtype=torch.float64)
        for heads in (4, case.groups, case.groups)
    )
    keys_of_rows = rng.bits(7, torch.arange(4 * layout.num_rows)).view(1, 4, -1)
    dropout_keys = DropoutKeys(keys=keys_of_rows, probability=probability) if probability else None
    for source in range(case.ring):
        step = AttentionStep(
            blocks=layout.blocks(0, source, case.mask_spec),
            query_positions=layout.group_positions[0],
            key_positions=layout.group_positions[source],
            mask_spec=case.mask_spec,
            scale=SCALE,
            dropout_keys=dropout_keys,
            bias=RelativePositionBias(table=case.table(), bucket=bucket) if has_bias else None,
        )
        found = FlexAttention(flex_attention.flex_attention).forward(queries, keys, values, step)
        for one, other in zip(found, UnfusedAttention().forward(queries, keys, values, step), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_it_is_chosen_where_it_is_configured_and_can() -> None:
    layout = cut((5,), ring_size=1)
    positions = layout.group_positions[0]
    mask_spec = MaskSpec(is_causal=True)
    plain = AttentionStep(
        blocks=layout.blocks(0, 0, mask_spec),
        query_positions=positions,
        key_positions=positions,
        mask_spec=mask_spec,
        scale=SCALE,
    )
    # A processor and a dry run have no kernel of it.
    for x in (torch.randn(1, 4, 5, 16), torch.randn(1, 4, 5, 16, device="meta")):
        assert type(kernel_for(x, plain, "flex")) is type(kernel_for(x, plain))


# Each is compiled: a sample of them runs by default.
@pytest.mark.matrix
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("probability", [0.0, 0.3])
@pytest.mark.parametrize("has_bias", [False, True])
# One row is left to another kernel.
@pytest.mark.parametrize("case", [case for case in (*TABLE, *WINDOWS) if case.num_tokens > 1])
def test_cudas_kernels_add_up_too(case: Case, has_bias: bool, probability: float, dtype: torch.dtype) -> None:
    case = Case(**{**vars(case), "has_bias": has_bias, "probability": probability})
    errors = by_kernels(case, dtype, FlexAttention(), device="cuda").errors(dense(case))
    assert max(errors.values()) < 0.25 and errors["output"] < 2**-6

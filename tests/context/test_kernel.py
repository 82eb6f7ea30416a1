"""Kernels of attention give parts that add up to the attention of one device, and gradients that add up to its own."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.comm import rng
from lightning_megatron.context.attention_step import (
    AttentionStep,
    BackwardInputs,
    DropoutKeys,
    Kernel,
    RelativePositionBias,
    merge_,
)
from lightning_megatron.context.blockwise_attention import BlockwiseAttention
from lightning_megatron.context.context_layout import AttentionBlock, MaskSpec, cut
from lightning_megatron.context.flash import FlashAttention
from lightning_megatron.context.fused_attention import CpuAttention
from lightning_megatron.context.kernel import kernel_for
from lightning_megatron.context.unfused_attention import UnfusedAttention
from tests.context.dense import BUCKETS, HEAD_SIZE, HEADS, Case, bucket, by_kernels, dense
from tests.context.plain_varlen import PlainVarlen

HOST = torch.device("cpu")
VIEWS = st.one_of(
    st.builds(MaskSpec, is_causal=st.just(True), window=st.one_of(st.just(0), st.integers(1, 50))),
    st.just(MaskSpec(is_causal=False)),
)
CASES = st.builds(
    Case,
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5).map(tuple),
    ring=st.integers(1, 4),
    is_zigzag=st.booleans(),
    mask_spec=VIEWS,
    groups=st.sampled_from([1, 2, 4]),
    batch=st.integers(1, 3),
)
TABLE = [
    Case(lengths=(1,), ring=3),
    Case(lengths=(33, 2, 5), ring=2, groups=2),
    Case(lengths=(33, 2, 5), ring=2, groups=1, mask_spec=MaskSpec(is_causal=True, window=7)),
    Case(lengths=(29, 11), ring=3, mask_spec=MaskSpec(is_causal=False), is_zigzag=False),
]

# Tiles are 128 tokens: several of a run, of one shape at different distances from their keys.
WINDOWS = [
    Case(lengths=(29, 50), mask_spec=MaskSpec(is_causal=True, window=5), batch=1),
    Case(lengths=(300,), mask_spec=MaskSpec(is_causal=True, window=9), batch=1, groups=2),
    Case(lengths=(41, 30), ring=3, mask_spec=MaskSpec(is_causal=True, window=12), batch=1),
    Case(lengths=(600,), ring=2, is_zigzag=False, mask_spec=MaskSpec(is_causal=True, window=170), batch=1, groups=1),
]
KERNELS = [BlockwiseAttention(CpuAttention()), UnfusedAttention(), FlashAttention(PlainVarlen(), CpuAttention())]


def largest(case: Case, dtype: torch.dtype, kernel: Kernel | None = None) -> float:
    return max(by_kernels(case, dtype, kernel).errors(dense(case)).values())


@settings(max_examples=60)
@given(case=CASES)
def test_parts_of_the_hosts_kernel_add_up_to_the_attention_of_one_device(case: Case) -> None:
    # Float64 keeps 16 digits; sums are short.
    assert largest(case, torch.float64) < 1e-10


@settings(max_examples=40)
@given(case=CASES, probability=st.sampled_from([0.0, 0.3]), has_bias=st.booleans())
def test_parts_with_materialised_scores_add_up_to_the_attention_of_one_device(
    case: Case, probability: float, has_bias: bool
) -> None:
    case = Case(**{**vars(case), "probability": probability, "has_bias": has_bias})
    assert largest(case, torch.float64, UnfusedAttention()) < 1e-10


@pytest.mark.parametrize("kernel", [BlockwiseAttention(CpuAttention()), UnfusedAttention()])
@pytest.mark.parametrize("case", TABLE)
def test_float32_and_bfloat16_lose_no_more_than_their_digits(case: Case, kernel: Kernel) -> None:
    # Gradients of up to 40 terms of size 1 at 6e-8 each.
    assert largest(case, torch.float32, kernel) < 1e-5
    # Numbers are exact in bfloat16, and so few tokens are computed and merged in float32.
    assert largest(case, torch.bfloat16, kernel) < 1e-5


def test_many_tokens_in_bfloat16_lose_no_more_than_its_digits() -> None:
    case = Case(lengths=(700,), ring=2, groups=2, batch=1)
    errors = by_kernels(case, torch.bfloat16).errors(dense(case))
    # 8 bits: numbers up to 4 are off by 2^-7, and the weights that make them by as much.
    assert 1e-4 < errors["output"] < 2**-6
    # Sums of up to 700 such terms, the largest gradients about 30.
    assert max(errors.values()) < 0.25


def test_weights_that_are_dropped_are_those_of_the_dense_mask() -> None:
    case = Case(lengths=(40, 9), ring=2, probability=0.4, batch=3)
    assert largest(case, torch.float64) < 1e-10
    other = Case(**{**vars(case), "probability": 0.41})
    assert by_kernels(other, torch.float64).errors(dense(case))["output"] > 1e-3


def test_one_row_of_random_keys_serves_all_samples() -> None:
    layout, mask_spec = cut([12]), MaskSpec(is_causal=True)
    positions = layout.group_positions[0]
    queries, keys, values = torch.randn(3, 3, HEADS, 12, HEAD_SIZE)
    outputs = []
    for random_keys in (torch.arange(HEADS * 12).view(1, HEADS, 12) ** 3,) * 2:
        dropout_keys = DropoutKeys(keys=random_keys.expand(2 * len(outputs) + 1, -1, -1), probability=0.5)
        step = AttentionStep(
            blocks=layout.blocks(0, 0, mask_spec),
            query_positions=positions,
            key_positions=positions,
            mask_spec=mask_spec,
            scale=1.0,
            dropout_keys=dropout_keys,
        )
        outputs.append(UnfusedAttention().forward(queries, keys, values, step)[0])
    assert torch.equal(*outputs)


def test_columns_in_any_order_are_dropped_as_in_the_full_row() -> None:
    keys = rng.bits(3, torch.arange(50))
    columns = torch.tensor([9, 2, 30, 2])
    assert torch.equal(rng.keep_columns(keys, columns, 0.5), rng.keep_mask(keys, 31, 0.5)[:, columns])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", WINDOWS)
def test_windows_end_where_they_should(case: Case, kernel: Kernel) -> None:
    assert largest(case, torch.float64, kernel) < 1e-10


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_query_that_sees_no_key_gives_nothing_and_has_no_gradient(kernel: Kernel) -> None:
    queries, keys, values, grad = (torch.randn(2, HEADS, 10, HEAD_SIZE) for _ in range(4))
    step = AttentionStep(
        # Queries 2..7 at 3..8, keys 0..5 at 5..10; the other rows stand in no block.
        blocks=(AttentionBlock(2, 6, 0, 6, "masked"),),
        query_positions=torch.arange(1, 11),
        key_positions=torch.arange(5, 15),
        mask_spec=MaskSpec(is_causal=True),
        scale=1.0,
    )
    output, lse = kernel.forward(queries, keys, values, step)
    blind = torch.tensor([0, 1, 2, 3, 8, 9])
    assert torch.equal(output[:, :, blind], torch.zeros(2, HEADS, 6, HEAD_SIZE))
    assert torch.equal(lse[:, :, blind], torch.full((2, HEADS, 6), -torch.inf))
    torch.testing.assert_close(output[:, :, 4], values[:, :, 0])
    torch.testing.assert_close(lse[:, :, 4], (queries[:, :, 4] * keys[:, :, 0]).sum(-1))
    inputs = BackwardInputs(grad, queries, keys, values, output, lse)
    gradients = kernel.backward(inputs, step)
    assert not gradients.queries[:, :, blind].any() and gradients.queries[:, :, 5].any()
    assert not gradients.keys[:, :, 6:].any() and gradients.values[:, :, :3].any()
    # Blind over all keys, whatever the block says.
    none = kernel.backward(inputs._replace(lse=torch.full_like(lse, -torch.inf)), step)
    assert not any(part.any() for part in none[:3])


def test_merging_is_safe_where_either_side_or_both_saw_nothing() -> None:
    nothing = torch.full((1, 1, 3), -torch.inf), torch.zeros(1, 1, 3, 2)
    lse, output = torch.tensor([[[0.5, -torch.inf, -torch.inf]]]), torch.rand(1, 1, 3, 2)
    output[:, :, 1:] = 0.0
    merged, merged_lse = nothing[1].clone(), nothing[0].clone()
    merge_(merged, merged_lse, output, lse)
    merge_(merged, merged_lse, nothing[1], nothing[0])
    assert torch.equal(merged, output) and torch.equal(merged_lse, lse)


def test_merging_large_scores_neither_overflows_nor_forgets() -> None:
    output, lse = torch.full((1, 1, 2, 1), 1.0), torch.tensor([[[1e4, -1e4]]])
    merge_(output, lse, torch.full((1, 1, 2, 1), 3.0), torch.tensor([[[1e4, 1e4]]]))
    torch.testing.assert_close(output.flatten(), torch.tensor([2.0, 3.0]))
    torch.testing.assert_close(lse.flatten(), torch.tensor([1e4 + math.log(2), 1e4]))


def test_parts_in_bfloat16_are_merged_in_float32() -> None:
    output, lse = torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1), -torch.inf)
    # Sixteen parts of equal weight; in bfloat16 the mean would be off by 2e-3 or more.
    parts = torch.linspace(1, 2, 16).bfloat16()
    for part in parts:
        merge_(output, lse, part.view(1, 1, 1, 1), torch.zeros(1, 1, 1))
    assert output.item() == pytest.approx(parts.double().mean().item(), abs=1e-6)


def test_a_tile_holds_few_scores_and_tiles_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_megatron.context.unfused_attention.MOST_SCORES", 7 * HEADS * 40)
    sizes: list[int] = []
    case = Case(lengths=(40, 8), ring=2, probability=0.2, has_bias=True, batch=3)
    expected = dense(case)

    def noted(keys: torch.Tensor, columns: torch.Tensor, probability: float) -> torch.Tensor:
        kept = keep_columns(keys, columns, probability)
        sizes.append(kept.numel())
        return kept

    keep_columns = rng.keep_columns
    monkeypatch.setattr(rng, "keep_columns", noted)
    assert max(by_kernels(case, torch.float64).errors(expected).values()) < 1e-10
    assert max(sizes) <= 7 * HEADS * 40


def draws_of(case: Case, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many masks forward and backward draw, with numbers that are right."""
    drawn: list[int] = []
    keep_columns = rng.keep_columns

    def noted(keys: torch.Tensor, columns: torch.Tensor, probability: float) -> torch.Tensor:
        drawn.append(len(keys))
        return keep_columns(keys, columns, probability)

    expected = dense(case)
    with monkeypatch.context() as patch:
        patch.setattr(rng, "keep_columns", noted)
        assert max(by_kernels(case, torch.float64).errors(expected).values()) < 1e-10
    return len(drawn)


@pytest.mark.parametrize("is_causal", [True, False])
def test_documents_of_one_length_are_one_batch(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"probability": 0.3, "has_bias": True, "groups": 2, "batch": 1, "mask_spec": MaskSpec(is_causal=is_causal)}
    # Forward and backward draw one mask for those of 12 tokens, one for those of 7, one for the last.
    assert draws_of(Case(lengths=(12, 12, 12, 12, 7, 7, 12), ring=1, **common), monkeypatch) == 6
    # Over two ranks each has two parts of a document, which see parts of both ranks: only numbers are asked for.
    assert draws_of(Case(lengths=(12, 12, 7, 7), ring=2, **common), monkeypatch) > 6
    # Rows that each have several documents are a batch already.
    assert draws_of(Case(lengths=(12, 12, 7), ring=1, **{**common, "batch": 3}), monkeypatch) == 6
    # Tiles of two documents each.
    monkeypatch.setattr("lightning_megatron.context.unfused_attention.MOST_SCORES", 2 * HEADS * 12 * 12)
    assert draws_of(Case(lengths=(12,) * 5, ring=1, **common), monkeypatch) == 6


def test_parts_of_one_length_at_other_positions_are_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of five tokens the second rank has the last two, and of four the last two: the columns of their masks differ.
    draws_of(Case(lengths=(5, 4), ring=2, is_zigzag=False, probability=0.4, groups=2, batch=1), monkeypatch)


def test_tiles_of_a_window_share_one_mask_and_calls_of_a_pairing_too() -> None:
    layout, mask_spec = cut([2000]), MaskSpec(is_causal=True, window=128)
    positions = layout.group_positions[0]
    blocks = layout.blocks(0, 0, mask_spec)
    step = AttentionStep(
        blocks=blocks, query_positions=positions, key_positions=positions, mask_spec=mask_spec, scale=1.0
    )
    masks = [step.mask(block, torch.float32, HOST).added for block in blocks if block.kind == "masked"]
    # The first tile has none before it; the last is shorter.
    assert len(masks) == 16 and len({mask.data_ptr() for mask in masks}) == 3


def test_blocks_of_one_shape_at_other_distances_have_other_masks() -> None:
    positions = torch.arange(8)
    step = AttentionStep(
        blocks=(), query_positions=positions, key_positions=positions, mask_spec=MaskSpec(is_causal=True), scale=1.0
    )
    near, far = (step.mask(AttentionBlock(row, 4, 0, 4, "masked"), torch.float32, HOST).added for row in (0, 2))
    assert torch.isinf(near).sum() == 6 and torch.isinf(far).sum() == 1


def test_dropout_and_a_bias_are_unfused_and_the_rest_is_not() -> None:
    plain = AttentionStep(
        blocks=(),
        query_positions=torch.arange(4),
        key_positions=torch.arange(4),
        mask_spec=MaskSpec(is_causal=True),
        scale=1.0,
    )
    fields = vars(plain)
    dropout_keys = DropoutKeys(keys=torch.zeros(1, HEADS, 4, dtype=torch.int64), probability=0.1)
    bias = RelativePositionBias(table=torch.zeros(BUCKETS, HEADS), bucket=bucket)
    x = torch.zeros(1, HEADS, 4, 8)
    assert isinstance(kernel_for(x, plain), BlockwiseAttention)
    assert isinstance(kernel_for(x, AttentionStep(**{**fields, "dropout_keys": dropout_keys})), UnfusedAttention)
    assert isinstance(kernel_for(x, AttentionStep(**{**fields, "bias": bias})), UnfusedAttention)
    # Meta tensors stand for a GPU, whose kernels know no float64.
    on_gpu = x.to("meta")
    assert isinstance(kernel_for(on_gpu.bfloat16(), plain), FlashAttention)
    assert isinstance(kernel_for(on_gpu, plain), BlockwiseAttention)
    assert isinstance(kernel_for(on_gpu.double(), plain), UnfusedAttention)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [*TABLE, Case(lengths=(700, 90), ring=2, groups=2)])
def test_cudas_kernels_add_up_too(case: Case, dtype: torch.dtype) -> None:
    errors = by_kernels(case, dtype, device="cuda").errors(dense(case))
    # As on the host; products may round to ten bits.
    assert max(errors.values()) < 0.25 and errors["output"] < 2**-6

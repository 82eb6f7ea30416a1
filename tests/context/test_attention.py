"""Tests of context-parallel attention: on any ranks it is the attention of one device, token by token."""

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_megatron.context.attention import ContextAxes, DropoutSpec, attend
from lightning_megatron.context.context_layout import MaskSpec, cut
from lightning_megatron.context.key_value_exchange import AllGatherExchange, RingExchange
from lightning_megatron.mesh import Mesh
from lightning_megatron.transformer.dropout import AttentionDropout
from tests.context.ranks import Case, axes_of, dense, errors, joined, on_threads, results_of_rank
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import WHOLE
from tests.harness.threads import ThreadGroup, new_group, run_on_threads
from tests.pipeline.meshes import new_group as new_gloo_group

# Sums of float64 in another order.
TOLERANCE = 1e-10
CAUSAL, WINDOW, BOTH_WAYS = MaskSpec(is_causal=True), MaskSpec(is_causal=True, window=5), MaskSpec(is_causal=False)
RANKS = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 2), (2, 4)]


def assert_right(case: Case) -> None:
    wanted, found = dense(case), on_threads(case)
    assert found.keys() == wanted.keys()
    for name, error in errors(found, wanted).items():
        assert error < TOLERANCE, f"{name}: {error}"


def cases() -> st.SearchStrategy[Case]:
    """Any ranks, views, documents and heads."""
    views = st.one_of(
        st.just(CAUSAL),
        st.builds(lambda window: MaskSpec(is_causal=True, window=window), st.integers(1, 12)),
        st.just(BOTH_WAYS),
    )
    return st.builds(
        lambda ranks, lengths, **others: Case(ring=ranks[0], ulysses=ranks[1], lengths=tuple(lengths), **others),
        st.sampled_from(RANKS),
        st.lists(st.integers(1, 40), min_size=1, max_size=6),
        exchange=st.sampled_from([RingExchange(), AllGatherExchange()]),
        mask_spec=views,
        is_zigzag=st.booleans(),
        batch=st.integers(1, 2),
        groups=st.sampled_from([1, 2, 4, 8]),
        dropout=st.sampled_from([0.0, 0.0, 0.3]),
        has_bias=st.booleans(),
        scale=st.sampled_from([None, 0.3]),
    )


@pytest.mark.matrix
@settings(max_examples=80 if WHOLE in os.environ else 30)
@given(cases())
def test_on_any_ranks_it_is_the_attention_of_one_device(case: Case) -> None:
    assert_right(case)


@pytest.mark.matrix
@pytest.mark.parametrize("exchange", [RingExchange(), AllGatherExchange()], ids=["ring", "all_gather"])
@pytest.mark.parametrize("ranks", RANKS, ids=str)
@pytest.mark.parametrize(
    ("mask_spec", "is_zigzag"),
    [(CAUSAL, True), (WINDOW, True), (BOTH_WAYS, False)],
    ids=["causal", "window", "both_ways"],
)
@pytest.mark.parametrize("lengths", [(32,), (29,), (3, 21, 1, 5, 2)], ids=["even", "uneven", "packed"])
def test_each_way_of_sharing_tokens_gives_the_attention_of_one_device(
    exchange: RingExchange | AllGatherExchange,
    ranks: tuple[int, int],
    mask_spec: MaskSpec,
    is_zigzag: bool,
    lengths: tuple[int, ...],
) -> None:
    ring, ulysses = ranks
    assert_right(
        Case(
            lengths=lengths,
            ring=ring,
            ulysses=ulysses,
            exchange=exchange,
            mask_spec=mask_spec,
            is_zigzag=is_zigzag,
            groups=2,
        )
    )


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", RANKS, ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_each_head_has_its_own_keys_draws_and_bias_wherever_it_is(ranks: tuple[int, int], groups: int) -> None:
    case = Case(lengths=(13, 4), ring=ranks[0], ulysses=ranks[1], groups=groups, batch=2)
    assert_right(case)
    assert_right(replace(case, dropout=0.3, has_bias=True))


EVERY_WAY = [
    Case(lengths=(30, 2, 17), ring=4, groups=2),
    Case(lengths=(30, 2, 17), ring=4, groups=2, exchange=AllGatherExchange()),
    Case(lengths=(30, 2, 17), ulysses=4, groups=2),
    Case(lengths=(30, 2, 17), ring=2, ulysses=2, groups=2),
    Case(lengths=(30, 2, 17), ring=2, groups=2, mask_spec=BOTH_WAYS, is_zigzag=False),
    Case(lengths=(30, 2, 17), ring=2, groups=2, mask_spec=WINDOW),
    Case(lengths=(30, 2, 17), ring=2, groups=2, dropout=0.2, has_bias=True),
    Case(lengths=(30, 2, 17), groups=2),
]


@pytest.mark.parametrize("case", EVERY_WAY, ids=lambda case: f"{case.ring}x{case.ulysses}")
def test_a_document_does_not_hear_of_another_one(case: Case) -> None:
    full = case.tensors()
    before = on_threads(case, full)
    places = slice(30, 32)
    for name in ("queries", "keys", "values", "grad"):
        full[name][:, :, places] += 100.0 * torch.randn_like(full[name][:, :, places])
    after = on_threads(case, full)
    for name in ("output", "queries", "keys", "values"):
        others = torch.ones(49, dtype=torch.bool)
        others[places] = False
        assert after[name][:, :, others].equal(before[name][:, :, others]), name
        assert not after[name][:, :, ~others].equal(before[name][:, :, ~others]), name


@pytest.mark.parametrize(
    "case", [Case(lengths=(24,), dropout=0.4), Case(lengths=(24,), dropout=0.4, ring=2, ulysses=2)]
)
def test_what_is_dropped_of_an_unpacked_batch_is_what_its_one_device_drops(case: Case) -> None:
    case = replace(case, batch=2, head_dim=24)
    full = case.tensors()
    # The output of unit values is the weights.
    full["values"] = torch.eye(24, dtype=torch.float64).expand(2, 8, -1, -1).clone()
    weights = on_threads(case, full)["output"]
    draws = case.dropout_spec()
    assert draws is not None
    dropout = AttentionDropout(case.dropout, "layer", first_head=draws.first_head)
    dropout.key = draws.name_key
    kept = dropout(torch.ones_like(weights), SimpleNamespace(keys_BN=draws.keys_BT)) != 0
    assert (weights != 0).equal(kept.tril())
    assert 0.5 < kept.double().mean() < 0.7


def count_messages(case: Case) -> list[list[str]]:
    """What each rank posts in a forward and a backward."""

    def on_rank(world: ThreadGroup) -> list[str]:
        results_of_rank(case, axes_of(case, world.rank(), new_group), case.tensors())
        return [pending.says for pending in world.board.posted[world.rank()]]

    posted: list[list[str]] = run_on_threads(case.size, on_rank)
    return posted


def test_a_ring_sends_what_somebody_still_needs_and_gradients_in_float32() -> None:
    case = Case(lengths=(32,), ring=4, groups=2, dtype=torch.bfloat16)
    for rank, says in enumerate(count_messages(case)):
        after, before = (rank + 1) % 4, (rank - 1) % 4
        pair, grads = "bfloat16[2, 1, 2, 8, 4]", "float32[2, 1, 2, 8, 4]"
        to_next = [f"send of {what} to rank {after}" for what in (pair, grads)]
        from_last = [f"recv of {what} from rank {before}" for what in (pair, grads)]
        # Three others' keys and values each way, three others' gradients on the way back.
        assert [says.count(each) for each in (to_next[0], from_last[0])] == [6, 6]
        assert [says.count(each) for each in (to_next[1], from_last[1])] == [3, 3]
        assert len(says) == 18


def test_an_all_gather_takes_one_collective_there_each_way_and_one_back() -> None:
    case = Case(lengths=(32,), ring=4, groups=2, exchange=AllGatherExchange())
    for says in count_messages(case):
        # On the CPU a reduce-scatter of more than two is an all-to-all and a sum.
        assert [each.split("(")[0] for each in says] == ["all_gather_single"] * 2 + ["all_to_all_single"]


def test_one_rank_sends_nothing() -> None:
    for exchange in (RingExchange(), AllGatherExchange()):
        assert count_messages(Case(lengths=(32, 5), exchange=exchange)) == [[]]


def test_layers_share_what_their_cache_holds_if_they_see_alike() -> None:
    case = Case(lengths=(20, 9))
    axes, full = axes_of(case, 0, new_group), case.tensors()
    cache: dict[Any, Any] = {}

    def layer(mask_spec: MaskSpec) -> Tensor:
        inputs = (full[name] for name in ("queries", "keys", "values"))
        return attend(*inputs, layout=case.layout(), axes=axes, mask_spec=mask_spec, cache=cache)

    first, held = layer(WINDOW), dict(cache)
    assert layer(WINDOW).equal(first)
    assert len(held) == 1
    assert all(cache[key] is value for key, value in held.items())
    for mask_spec in (CAUSAL, BOTH_WAYS):
        torch.testing.assert_close(
            layer(mask_spec), dense(replace(case, mask_spec=mask_spec))["output"], rtol=0, atol=TOLERANCE
        )


def test_a_gradient_that_is_one_number_everywhere_is_taken() -> None:
    case = Case(lengths=(20, 9), head_dim=8)
    full = case.tensors() | {"grad": torch.ones(1, dtype=torch.float64).expand(1, 8, 29, 8)}
    wanted = dense(case, full)
    leaves = [full[name].clone().requires_grad_() for name in ("queries", "keys", "values")]
    attend(*leaves, layout=case.layout(), axes=axes_of(case, 0, new_group), mask_spec=case.mask_spec).sum().backward()
    for leaf, name in zip(leaves, ("queries", "keys", "values"), strict=True):
        torch.testing.assert_close(leaf.grad, wanted[name], rtol=0, atol=TOLERANCE)


def test_a_call_of_padding_alone_gives_zeros_and_gradients_of_zero() -> None:
    # Two tokens for four groups: two of them hold none.
    for exchange in (RingExchange(), AllGatherExchange()):
        assert_right(Case(lengths=(2,), ring=4, exchange=exchange, has_bias=True))


class LargestTensor(TorchDispatchMode):
    """The most elements that any tensor had that an operation gave."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor):
                self.num_elements = max(self.num_elements, each.numel())
        return out


@pytest.mark.parametrize("mask_spec", [CAUSAL, BOTH_WAYS], ids=["causal", "both_ways"])
@pytest.mark.parametrize("size", [1, 2])
def test_no_tensor_has_an_element_for_each_pair_of_tokens(mask_spec: MaskSpec, size: int) -> None:
    case = Case(
        lengths=(701,),
        ring=size,
        mask_spec=mask_spec,
        is_zigzag=mask_spec.is_causal,
        heads=2,
        groups=2,
        dtype=torch.float32,
    )
    full = case.tensors()

    def on_rank(world: ThreadGroup) -> int:
        axes = axes_of(case, world.rank(), new_group)
        with LargestTensor() as largest:
            results_of_rank(case, axes, full)
        return largest.num_elements

    for num_elements in run_on_threads(size, on_rank):
        # Keys and values of a rank as one tensor are the largest that there is need of.
        assert num_elements < 3 * full["queries"].numel() < 701 * 701 // 4 // size


def test_a_call_without_tokens_gives_nothing_for_its_row_of_padding() -> None:
    for ring, ulysses in RANKS[:6]:
        assert on_threads(Case(lengths=(), ring=ring, ulysses=ulysses, dropout=0.5))["output"].shape == (1, 8, 0, 4)


SHARES = {
    torch.float64: TOLERANCE,
    # Some hundred roundings of 6e-8.
    torch.float32: 1e-5,
    # Roundings of 4e-3 of what goes into products, of parts, and of the output that the backward starts from.
    torch.bfloat16: 2e-2,
}


def check_on_gloo(case: Case) -> None:
    axes = axes_of(case, dist.get_rank(), new_gloo_group)
    for dtype, share in SHARES.items():
        typed = replace(case, dtype=dtype)
        of_ranks: list[Any] = [None] * case.size
        dist.all_gather_object(of_ranks, results_of_rank(typed, axes, typed.tensors()))
        for name, error in errors(joined(typed, of_ranks), dense(typed)).items():
            assert error < share, f"{name} in {dtype}: {error}"


@pytest.mark.matrix
@pytest.mark.parametrize("exchange", [RingExchange(), AllGatherExchange()], ids=["ring", "all_gather"])
@pytest.mark.parametrize("ranks", [(2, 1), (4, 1), (1, 2), (2, 2)], ids=str)
def test_real_ranks_give_the_attention_of_one_device(
    ranks: tuple[int, int], exchange: RingExchange | AllGatherExchange
) -> None:
    case = Case(lengths=(37, 3, 20), ring=ranks[0], ulysses=ranks[1], exchange=exchange, groups=2, head_dim=16)
    run_on_ranks(case.size, check_on_gloo, case)


@pytest.mark.parametrize("has_draws", [False, True], ids=["whole", "dropped"])
def test_autocast_changes_the_dtype_of_the_inputs_alone(has_draws: bool) -> None:
    layout = cut([70, 30])
    generator = torch.Generator().manual_seed(1)
    wide = [torch.randn(1, 4, 100, 8, generator=generator) for _ in range(3)]
    draws = DropoutSpec(
        keys_BT=torch.arange(100).unsqueeze(0), name_key=1, first_head=0, probability=0.3 if has_draws else 0.0
    )

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = attend(
            *leaves,
            layout=layout,
            axes=ContextAxes(ring=Mesh.single().cp, ulysses=Mesh.single().cp),
            mask_spec=MaskSpec(is_causal=True),
            dropout=draws if has_draws else None,
        )
        output.float().square().sum().backward()
        return [output.detach(), *(leaf.grad.to(torch.bfloat16) for leaf in leaves if leaf.grad is not None)]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        # Such as norms of queries and keys leave them: the first two in float32.
        under = run([wide[0], wide[1], wide[2].to(torch.bfloat16)])
    outside = run([x.to(torch.bfloat16) for x in wide])
    assert under[0].dtype == torch.bfloat16
    for one, other in zip(under, outside, strict=True):
        assert torch.equal(one, other)

"""Tests of the cut word embedding against the plain one."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from lightning_megatron.comm.collectives import shard_slice
from lightning_megatron.mesh import Mesh
from lightning_megatron.sharding import Initial, shard_of
from lightning_megatron.tensor.embedding import VocabParallelEmbedding
from tests.harness.threads import run_on_threads
from tests.tensor.plain import (
    BITE,
    assert_gradient_is_slice,
    distance,
    fill,
    gradient,
    on_every_layout,
    thread_mesh,
)

T, V, H = 64, 131, 8


@on_every_layout
@pytest.mark.parametrize("multiple", [1, 128])
def test_a_cut_embedding_equals_the_plain_one(num_ranks: int, is_sequence_parallel: bool, multiple: int) -> None:
    weight = torch.randn(V, H, dtype=torch.float64, requires_grad=True)
    ids = torch.cat((torch.tensor([0, 0, V - 1, V - 1, 65, 66, 33]), torch.randint(V, (T - 7,))))
    out_grad = torch.randn(T, H, dtype=torch.float64)
    plain = F.embedding(ids, weight)
    plain.backward(out_grad)

    def on_rank(world: Any) -> None:
        mesh = thread_mesh(world, is_sequence_parallel)
        tp, sp = mesh.tp, mesh.axis("sp")
        layer = VocabParallelEmbedding(V, H, tp=tp, sp=sp, initial=Initial(std=0.02), multiple=multiple).double()
        assert layer.weight.shape[0] * tp.size < V + multiple * tp.size  # it is cut, and the gradient as well
        fill(layer.weight, weight)
        out = layer(ids)
        assert_close(out, shard_slice(plain.detach(), sp), rtol=0, atol=0)
        out.backward(shard_slice(out_grad, sp))
        assert_gradient_is_slice(layer.weight, gradient(weight))
        if tp.size > 1 and len(shard_of(layer.weight).valid(layer.weight)) > 0:
            # What a rank would get if it did not leave out the gradients of ids that others hold.
            unmasked = layer.weight.detach().clone().requires_grad_()
            F.embedding(ids.clamp(max=len(unmasked) - 1), unmasked).backward(out_grad)
            assert distance(gradient(unmasked), gradient(layer.weight)) > BITE

    run_on_threads(num_ranks, on_rank)


def test_an_id_outside_of_the_vocabulary_raises_on_every_rank() -> None:
    def on_rank(world: Any, bad_id: int) -> str:
        mesh = thread_mesh(world, False)
        layer = VocabParallelEmbedding(V, H, tp=mesh.tp, sp=mesh.axis("sp"), initial=Initial(std=0.02), multiple=128)
        with pytest.raises(IndexError) as raised:
            layer(torch.tensor([0, bad_id]))
        return str(raised.value)

    for bad_id in (-1, V, 200, 1000):
        assert run_on_threads(2, on_rank, bad_id) == ["index out of range in self"] * 2


def test_no_tensor_of_hidden_size_is_saved_for_backward() -> None:
    mesh = Mesh.single()
    layer = VocabParallelEmbedding(V, H, tp=mesh.tp, sp=mesh.axis("sp"), initial=Initial(std=0.02))
    sizes: list[int] = []

    def note(saved: torch.Tensor) -> None:
        # The weight itself is there anyway.
        if saved.data_ptr() != layer.weight.data_ptr():
            sizes.append(saved.numel())

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        layer(torch.arange(T))
    assert sizes == [T]

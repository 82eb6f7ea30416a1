"""One of d data-parallel ranks holds, for each parameter, the bytes that docs/optim.md promises."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Sizes
from lightning_megatron.optim.bucket_layout import ALIGNMENT
from lightning_megatron.optim.config import OptimizerConfig, OptimizerKind
from lightning_megatron.optim.data_parallel_comm import DataParallelComm
from lightning_megatron.optim.gradients import Gradients
from lightning_megatron.optim.master_weights import MasterWeights
from tests.harness.ranks import run_on_ranks
from tests.optim.test_gradients import no_group
from tests.pipeline.meshes import make_mesh

CPU = torch.device("cpu")
LARGE: dict[str, tuple[int, ...]] = {f"matrix {i}": (130, 120) for i in range(5)} | {"norm": (3000,), "bias": (2000,)}
NUM_MATRICES, NUM_VECTORS = 5 * 130 * 120, 5000


def held_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def bytes_of(kind: OptimizerKind, low: torch.dtype | None, grads: torch.dtype | None) -> list[int]:
    """What is held after a step, of a first training and of one that follows it with the same parameters."""
    sizes = Sizes(world=torch.distributed.get_world_size())
    mesh = make_mesh(sizes)
    named, found = {name: nn.Parameter(torch.randn(shape)) for name, shape in LARGE.items()}, []
    for _ in range(2):
        optimizer = torch.optim.AdamW(list(named.values()))
        config = OptimizerConfig(kind=kind, bucket_size=40_000)
        gradients = Gradients(named.items(), set(), mesh, no_group, CPU, config=config, dtype=grads, low=low)
        dp_comm = DataParallelComm(gradients, MasterWeights(gradients, [optimizer]))
        for parameter in named.values():
            parameter.grad = torch.ones(parameter.shape, dtype=parameter.grad_dtype)
        gradients.reduce(outside_over_stages=False)
        dp_comm.prepare_step()
        optimizer.step()
        dp_comm.update_params()
        optimizer.zero_grad()
        states = [value for state in optimizer.state.values() for value in state.values()]
        buckets = [one for bucket in gradients.buckets for one in bucket.held]
        mains = [shard.tensor for shard in gradients.param_shards]
        found.append(held_bytes([*named.values(), *buckets, *mains, *states]))
        dp_comm.release()
    return found


@pytest.mark.parametrize("d", [1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "low", "grads", "fixed", "shared"),
    [
        ("distributed", torch.bfloat16, None, 6, 12),
        ("distributed", torch.bfloat16, torch.bfloat16, 4, 12),
        ("distributed", None, None, 8, 8),
        ("distributed_gradients", torch.bfloat16, None, 2, 16),
        ("distributed_gradients", torch.bfloat16, torch.bfloat16, 2, 14),
        ("distributed_gradients", None, None, 4, 12),
    ],
)
def test_a_rank_holds_the_bytes_that_are_promised(
    d: int, kind: OptimizerKind, low: torch.dtype | None, grads: torch.dtype | None, fixed: int, shared: int
) -> None:
    # Vectors stay in float32 and share memory with their master weights.
    of_gradient = (2 if grads is not None else 4) / (d if kind == "distributed_gradients" else 1)
    promised = NUM_MATRICES * (fixed + shared / d) + NUM_VECTORS * (4 + of_gradient + 8 / d)
    # A parameter and a shard each begin at a multiple of some elements, of 4 bytes in weights and in gradients.
    padding = (len(LARGE) + 4 * d) * ALIGNMENT * 8
    for first, second in run_on_ranks(d, bytes_of, kind, low, grads):
        assert abs(first - promised) <= padding < NUM_MATRICES / 5
        assert abs(second - first) <= padding

"""Forward and backward of one layer's experts on this rank: times of each expert GEMM and each token dispatcher.

All variants are timed in turn in the same processes, round by round. Every rank has the same number of tokens, whose
choices are drawn evenly; gradients are accumulated into the engine's existing buffers.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.moe.experts import ExpertAxes, Experts
from lightning_megatron.moe.grouped_gemm import GROUPED_GEMM, SEQUENTIAL_GEMM
from lightning_megatron.moe.token_dispatcher import AllGatherTokenDispatcher, AllToAllTokenDispatcher, moe_forward
from lightning_megatron.sharding import Initial
from lightning_megatron.tensor.weight_gradients import WeightGradients, share

GEMMS = {"grouped": GROUPED_GEMM, "one by one": SEQUENTIAL_GEMM}
DISPATCHERS = {"all-to-all": AllToAllTokenDispatcher, "all-gather": AllGatherTokenDispatcher}
# Experts, their features and choices of a token: as many weights in experts of three sizes, ever fewer rows for each.
GROUP_SHAPES = ((4, 688, 2), (16, 172, 2), (64, 44, 2))
# The same with more and more choices: the more, the less all-gather sends in vain.
WAY_SHAPES = ((4, 688, 1), (4, 688, 2), (4, 688, 4))


def variants(world: int) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Variants that are timed on so many processes, by the words of the shape and the variant's name."""
    shapes, names = (GROUP_SHAPES, GEMMS) if world == 1 else (WAY_SHAPES, DISPATCHERS)
    return {(words(*shape), name): shape for shape in shapes for name in names}


def words(num_experts: int, ffn: int, num_chosen: int) -> str:
    return f"{num_experts} experts of {ffn}, top-{num_chosen}"


def time_layers(hidden: int, tokens: int, rounds: int, repeats: int) -> list[dict[str, Any]]:
    """CPU and wall seconds of every variant on this rank in each round, as the mean of some repeats."""
    world = dist.get_world_size()
    mesh = Mesh.build(Sizes(world=world, ep=world), dist.get_rank(), _new_group)
    runs = {key: layer_run(hidden, tokens, shape, key[1], mesh) for key, shape in variants(world).items()}
    found = {key: {"shape": key[0], "variant": key[1], "cpu_seconds": [], "wall_seconds": []} for key in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for key, run in runs.items():
            dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(repeats):
                run()
            found[key]["cpu_seconds"].append((time.process_time() - cpu) / repeats)
            found[key]["wall_seconds"].append((time.perf_counter() - wall) / repeats)
    return list(found.values())


def _new_group(ranks: tuple[int, ...]) -> Any:
    return dist.new_group(list(ranks), use_local_synchronization=True)


def layer_run(
    hidden: int, tokens: int, shape: tuple[int, int, int], variant: str, mesh: Mesh
) -> Callable[[], tuple[Tensor, Tensor]]:
    """One forward and backward of the experts: their output, and the gradient of the tokens."""
    num_experts, ffn, num_chosen = shape
    axes, initial = ExpertAxes.of(mesh), Initial(std=0.02)
    experts = Experts(
        num_experts,
        hidden,
        ffn,
        activation="swiglu",
        initial=initial,
        output_initial=initial,
        axes=axes,
        gemm=GEMMS.get(variant, GROUPED_GEMM),
    )
    generator = torch.Generator().manual_seed(1)
    for weight in (experts.up, experts.down):
        full = torch.randn(weight.shape[0] * axes.ep.size, *weight.shape[1:], generator=generator) * 0.2
        weight.data.copy_(full.chunk(axes.ep.size)[axes.ep.rank])
        weight.grad = torch.zeros_like(weight)
    gradients = WeightGradients()
    share(experts, gradients)
    dispatcher = DISPATCHERS.get(variant, AllToAllTokenDispatcher)(num_experts, ep=axes.ep, etp=axes.etp)
    generator.manual_seed(2 + mesh.global_rank)
    x_TH = torch.randn(tokens, hidden, generator=generator).requires_grad_()
    probs_TK, expert_ids_TK = torch.rand(tokens, num_experts, generator=generator).topk(num_chosen, dim=1)
    probs_TK.requires_grad_()

    def run() -> tuple[Tensor, Tensor]:
        x_TH.grad = probs_TK.grad = None
        output_TH, _ = moe_forward(x_TH, expert_ids_TK, probs_TK, dispatcher=dispatcher, experts=experts)
        with gradients.opened():
            output_TH.square().sum().backward()
        assert x_TH.grad is not None
        return output_TH.detach(), x_TH.grad

    return run

"""The cost model of dynamic context parallelism, from a few calls of one layer of each kind on this machine.

Before the first step. Every group size runs the same few packs of documents, all groups at once, forward and backward;
what the slowest rank took counts, and all ranks take the first one's fit.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.comm import collectives
from lightning_megatron.comm.rng import Draws
from lightning_megatron.context.balance import CostModel, DynamicContextConfig, Measurement, fit
from lightning_megatron.context.documents import documents_of
from lightning_megatron.mesh import Mesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.transformer.layer import ExpertLayer, TransformerLayer
from lightning_megatron.transformer.tokens import Tokens, stream_of

# Fractions of the tokens that a rank may hold.
_FILLS = (0.25, 0.5, 1.0)
# Documents of a pack, which together have the same tokens but not the same squares.
_NUM_DOCUMENTS = (1, 4)
_NUM_CALLS = 3


def of_module(
    module: nn.Module,
    config: DynamicContextConfig,
    device: torch.device,
    context: Callable[[], AbstractContextManager[Any]],
) -> CostModel:
    """The cost of a microbatch on the layers of one stage of a module's first GPTModel. Collective over the world.

    Raises ConfigurationError where the module holds none.
    """
    model = next((model for model in module.modules() if isinstance(model, GPTModel)), None)
    if model is None:
        raise ConfigurationError(
            f"{type(module).__name__} holds no GPTModel, whose layers could be measured for dynamic context "
            "parallelism; give the costs: DynamicContextConfig(cost=CostModel(...))"
        )
    mesh, architecture = model.mesh, model.config
    packs = list(_packs(mesh.sizes.context_groups, config.max_tokens_per_rank))
    measurements = [
        Measurement(sum(lengths), sum(length * length for length in lengths), size, 0.0) for size, lengths in packs
    ]
    for kind in (TransformerLayer, ExpertLayer):
        # Either all or none of the ranks of a stage have a layer of the kind.
        layers = [layer for layer in model.modules() if isinstance(layer, kind)]
        seconds: list[float] = []
        for size, lengths in packs if layers else []:
            with context():
                seconds.append(_seconds_of(model, layers[0], mesh, size, lengths, device))
        by_rank = [own for own in collectives.gather_objects(seconds, mesh.world) if own]
        slowest = [max(times) for times in zip(*by_rank, strict=True)]
        with_experts = sum(architecture.has_experts(layer) for layer in range(architecture.num_layers))
        num_layers = with_experts if kind is ExpertLayer else architecture.num_layers - with_experts
        measurements = [
            replace(before, seconds=before.seconds + one * num_layers / mesh.sizes.num_stages)
            for before, one in zip(measurements, slowest or [0.0] * len(packs), strict=True)
        ]
    return collectives.broadcast_object(fit(measurements), mesh.world)  # type: ignore[no-any-return]


def _packs(sizes: Sequence[int], most_tokens: int) -> Iterator[tuple[int, list[int]]]:
    """Group sizes, and the lengths of the documents that each is to run."""
    for size in sizes:
        for fill in _FILLS:
            tokens = max(_NUM_DOCUMENTS[-1], int(fill * most_tokens) * size)
            for num in _NUM_DOCUMENTS:
                yield size, [tokens // num] * num


def _seconds_of(
    model: GPTModel,
    layer: TransformerLayer | ExpertLayer,
    mesh: Mesh,
    size: int,
    lengths: list[int],
    device: torch.device,
) -> float:
    """The fastest of a few calls."""
    tokens = _stream(model, mesh, size, lengths, device)

    def run() -> Tensor:
        if isinstance(layer, TransformerLayer):
            return layer(hidden, tokens)  # type: ignore[no-any-return]
        return layer(hidden, tokens, tokens.routed(torch.ones(tokens.shape, device=device), mesh.tp, 0))[0]  # type: ignore[no-any-return]

    weight = next(layer.parameters())
    shape = (tokens.num_tokens // tokens.sp.size, model.config.hidden_size)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(shape, generator=generator).to(device, weight.dtype).requires_grad_()
    wanted = [hidden, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    found = []
    for _ in range(_NUM_CALLS):
        collectives.barrier(mesh.axis("dp+cp"))
        begun_seconds = _now_seconds(device)
        # Not `backward`: gradients on the parameters belong to the steps.
        torch.autograd.grad(run().float().sum(), wanted, allow_unused=True)
        found.append(_now_seconds(device) - begun_seconds)
    if isinstance(layer, ExpertLayer):
        # None of these tokens were of a step.
        layer.moe.router.records.forget()
    return min(found)


def _stream(model: GPTModel, mesh: Mesh, size: int, lengths: list[int], device: torch.device) -> Tokens:
    segments = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return stream_of(
        (1, sum(lengths)),
        positions=model.position_cache,
        mesh=mesh,
        draws=Draws(seed=0),
        device=device,
        documents=documents_of(segments.unsqueeze(0), device),
        group=mesh.context_group(size),
    )


def _now_seconds(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

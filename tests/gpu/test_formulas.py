"""Operations of layers on a GPU equal float64 on the CPU, in value and gradient, within the rounding of each dtype."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.comm import rng
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.sharding import Initial
from lightning_megatron.tensor.activation import activate
from lightning_megatron.tensor.cross_entropy import vocab_parallel_cross_entropy
from lightning_megatron.tensor.embedding import VocabParallelEmbedding
from lightning_megatron.tensor.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.tensor.norm import LayerNorm, RMSNorm
from lightning_megatron.transformer.dropout import drop
from lightning_megatron.transformer.rotary import rotate
from tests.gpu.devices import each_device

T, H, V = 40, 64, 131
ALONE = Axis.alone(0)
TP = Mesh.single().tp
INITIAL = Initial(std=0.3)
# Relative to the largest number: a result is rounded once, and some sums of up to 131 numbers are in float32.
ROUNDINGS = {torch.float64: 64, torch.float32: 64, torch.bfloat16: 8, torch.float16: 8}


def labels(device: torch.device) -> Tensor:
    return torch.tensor([0, V - 1, -100, *range(1, T - 2)], device=device)


def angles(x: Tensor) -> tuple[Tensor, Tensor]:
    turns = torch.linspace(0, 3, T * 8, dtype=torch.float64, device=x.device).view(T, 8)
    return turns.cos().to(x.dtype), turns.sin().to(x.dtype)


def module(build: Callable[[], nn.Module]) -> Callable[[Tensor], tuple[nn.Module, Tensor]]:
    """A module with drawn weights, vectors of float32 at least, and its output."""

    def run(x: Tensor) -> tuple[nn.Module, Tensor]:
        made = build().to_empty(device=x.device)
        generator = torch.Generator().manual_seed(5)
        for parameter in made.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(torch.bfloat16)
            dtype = x.dtype if parameter.dim() > 1 else torch.promote_types(x.dtype, torch.float32)
            parameter.data = drawn.to(x.device, dtype)
        return made, made(x)

    return run


def function(apply: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[nn.Module, Tensor]]:
    return lambda x: (nn.Module(), apply(x))


def embedded(x: Tensor) -> tuple[nn.Module, Tensor]:
    """Vectors of tokens, of which each comes several times, times the input."""
    ids = torch.arange(T, device=x.device) % 7

    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = VocabParallelEmbedding(V, H, tp=TP, sp=ALONE, initial=INITIAL)

        def forward(self, x: Tensor) -> Tensor:
            vectors: Tensor = self.embedding(ids)
            return vectors * x

    return module(Looked)(x)


def dropped(x: Tensor) -> Tensor:
    keys = rng.bits(3, torch.arange(T, device=x.device))
    return drop(x, rng.keep_mask(keys, H, 0.3), 0.3)


CASES: dict[str, Callable[[Tensor], tuple[nn.Module, Tensor]]] = {
    "layer norm": module(lambda: LayerNorm(H, eps=1e-5, tp=TP, sp=ALONE)),
    "RMS norm": module(lambda: RMSNorm(H, eps=1e-6, tp=TP, sp=ALONE)),
    "column linear": module(lambda: ColumnParallelLinear(H, 24, tp=TP, sp=ALONE, bias=True, initial=INITIAL)),
    "row linear": module(lambda: RowParallelLinear(H, 24, tp=TP, sp=ALONE, bias=True, initial=INITIAL)),
    "embedding": embedded,
    "cross entropy": function(
        lambda x: vocab_parallel_cross_entropy(F.pad(x, (0, V - H)), labels(x.device), tp=TP, vocab_size=V)
    ),
    "smoothed cross entropy": function(
        lambda x: vocab_parallel_cross_entropy(
            F.pad(x, (0, V - H)), labels(x.device), tp=TP, vocab_size=V, label_smoothing=0.1
        )
    ),
    "rotation": function(lambda x: rotate(x, *angles(x))),
    "dropout": function(dropped),
    **{
        name: function(lambda x, name=name: activate(x, name))  # type: ignore[misc]
        for name in ("gelu", "gelu_tanh", "quick_gelu", "relu")
    },
    **{
        name: function(lambda x, name=name: activate(x.unflatten(1, (2, -1)), name))  # type: ignore[misc]
        for name in ("swiglu", "geglu_tanh", "clamped_swiglu")
    },
}


def results(name: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients, on the host in float64; inputs are numbers of bfloat16 in any dtype."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(T, H, generator=generator, dtype=torch.float64).to(torch.bfloat16)
    x = drawn.to(device, dtype).requires_grad_()
    with torch.autocast(device, dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
        made, output = CASES[name](x)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(torch.bfloat16)
    output.backward(weights.to(device, output.dtype))
    found = [output, x.grad, *(parameter.grad for parameter in made.parameters())]
    return [one.detach().cpu().double() for one in found if one is not None]


@each_device
@pytest.mark.parametrize("name", CASES)
def test_an_operation_is_its_formula(name: str, device: str) -> None:
    wanted = results(name, "cpu", torch.float64)
    for dtype, num_roundings in ROUNDINGS.items():
        found = results(name, device, dtype)
        assert len(wanted) == len(found)
        for one, other in zip(wanted, found, strict=True):
            most = num_roundings * torch.finfo(dtype).eps * float(one.abs().max())
            torch.testing.assert_close(other, one, rtol=0, atol=most, msg=lambda text, dtype=dtype: f"{dtype}: {text}")
            # Numbers of a neighbour would differ by more.
            assert (one.flatten().roll(1) - one.flatten()).abs().max() > 3 * most

"""The LoRA adapter of a linear: y = W x + scale * B A x, of which A and B are trained and W may be frozen.

Both products are those of `tensor.linear`, which says what is cut, what is sent and where weight gradients go:

    linear     A                          B                       what is sent
    column     [R, I], on every tp rank   [O/tp, R], cut as W     R numbers a token: gathered over sp, or their gradient
                                                                  summed over tp
    row        [R, I/tp], cut as W        [O, R], on every rank   R numbers a token: summed over tp

T tokens, I features in, O features out, R rank.
Source: Hu et al., arXiv 2106.09685, section 4.1.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.comm import rng
from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import Initial, shard_of, shard_parameter
from lightning_megatron.tensor.linear import (
    ColumnParallelLinear,
    ParallelLinear,
    RowParallelLinear,
    TokenKeys,
    column_parallel_linear,
    row_parallel_linear,
)
from lightning_megatron.tensor.shared_linear import SharedLinear
from lightning_megatron.tensor.weight_gradients import WeightGradientLayer

# An axis of this rank alone: what is cut over it is unsharded.
_ALONE = Axis.alone(0)


class LoRAAdapter(WeightGradientLayer):
    """The LoRA adapter of a linear called `name`. Its first output is 0: A is random, B is zero.

    In training each feature of the adapter's input is dropped with probability `dropout`.
    """

    names_stood_in = ("a", "b")

    a: nn.Parameter
    b: nn.Parameter

    def __init__(self, linear: ParallelLinear, *, rank: int, scale: float, dropout: float, name: str) -> None:
        super().__init__()
        self.tp, self.sp, self.scale, self.dropout = linear.tp, linear.sp, scale, dropout
        self.key = rng.key_tensor(name, "low-rank dropout")
        self.shard = shard = shard_of(linear.weight)
        *self._out_shape, self._in_features = shard.global_shape
        # torch initialises the weight of a linear with this variance.
        drawn = Initial(std=1.0 / math.sqrt(3.0 * self._in_features))
        with torch.device(linear.weight.device):
            self._make(rank, shard.dim, drawn)

    def _make(self, rank: int, dim: int | None, drawn: Initial) -> None:
        """Creates `a` and `b`; `dim` is the dim along which the linear's weight is cut."""
        raise NotImplementedError

    @property
    def is_dropping(self) -> bool:
        return self.training and self.dropout > 0.0

    def _drop(self, x_TI: Tensor, keys_T: Tensor, first_column: int) -> Tensor:
        keep_TI = rng.keep_mask(rng.bits(self.key, keys_T), x_TI.shape[1], self.dropout, first_column)
        return torch.where(keep_TI, x_TI, 0).mul_(1.0 / (1.0 - self.dropout))

    @torch.no_grad()
    def product(self) -> Tensor:
        """This rank's slice of scale * B A in float32 or wider, without communication."""
        wide = torch.promote_types(self.b.dtype, torch.float32)
        return (self.b.to(wide) @ self.a.to(wide)) * self.scale

    def extra_repr(self) -> str:
        return f"rank={self.a.shape[0]}, scale={self.scale}, dropout={self.dropout}"


class ColumnLoRAAdapter(LoRAAdapter):
    """Adapter of a column-parallel linear: [T/sp, I] to [T, *out_shape/tp]."""

    def _make(self, rank: int, dim: int | None, drawn: Initial) -> None:
        self.a = shard_parameter((rank, self._in_features), initial=drawn, replicas=(self.tp,), partial=self.sp)
        self.b = shard_parameter((*self._out_shape, rank), initial=Initial(), dim=dim, axis=self.tp)

    def forward(self, x_TI: Tensor, tokens: TokenKeys | None = None) -> Tensor:
        if self.is_dropping:
            assert tokens is not None, "a LoRA adapter has dropout, and got no token keys"
            x_TI = self._drop(x_TI, tokens.shard_keys, first_column=0)
        gradients, in_a, in_b = self.weight_gradients, self.stand_ins.get("a"), self.stand_ins.get("b")
        h_TR = column_parallel_linear(x_TI, self.a, None, tp=_ALONE, sp=_ALONE, gradients=gradients, stand_in=in_a)
        return column_parallel_linear(
            h_TR * self.scale, self.b, None, tp=self.tp, sp=self.sp, gradients=gradients, stand_in=in_b
        )


class RowLoRAAdapter(LoRAAdapter):
    """Adapter of a row-parallel linear: [T, I/tp] to [T/sp, O]."""

    def _make(self, rank: int, dim: int | None, drawn: Initial) -> None:
        self.a = shard_parameter((rank, self._in_features), initial=drawn, dim=1, axis=self.tp)
        self.b = shard_parameter((*self._out_shape, rank), initial=Initial(), replicas=(self.tp,), partial=self.sp)

    def forward(self, x_TI: Tensor, tokens: TokenKeys | None = None) -> Tensor:
        if self.is_dropping:
            assert tokens is not None, "a LoRA adapter has dropout, and got no token keys"
            x_TI = self._drop(x_TI, tokens.stream_keys, first_column=self.tp.rank * x_TI.shape[1])
        gradients, in_a, in_b = self.weight_gradients, self.stand_ins.get("a"), self.stand_ins.get("b")
        h_TR = row_parallel_linear(x_TI, self.a, None, tp=self.tp, sp=self.sp, gradients=gradients, stand_in=in_a)
        return column_parallel_linear(
            h_TR * self.scale, self.b, None, tp=_ALONE, sp=_ALONE, gradients=gradients, stand_in=in_b
        )


class SharedLoRAAdapter(LoRAAdapter):
    """Adapter of a linear that ranks of tp hold whole: [T/sp, I] to [T/sp, O]."""

    def _make(self, rank: int, dim: int | None, drawn: Initial) -> None:
        own: dict[str, Any] = {"replicas": self.shard.replicas, "partial": self.shard.partial}
        self.a = shard_parameter((rank, self._in_features), initial=drawn, **own)
        self.b = shard_parameter((*self._out_shape, rank), initial=Initial(), **own)

    def forward(self, x_TI: Tensor, tokens: TokenKeys | None = None) -> Tensor:
        if self.is_dropping:
            assert tokens is not None, "a LoRA adapter has dropout, and got no token keys"
            x_TI = self._drop(x_TI, tokens.shard_keys, first_column=0)
        gradients, in_a, in_b = self.weight_gradients, self.stand_ins.get("a"), self.stand_ins.get("b")
        h_TR = column_parallel_linear(x_TI, self.a, None, tp=_ALONE, sp=_ALONE, gradients=gradients, stand_in=in_a)
        return column_parallel_linear(
            h_TR * self.scale, self.b, None, tp=_ALONE, sp=_ALONE, gradients=gradients, stand_in=in_b
        )


def lora_adapter_for(linear: ParallelLinear, *, rank: int, scale: float, dropout: float, name: str) -> LoRAAdapter:
    """The adapter that fits a linear; its parameters are not initialised yet."""
    if isinstance(linear, ColumnParallelLinear):
        return ColumnLoRAAdapter(linear, rank=rank, scale=scale, dropout=dropout, name=name)
    if isinstance(linear, SharedLinear):
        return SharedLoRAAdapter(linear, rank=rank, scale=scale, dropout=dropout, name=name)
    assert isinstance(linear, RowParallelLinear), type(linear)
    return RowLoRAAdapter(linear, rank=rank, scale=scale, dropout=dropout, name=name)

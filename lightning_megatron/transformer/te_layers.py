"""Twins of a transformer layer's linears that Transformer Engine runs, with our parameters.

A twin replaces a linear and has its parameters: the same objects under the same names, so that initial
values, shards, optimizers and checkpoints know nothing of it. The module of the engine is made without memory of its
own and gets the parameters in each call. The norm in front of a column linear goes into the same kernel; a `FusedNorm`
then holds its parameters and passes hidden states on. In a layer of experts the linears of attention
and of the shared expert have twins, the experts have one together (`te_experts`), and the router reads its norm.
Attention of unsharded sequences goes to the engine's kernels (`te_attention`). Products in FP8 want tokens in multiples
of a tile, so those of each rank are padded with zeros, whose outputs are dropped. Recomputation is the engine's.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lightning_megatron.precision import fp8
from lightning_megatron.precision.fp8 import ParallelMode
from lightning_megatron.tensor.linear import ColumnParallelLinear, ParallelLinear
from lightning_megatron.tensor.norm import LayerNorm, RMSNorm, ZeroCenteredRMSNorm
from lightning_megatron.transformer.attention import SelfAttention
from lightning_megatron.transformer.core_attention import CoreAttention
from lightning_megatron.transformer.layer import ExpertLayer, PreNormLayer, TransformerLayer
from lightning_megatron.transformer.recompute import TORCH_CHECKPOINT
from lightning_megatron.transformer.te_attention import TECoreAttention
from lightning_megatron.transformer.te_experts import TEExperts


class TELinear(nn.Module):
    """A linear that Transformer Engine runs, with the norm in front of it fused in where there is one.

    `tile` divides the tokens that each rank hands to it.
    """

    def __init__(self, linear: ParallelLinear, tile: int, norm: LayerNorm | RMSNorm | None = None) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        # Ranks whose tokens, each with its padding, are in the input, and in the output.
        num_ranks, is_column = linear.sp.size, isinstance(linear, ColumnParallelLinear)
        self._num_in, self._num_out = (1, num_ranks) if is_column else (num_ranks, 1)
        self._tile = tile
        # After the weight has changed: the engine casts it once for the microbatches that follow.
        self.is_first_microbatch = True
        # In tuples: neither the engine's module nor the norm is a child, whose parameters would count twice.
        self._norm = (norm,)
        self._engine = (_engine_of(linear, norm),)

    def forward(self, x_TI: Tensor, tokens: object = None) -> Tensor:
        parameters = {"weight": self.weight.flatten(0, -2)}
        if self.bias is not None:
            parameters["bias"] = self.bias.flatten()
        [norm], [engine] = self._norm, self._engine
        if norm is not None:
            parameters |= {f"layer_norm_{name}": parameter for name, parameter in norm.named_parameters()}
        is_first = None
        if torch.is_grad_enabled():
            is_first, self.is_first_microbatch = self.is_first_microbatch, False
        num_tokens = x_TI.shape[0] // self._num_in
        num_padding = -num_tokens % self._tile
        padded = _padded(x_TI, self._num_in, num_padding)
        y: Tensor = functional_call(engine, parameters, (padded,), {"is_first_microbatch": is_first})
        y_TO = _without_padding(y, self._num_out, num_tokens, num_padding)
        return y_TO.view(y_TO.shape[0], *self.weight.shape[:-1])


def _padded(x_TI: Tensor, num_ranks: int, num_padding: int) -> Tensor:
    """The tokens of so many ranks, each followed by its padding."""
    if not num_padding:
        return x_TI
    return F.pad(x_TI.view(num_ranks, -1, x_TI.shape[1]), (0, 0, 0, num_padding)).flatten(0, 1)


def _without_padding(y: Tensor, num_ranks: int, num_tokens: int, num_padding: int) -> Tensor:
    if not num_padding:
        return y
    return y.view(num_ranks, -1, y.shape[1])[:, :num_tokens].flatten(0, 1)


class FusedNorm(nn.Module):
    """Stands in for a norm that the linear after it computes: its parameters, and hidden states as they are."""

    def __init__(self, norm: LayerNorm | RMSNorm) -> None:
        super().__init__()
        for name, parameter in norm.named_parameters():
            self.register_parameter(name, parameter)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        return hidden_TH


class TELayer:
    """A transformer layer whose linears, experts and attention Transformer Engine runs, until `give_back`."""

    def __init__(self, layer: PreNormLayer, tile: int) -> None:
        if any(isinstance(module, ParallelLinear) and module.lora is not None for module in layer.modules()):
            raise ValueError(
                "Transformer Engine runs whole linears and cannot run the low-rank paths (lora) beside them; use fp8 "
                "with engine='torch', or leave one of the two out"
            )
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []
        self.twins: list[TELinear | TEExperts] = []
        self._layer, self._tile = layer, tile
        layer.checkpoint = fp8.checkpoint
        assert isinstance(layer.attention, SelfAttention), "the rules refuse latent attention with this engine"
        self._attention: tuple[SelfAttention, CoreAttention] = (layer.attention, layer.attention.core_attention)
        # While its linears are there still: they say how it is cut.
        layer.attention.core_attention = TECoreAttention(layer.attention)
        self._add_twins(layer.attention, norm="attention_norm", layer=layer)
        if isinstance(layer, TransformerLayer):
            self._add_twins(layer.mlp, norm="mlp_norm", layer=layer)
        elif isinstance(layer, ExpertLayer):
            self.twins.append(TEExperts(layer.moe.experts, tile))
            self._replace(layer.moe, "experts", self.twins[-1])
            if layer.moe.shared is not None:
                self._add_twins(layer.moe.shared)

    def _add_twins(self, parent: nn.Module, *, norm: str = "", layer: PreNormLayer | None = None) -> None:
        """Replaces the linears of a module; its column-parallel one computes the layer's norm of that name, too."""
        for name, linear in list(parent.named_children()):
            if isinstance(linear, ParallelLinear):
                is_column = isinstance(linear, ColumnParallelLinear)
                folded = self._folded(layer, norm) if is_column and layer is not None else None
                self.twins.append(TELinear(linear, self._tile, folded))
                self._replace(parent, name, self.twins[-1])

    def _folded(self, layer: PreNormLayer, name: str) -> LayerNorm | RMSNorm | None:
        """The norm of this name, which the linear after it is to compute from here on; None where there is none."""
        norm = layer.get_submodule(name)
        if not isinstance(norm, LayerNorm | RMSNorm) or isinstance(norm, ZeroCenteredRMSNorm):
            # The engine has another way to scale by 1 + weight: the norm stays before the linear.
            return None
        self._replace(layer, name, FusedNorm(norm))
        return norm

    def _replace(self, parent: nn.Module, name: str, child: nn.Module) -> None:
        self._replaced.append((parent, name, parent.get_submodule(name)))
        setattr(parent, name, child)

    def forget(self) -> None:
        """Drops casts of weights, which have changed."""
        for twin in self.twins:
            twin.is_first_microbatch = True

    def give_back(self) -> None:
        """Puts back the linears, norms and attention that were there."""
        self._layer.checkpoint = TORCH_CHECKPOINT
        attention, core_attention = self._attention
        attention.core_attention = core_attention
        for parent, name, child in self._replaced:
            setattr(parent, name, child)


def _engine_of(linear: ParallelLinear, norm: LayerNorm | RMSNorm | None) -> nn.Module:
    is_column = isinstance(linear, ColumnParallelLinear)
    rows, columns = linear.weight.flatten(0, -2).shape
    inputs, outputs = (columns, rows * linear.tp.size) if is_column else (columns * linear.tp.size, rows)
    options: dict[str, Any] = {
        "tp": linear.tp,
        "sp": linear.sp,
        "bias": linear.bias is not None,
        "params_dtype": linear.weight.dtype,
        "device": "meta",
    }
    if norm is None:
        mode: ParallelMode = "column" if is_column else "row"
        return fp8.linear(inputs, outputs, mode=mode, **options)
    kind = "LayerNorm" if isinstance(norm, LayerNorm) else "RMSNorm"
    return fp8.norm_linear(inputs, outputs, eps=norm.eps, normalization=kind, **options)

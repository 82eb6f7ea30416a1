"""The twin of a layer's experts: Transformer Engine's grouped linears, with our parameters.

Its products in float8 want each expert's rows in multiples of a tile, so rows are padded with zeros in between. An
expert without rows gets a tile of zeros: its weights' gradients are zeros, computed as all others.

P rows with those of padding, R rows, L own experts, H hidden, F features of an expert.
"""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_megatron.moe.experts import DispatchedTokens, Experts
from lightning_megatron.moe.grouped_gemm import ExpertGroups
from lightning_megatron.moe.weighted_activation import scale_rows, weighted_activation
from lightning_megatron.precision import fp8


class TEExperts(nn.Module):
    """Experts that Transformer Engine runs, with the parameters of `Experts` under their names."""

    def __init__(self, experts: Experts, tile: int) -> None:
        super().__init__()
        self._tile = tile
        self.up, self.down = experts.up, experts.down
        self.up_bias, self.down_bias = experts.up_bias, experts.down_bias
        self.axes, self.activation = experts.axes, experts.activation
        # After the weights have changed: the engine casts them once for the microbatches that follow.
        self.is_first_microbatch = True
        num_own, hidden_size, num_features = self.down.shape
        width = self.up[0].numel() // (num_features * hidden_size)
        # In a tuple: what the engine's modules hold by themselves would count as parameters.
        options: dict[str, Any] = {"bias": False, "params_dtype": self.up.dtype, "device": "meta"}
        self._engines = (
            fp8.grouped_linear(num_own, hidden_size, width * num_features, **options),
            fp8.grouped_linear(num_own, num_features, hidden_size, **options),
        )

    def forward(self, tokens: DispatchedTokens) -> Tensor:
        rows_RH, probs_R, groups = tokens
        sizes = [max(-(-size // self._tile), 1) * self._tile for size in groups.sizes]
        index_R = _padded_indices(groups, sizes, rows_RH.device)
        rows_PH = rows_RH.new_zeros(sum(sizes), rows_RH.shape[1]).index_copy(0, index_R, rows_RH)
        probs_P = probs_R.new_zeros(sum(sizes)).index_copy(0, index_R, probs_R)
        is_first = None
        if torch.is_grad_enabled():
            is_first, self.is_first_microbatch = self.is_first_microbatch, False
        up, down = self._engines
        up_PF = _times(up, self.up, rows_PH, sizes, is_first).view(len(rows_PH), *self.up.shape[1:-1])
        if self.up_bias is not None:
            up_PF = up_PF + _of_each_row(self.up_bias, sizes)
        weighed_PF = weighted_activation(up_PF, probs_P, self.activation)
        output_PH = _times(down, self.down, weighed_PF, sizes, is_first)
        if self.down_bias is not None:
            output_PH = output_PH + self._second_bias(probs_P, sizes)
        return output_PH.index_select(0, index_R)

    def _second_bias(self, probs_P: Tensor, sizes: list[int]) -> Tensor:
        """This rank's share of the second bias; other ranks of etp add nothing, and have the same gradient of it."""
        assert self.down_bias is not None
        bias_PH = _of_each_row(self.down_bias, sizes)
        return scale_rows(bias_PH if self.axes.etp.is_first else bias_PH - bias_PH.detach(), probs_P)


def _padded_indices(groups: ExpertGroups, sizes: list[int], device: torch.device) -> Tensor:
    """Index of each row among those with padding: int64 [R]."""
    starts = [0, *itertools.accumulate(sizes)][:-1]
    spans = [torch.arange(start, start + size) for start, size in zip(starts, groups.sizes, strict=True)]
    return torch.cat(spans).to(device, non_blocking=True)


def _times(engine: nn.Module, weight: Tensor, rows: Tensor, sizes: list[int], is_first: bool | None) -> Tensor:
    parameters = {f"weight{number}": own for number, own in enumerate(weight.flatten(1, -2).unbind())}
    product: Tensor = functional_call(engine, parameters, (rows, sizes), {"is_first_microbatch": is_first})
    return product


def _of_each_row(bias: Tensor, sizes: list[int]) -> Tensor:
    """The bias [L, ...] of each row's expert, [P, ...]."""
    return bias.repeat_interleave(torch.tensor(sizes, device=bias.device), dim=0, output_size=sum(sizes))

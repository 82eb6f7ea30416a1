"""A stand-in for Transformer Engine: its public names, doing what they promise in plain torch, over our groups.

It writes down how it was built and called. Put into `sys.modules` by a test, for that test alone.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.comm import differentiable
from lightning_megatron.mesh import Axis


class Format(Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"
    E5M2 = "e5m2"


@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"


@dataclass
class Float8CurrentScaling:
    fp8_format: Format = Format.HYBRID


@dataclass
class MXFP8BlockScaling:
    fp8_format: Format = Format.E4M3


@dataclass
class Log:
    """The calls of the stand-in."""

    built: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    first_microbatch: list[bool | None] = field(default_factory=list)
    """`is_first_microbatch` of each forward."""
    attended: list[torch.Size] = field(default_factory=list)
    """The queries of each attention."""
    autocasts: list[tuple[Any, Any]] = field(default_factory=list)
    """Recipe and group of each."""
    is_open: bool = False


def install(monkeypatch: pytest.MonkeyPatch, *, is_old: bool = False) -> Log:
    """Makes `import transformer_engine` give the stand-in until the test ends; an old one has former names."""
    log = Log()

    class Linear(nn.Module):
        def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
            super().__init__()
            log.built.append((type(self).__name__, (in_features, out_features), options))
            size = options["tp_size"]
            is_row = options["parallel_mode"] == "row"
            shape = (out_features, in_features // size) if is_row else (out_features // size, in_features)
            device, dtype = options["device"], options["params_dtype"]
            self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            if options["bias"]:
                self.bias = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype))
            self.options, self.is_row = options, is_row

        def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
            assert log.is_open and not self.weight.is_meta
            log.first_microbatch.append(is_first_microbatch)
            group, size = self.options["tp_group"], self.options["tp_size"]
            ranks = tuple(range(size))
            tp = Axis("tp", size, group.rank() if group is not None else 0, ranks, group)
            is_cut = self.options["sequence_parallel"]
            bias = self.bias if self.options["bias"] else None
            if self.is_row:
                y = F.linear(x, self.weight)
                y = differentiable.reduce_scatter(y, tp) if is_cut else differentiable.reduce(y, tp)
                return y if bias is None else y + bias
            x = differentiable.all_gather(x, tp) if is_cut else differentiable.copy(x, tp)
            return F.linear(x, self.weight, bias)

    class LayerNormLinear(Linear):
        def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
            super().__init__(in_features, out_features, **options)
            self.layer_norm_weight = nn.Parameter(torch.empty(in_features, device=options["device"]))
            if options["normalization"] == "LayerNorm":
                self.layer_norm_bias = nn.Parameter(torch.empty(in_features, device=options["device"]))

        def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
            shape, eps = x.shape[-1:], self.options["eps"]
            if self.options["normalization"] == "LayerNorm":
                x = F.layer_norm(x, shape, self.layer_norm_weight, self.layer_norm_bias, eps)
            else:
                x = F.rms_norm(x, shape, self.layer_norm_weight, eps)
            return super().forward(x, is_first_microbatch)

    class GroupedLinear(nn.Module):
        def __init__(self, num_gemms: int, in_features: int, out_features: int, **options: Any) -> None:
            super().__init__()
            log.built.append(("GroupedLinear", (num_gemms, in_features, out_features), options))
            assert not options["bias"] and not options["sequence_parallel"]
            size = options["tp_size"]
            is_row = options["parallel_mode"] == "row"
            shape = (out_features, in_features // size) if is_row else (out_features // size, in_features)
            for number in range(num_gemms):
                weight = torch.empty(shape, device=options["device"], dtype=options["params_dtype"])
                self.register_parameter(f"weight{number}", nn.Parameter(weight))

        def forward(self, x: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Tensor:
            # It sums nothing over ranks, and takes only full tiles of 16 rows.
            assert log.is_open and len(x) == sum(m_splits) and all(m > 0 and m % 16 == 0 for m in m_splits)
            log.first_microbatch.append(is_first_microbatch)
            weights = [getattr(self, f"weight{number}") for number in range(len(m_splits))]
            assert not any(weight.is_meta for weight in weights)
            return torch.cat([F.linear(rows, w) for rows, w in zip(x.split(m_splits), weights, strict=True)])

    class DotProductAttention(nn.Module):
        def __init__(self, num_attention_heads: int, kv_channels: int, **options: Any) -> None:
            super().__init__()
            log.built.append(("DotProductAttention", (num_attention_heads, kv_channels), options))
            self.heads, self.head_dim, self.options = num_attention_heads, kv_channels, options

        def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            size, groups = self.options["tp_size"], self.options["num_gqa_groups"]
            # In FP8 it would join the amaxes that ranks agree on.
            assert not log.is_open and queries.dtype == keys.dtype == values.dtype
            # Its kernels are of 16 bits; it materialises the scores of others.
            assert queries.dtype.itemsize == 2 and self.head_dim % 8 == 0 and self.options["qkv_format"] == "bshd"
            assert queries.shape[2:] == (self.heads // size, self.head_dim) and self.heads % groups == 0
            assert keys.shape == values.shape and keys.shape[2:] == (groups // size, self.head_dim)
            positions = torch.arange(queries.shape[1])
            distance = positions - positions[:, None]
            left, right = self.options["window_size"]
            assert (right == 0) is (self.options["attn_mask_type"] == "causal")
            seen = torch.ones_like(distance, dtype=torch.bool)
            seen &= (distance <= right) if right >= 0 else seen
            seen &= (distance >= -left) if left >= 0 else seen
            log.attended.append(queries.shape)
            q, k, v = (x.transpose(1, 2).float() for x in (queries, keys, values))
            k, v = (x.repeat_interleave(self.heads // groups, dim=1) for x in (k, v))
            scores = (q @ k.transpose(-1, -2) * self.options["softmax_scale"]).masked_fill(~seen, -torch.inf)
            return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2).to(queries.dtype)

    @contextmanager
    def autocast(*, enabled: bool, recipe: Any = None, amax_reduction_group: Any = None) -> Iterator[None]:
        before = log.is_open
        if enabled:
            log.autocasts.append((recipe, amax_reduction_group))
        log.is_open = enabled
        yield
        log.is_open = before

    def fp8_autocast(*, enabled: bool, fp8_recipe: Any = None, fp8_group: Any = None) -> AbstractContextManager[None]:
        assert is_old, "newer releases warn of this name"
        return autocast(enabled=enabled, recipe=fp8_recipe, amax_reduction_group=fp8_group)

    package, common, recipe, torch_part = (
        ModuleType(name)
        for name in (
            "transformer_engine",
            "transformer_engine.common",
            "transformer_engine.common.recipe",
            "transformer_engine.pytorch",
        )
    )
    contents: dict[ModuleType, dict[str, Any]] = {
        package: {"common": common, "pytorch": torch_part, "__path__": []},
        common: {"recipe": recipe, "__path__": []},
        recipe: {"Format": Format, "DelayedScaling": DelayedScaling, "Float8CurrentScaling": Float8CurrentScaling},
        torch_part: {
            "Linear": Linear,
            "LayerNormLinear": LayerNormLinear,
            "GroupedLinear": GroupedLinear,
            "DotProductAttention": DotProductAttention,
            "fp8_autocast": fp8_autocast,
            **({} if is_old else {"autocast": autocast}),
        },
    }
    for module, names in contents.items():
        for name, value in names.items():
            setattr(module, name, value)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return log


def break_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `import transformer_engine` end as it does on a machine without CUDA's libraries."""

    class Refuse:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> None:
            if name.partition(".")[0] == "transformer_engine":
                raise RuntimeError("cudnn shared object not found.")

    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Refuse, *sys.meta_path])

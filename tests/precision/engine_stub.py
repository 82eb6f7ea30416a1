"""A stand-in for Transformer Engine: its public names, doing what they promise in plain torch, over our groups.

It takes the arguments of the real classes in two releases, refuses what they refuse, and writes down how it was built
and called. Put into `sys.modules` by a test, for that test alone. Source of signatures, checks and the order of
contexts: NVIDIA/TransformerEngine at v2.2 and v2.18, transformer_engine/pytorch/{module,distributed.py,fp8.py,
quantization.py,utils.py} and transformer_engine/common/recipe.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from inspect import Parameter, Signature
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn

from lightning_megatron.comm import differentiable
from lightning_megatron.mesh import Axis

OLDEST, NEWEST = "2.2", "2.18"


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
    margin: int = 0
    fp8_format: Format = Format.E4M3


@dataclass
class NVFP4BlockScaling:
    fp8_format: Format = Format.E4M3


def _signature(required: str, optional: dict[str, Any], names: str) -> Signature:
    """Of parameters that are required, of those whose defaults are read here, and of others by name."""
    kind = Parameter.POSITIONAL_OR_KEYWORD
    rest = optional | dict.fromkeys(names.split())
    return Signature(
        [Parameter(name, kind) for name in required.split()]
        + [Parameter(name, kind, default=default) for name, default in rest.items()]
    )


_PARALLEL: dict[str, Any] = {"sequence_parallel": False, "tp_group": None, "tp_size": 1}
_PLAIN: dict[str, Any] = {**_PARALLEL, "bias": True, "parallel_mode": None, "device": "cuda"}
_LINEAR = "fuse_wgrad_accumulation get_rng_state_tracker init_method return_bias params_dtype ub_name "
_SPLIT = "parameters_split ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad "
_NORM = "return_layernorm_output return_layernorm_output_gathered zero_centered_gamma "
_ATTENTION = (
    "attention_dropout get_rng_state_tracker layer_number attention_type cp_group cp_global_ranks cp_stream "
    "cp_comm_type softmax_scale "
)
# What later releases add.
_ADDED: dict[str, str] = {
    "Linear": "delay_wgrad_compute symmetric_ar_type save_original_input name",
    "LayerNormLinear": "delay_wgrad_compute symmetric_ar_type name",
    "GroupedLinear": "delay_wgrad_compute save_original_input single_grouped_weight single_grouped_bias name",
    "DotProductAttention": "bottom_right_diagonal softmax_type return_max_logit name",
}


def signatures(version: str) -> dict[str, Signature]:
    """Of the constructor of each class in a release."""
    added = _ADDED if version == NEWEST else dict.fromkeys(_ADDED, "")
    norm = {"eps": 1e-5, "normalization": "LayerNorm"}
    of_attention = {**_PARALLEL, "num_gqa_groups": None, "qkv_format": "sbhd", "attn_mask_type": "causal"}
    return {
        "Linear": _signature(
            "in_features out_features", _PLAIN, f"{_LINEAR}{_SPLIT}rng_tracker_name {added['Linear']}"
        ),
        "LayerNormLinear": _signature(
            "in_features out_features", _PLAIN | norm, f"{_LINEAR}{_SPLIT}{_NORM}{added['LayerNormLinear']}"
        ),
        "GroupedLinear": _signature(
            "num_gemms in_features out_features",
            _PLAIN,
            f"{_LINEAR}rng_tracker_name ub_overlap_rs ub_overlap_ag {added['GroupedLinear']}",
        ),
        "DotProductAttention": _signature(
            "num_attention_heads kv_channels",
            of_attention | {"window_size": None},
            f"{_ATTENTION}{added['DotProductAttention']}",
        ),
    }


@dataclass
class Log:
    """The calls of the stand-in, and whether FP8 is on."""

    built: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    first_microbatch: list[bool | None] = field(default_factory=list)
    """`is_first_microbatch` of each forward of linears."""
    in_fp8: list[bool] = field(default_factory=list)
    """Whether it multiplied in FP8."""
    rows: list[int] = field(default_factory=list)
    """The rows that it was given."""
    attended: list[torch.Size] = field(default_factory=list)
    """The queries of each attention."""
    autocasts: list[tuple[Any, Any]] = field(default_factory=list)
    """Recipe and group of each."""
    num_reductions: int = 0
    """Reductions of amaxes at the end of autocasts."""
    is_open: bool = False
    recipe: Any = None
    depth: int = 0

    def note(self, rows: int, is_first: bool | None) -> None:
        """Notes a forward of linears."""
        self.first_microbatch.append(is_first)
        self.in_fp8.append(self.is_open)
        self.rows.append(rows)

    def check(self, x: Tensor, weight: Tensor) -> None:
        """Refuses what the real one refuses."""
        assert not weight.is_meta
        height, width = (32, 32) if isinstance(self.recipe, MXFP8BlockScaling) else (8, 16)
        for tensor in (x, weight):
            if self.is_open and (len(tensor) % height or tensor.shape[1] % width):
                raise ValueError(f"FP8 needs dims divisible by {height} and {width}, got {list(tensor.shape)}")


def install(monkeypatch: pytest.MonkeyPatch, *, version: str = NEWEST) -> Log:
    """Makes `import transformer_engine` give the stand-in of a release until the test ends."""
    log, known = Log(), signatures(version)

    def taken(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a constructor by name, with defaults."""
        bound = known[kind].bind(*args, **kwargs)
        log.built.append((kind, args, kwargs))
        bound.apply_defaults()
        return bound.arguments

    class Linear(nn.Module):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            self.options = taken(type(self).__name__, args, kwargs)
            size = self.options["tp_size"]
            self.is_row = self.options["parallel_mode"] == "row"
            inputs, outputs = self.options["in_features"], self.options["out_features"]
            shape = (outputs, inputs // size) if self.is_row else (outputs // size, inputs)
            device, dtype = self.options["device"], self.options["params_dtype"]
            self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            if self.options["bias"]:
                self.bias = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype))

        def forward(
            self,
            inp: Tensor,
            is_first_microbatch: bool | None = None,
            fp8_output: bool = False,
            fp8_grad: bool = False,
        ) -> Tensor:
            x = inp
            log.note(len(x), is_first_microbatch)
            log.check(x, self.weight)
            group, size = self.options["tp_group"], self.options["tp_size"]
            assert size == 1 or group is not None, "TP group not initialized."
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
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            inputs, device = self.options["in_features"], self.options["device"]
            self.layer_norm_weight = nn.Parameter(torch.empty(inputs, device=device))
            if self.options["normalization"] == "LayerNorm":
                self.layer_norm_bias = nn.Parameter(torch.empty(inputs, device=device))

        def forward(
            self,
            inp: Tensor,
            is_first_microbatch: bool | None = None,
            fp8_output: bool = False,
            fp8_grad: bool = False,
        ) -> Tensor:
            x, shape, eps = inp, inp.shape[-1:], self.options["eps"]
            if self.options["normalization"] == "LayerNorm":
                x = F.layer_norm(x, shape, self.layer_norm_weight, self.layer_norm_bias, eps)
            else:
                x = F.rms_norm(x, shape, self.layer_norm_weight, eps)
            return super().forward(x, is_first_microbatch)

    class GroupedLinear(nn.Module):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            self.options = taken("GroupedLinear", args, kwargs)
            assert not self.options["bias"] and not self.options["sequence_parallel"]
            size, is_row = self.options["tp_size"], self.options["parallel_mode"] == "row"
            inputs, outputs = self.options["in_features"], self.options["out_features"]
            if self.options["parallel_mode"] is not None:
                inputs, outputs = (inputs // size, outputs) if is_row else (inputs, outputs // size)
            for number in range(self.options["num_gemms"]):
                device, dtype = self.options["device"], self.options["params_dtype"]
                weight = torch.empty(outputs, inputs, device=device, dtype=dtype)
                self.register_parameter(f"weight{number}", nn.Parameter(weight))

        def forward(self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Tensor:
            # It sums nothing over ranks.
            assert len(inp) == sum(m_splits) and len(m_splits) == self.options["num_gemms"]
            is_current = isinstance(log.recipe, Float8CurrentScaling)
            if log.is_open and version != NEWEST and not isinstance(log.recipe, DelayedScaling):
                raise NotImplementedError(f"GroupedLinear does not yet support {type(log.recipe).__name__}")
            if log.is_open and is_current and self.options["tp_size"] > 1:
                raise ValueError("GroupedLinear doesn't support TP > 1 with Float8 current scaling.")
            weights = [getattr(self, f"weight{number}") for number in range(len(m_splits))]
            log.note(len(inp), is_first_microbatch)
            parts = list(zip(inp.split(m_splits), weights, strict=True))
            for rows, weight in parts:
                log.check(rows, weight)
                # Its kernel does not define the product of no rows.
                assert len(rows)
            return torch.cat([F.linear(rows, weight) for rows, weight in parts])

    class DotProductAttention(nn.Module):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            self.options = taken("DotProductAttention", args, kwargs)
            self.heads, self.head_dim = self.options["num_attention_heads"], self.options["kv_channels"]

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
    def autocast(
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Any = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> Iterator[None]:
        before = log.is_open, log.recipe
        if enabled:
            log.autocasts.append((recipe, amax_reduction_group))
        log.is_open, log.recipe, log.depth = enabled, recipe, log.depth + 1
        try:
            yield
        finally:
            log.is_open, log.recipe = before
            log.depth -= 1
            log.num_reductions += enabled and log.depth == 0 and torch.is_grad_enabled()

    def fp8_autocast(
        enabled: bool = True,
        calibrating: bool = False,
        fp8_recipe: Any = None,
        fp8_group: Any = None,
        _graph: bool = False,
    ) -> AbstractContextManager[None]:
        assert version != NEWEST, "newer releases warn of this name"
        return autocast(enabled=enabled, recipe=fp8_recipe, amax_reduction_group=fp8_group)

    def checkpoint(
        function: Callable[..., Any],
        *args: Any,
        use_reentrant: bool = True,
        context_fn: Callable[[], Any] = torch_checkpoint.noop_context_fn,
    ) -> Any:
        """The real one keeps neither group nor depth of the autocast around it, and runs to the end."""
        assert not use_reentrant
        enabled, recipe = log.is_open, log.recipe

        def contexts() -> tuple[Any, Any]:
            forward, user_recompute = context_fn()

            @contextmanager
            def recompute() -> Iterator[None]:
                with ExitStack() as stack:
                    stack.enter_context(user_recompute)
                    stack.enter_context(autocast(enabled=enabled, recipe=recipe))
                    yield

            return forward, recompute()

        with torch_checkpoint.set_checkpoint_early_stop(False):
            return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=contexts)

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
        package: {"common": common, "pytorch": torch_part, "__path__": [], "__version__": f"{version}.0"},
        common: {"recipe": recipe, "__path__": []},
        recipe: {
            "Format": Format,
            "DelayedScaling": DelayedScaling,
            "Float8CurrentScaling": Float8CurrentScaling,
            "MXFP8BlockScaling": MXFP8BlockScaling,
        },
        torch_part: {
            "Linear": Linear,
            "LayerNormLinear": LayerNormLinear,
            "GroupedLinear": GroupedLinear,
            "DotProductAttention": DotProductAttention,
            "checkpoint": checkpoint,
            "fp8_autocast": fp8_autocast,
            **({"autocast": autocast} if version == NEWEST else {}),
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

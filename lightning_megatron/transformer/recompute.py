"""Activation recomputation: what is not saved for backward, and recomputed there from what is.

Loss and gradients are those of a run that saves everything, to the bit: dropout masks are functions of the tokens
(see `dropout`), and the states of generators that a user's own layers draw from are restored.

    granularity   what is recomputed                           what is saved of it
    none          nothing                                      all
    selective     core_attention: scores, softmax, dropout     queries, keys, values
                  norm: the outputs of a layer's two norms     hidden states, which the norms save anyway; of a layer
                                                               of experts the second output stays, without "moe"
                  activation: that of the MLP                  what it reads
                  mlp: the full MLP                            its input
                  moe: the expert layers                       their input
    full          full layers                                  the input of each group of layers

What is saved may be in host memory until the backward (`offload`), in whatever granularity.
Source: Korthikanti et al., arXiv 2205.05198, section 5 (selective); Chen et al., arXiv 1604.06174 (full).
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, get_args

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_megatron.comm import collectives
from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.mesh import Axis
from lightning_megatron.precision.autocast import autocast, autocast_dtype
from lightning_megatron.precision.fp8 import Contexts


class Checkpoint(Protocol):
    """Runs a function and saves its inputs alone, as torch's checkpoint does."""

    def __call__(
        self, run: Callable[..., Any], *inputs: Any, context_fn: Contexts = torch_checkpoint.noop_context_fn
    ) -> Any: ...


TORCH_CHECKPOINT: Checkpoint = partial(torch_checkpoint.checkpoint, use_reentrant=False)
Granularity = Literal["none", "selective", "full"]
RecomputePart = Literal["core_attention", "norm", "activation", "mlp", "moe"]
Method = Literal["uniform", "block"]

# Which settings act under which granularity.
_ACTS_UNDER = {"parts": "selective", "method": "full", "num_layers": "full", "shard_saved_inputs": "full"}


@config_dataclass
class RecomputeConfig:
    """Activation recomputation (checkpointing): what the backward recomputes in order to save memory."""

    granularity: Granularity = "none"
    """Granularity of activation recomputation: none, selective (parts of each layer), or full (entire layers)."""
    parts: tuple[RecomputePart, ...] = ("core_attention",)
    """Parts of each layer that are recomputed under selective granularity. core_attention acts only with attention
    dropout, where scores are materialised: the fused kernel saves none."""
    method: Method = "uniform"
    """Layers that are recomputed under full granularity: all, in groups that save their first input (uniform), or the
    first num_layers of each stage, one by one (block)."""
    num_layers: int = 1
    """Full granularity: layers of a group (uniform), or recomputed layers of each stage (block)."""
    shard_saved_inputs: bool = False
    """Full granularity without sequence parallelism: whether tensor-parallel ranks share each saved input and
    all-gather it in the backward."""
    offload: bool = False
    """Copy what layers save for the backward to host memory in the forward, and back when the backward needs it; with
    full granularity that is the input of each group of layers."""

    def __post_init__(self) -> None:
        if faults := self.faults():
            raise ValueError("\n".join(faults))

    @property
    def recomputed_parts(self) -> tuple[RecomputePart, ...]:
        """Parts of each layer that are recomputed under selective granularity."""
        return self.parts if self.granularity == "selective" else ()

    def faults(self) -> list[str]:
        """Every rule that this configuration breaks, one sentence each."""
        faults = [
            f"recompute {name} ({getattr(self, name)!r}) must be one of {_listed(get_args(choices))}"
            for name, choices in (("granularity", Granularity), ("method", Method))
            if getattr(self, name) not in get_args(choices)
        ]
        faults += [
            f"recompute part {part!r} is unknown; parts may be {_listed(get_args(RecomputePart))}"
            for part in self.parts
            if part not in get_args(RecomputePart)
        ]
        if self.granularity == "selective" and not self.parts:
            faults.append("recompute parts are empty; name some, or use granularity='none'")
        if "mlp" in self.parts and "activation" in self.parts:
            faults.append("recompute part 'activation' is inside 'mlp'; leave one of them out")
        if self.offload and self.shard_saved_inputs:
            faults.append(
                "recompute offload (True) and shard_saved_inputs (True) both move the saved inputs of layers; leave "
                "one of them out"
            )
        if self.offload and (held := [part for part in self.recomputed_parts if part in ("norm", "activation")]):
            faults.append(
                f"recompute offload (True) does not move what {_listed(held)} are recomputed from; leave one of them "
                "out"
            )
        if self.num_layers < 1:
            faults.append(f"recompute num_layers ({self.num_layers}) must be at least 1")
        defaults = {field.name: field.default for field in fields(self)}
        if self.granularity in get_args(Granularity):
            faults += [
                f"recompute {name} ({getattr(self, name)!r}) acts with granularity={granularity!r} alone, and it is "
                f"{self.granularity!r}; leave {name} out, or use granularity={granularity!r}"
                for name, granularity in _ACTS_UNDER.items()
                if granularity != self.granularity and getattr(self, name) != defaults[name]
            ]
        return faults


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


# Selective: parts of a layer


class RecomputeLayer(nn.Module):
    """A layer that can recompute parts of its forward in the backward, at first none. On [T/sp, H]."""

    recomputable: ClassVar[frozenset[str]] = frozenset()
    """Parts that it knows."""

    def __init__(self) -> None:
        super().__init__()
        # Parts that it recomputes.
        self.recomputed: frozenset[str] = frozenset()
        # What recomputes it: its linears may be those of a library that has its own.
        self.checkpoint: Checkpoint = TORCH_CHECKPOINT


def set_recomputed(module: nn.Module, config: RecomputeConfig) -> None:
    """Tells every layer of a module which of its parts to recompute."""
    parts = frozenset(config.recomputed_parts)
    for layer in module.modules():
        if isinstance(layer, RecomputeLayer):
            layer.recomputed = parts & layer.recomputable


def recomputable_parts(module: nn.Module) -> set[str]:
    """Parts that the layers of a module can recompute."""
    return {part for layer in module.modules() if isinstance(layer, RecomputeLayer) for part in layer.recomputable}


def part_faults(config: RecomputeConfig, offered: set[str]) -> list[str]:
    """One sentence for each configured part that no layer of the full model knows."""
    missing = [part for part in config.recomputed_parts if part not in offered]
    may_be = f"parts may be {_listed(sorted(offered))}" if offered else "use granularity='full'"
    what = {"moe": "has no expert layers"}
    return [
        f"recompute part {part!r} cannot act: the model {what.get(part, 'has no layer with that part')}; {may_be}"
        for part in missing
    ]


def checkpoint(
    run: Callable[..., Any], *inputs: Any, by: Checkpoint = TORCH_CHECKPOINT, buffers: Sequence[Tensor] = ()
) -> Any:
    """`run(*inputs)`, of which only the inputs are saved: the backward recomputes the rest.

    `buffers` are those that it changes (counts, running means): they change once.
    """
    if not torch.is_grad_enabled():
        return run(*inputs)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _Restored(buffers)

    # A compiler takes no `context_fn`.
    return by(run, *inputs, context_fn=contexts) if buffers else by(run, *inputs)


class _Restored:
    """A block after which buffers are what they were before it; can be entered again."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = buffers
        self._before: list[Tensor] = []

    def __enter__(self) -> None:
        self._before = [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(before)
        self._before = []


def apply_recomputed(make: Callable[[Tensor], Tensor], use: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`use(make(x))`; where `use` would save its input for backward, that is recomputed there.

    For a `make` that is cheap and draws no random numbers, and a `use` that saves its input as it is.
    """
    if torch.compiler.is_compiling():
        # A compiler takes no hooks; what it makes of a checkpoint is not saved either.
        return use(checkpoint(make, x))
    made = make(x)
    if not torch.is_grad_enabled():
        return use(made)
    source, dtype = x.detach(), autocast_dtype(x)
    # A name and not the tensor: autograd keeps the hooks themselves as long as what they packed.
    name = _name_of(made)

    def pack(saved: Tensor) -> Tensor | None:
        return None if _name_of(saved) == name else saved

    def unpack(saved: Tensor | None) -> Tensor:
        if saved is not None:
            return saved
        with torch.no_grad(), autocast(source, dtype):
            return make(source)

    with saved_tensors_hooks(pack, unpack):
        return use(made)


def _name_of(tensor: Tensor) -> tuple[object, ...]:
    """Identity of a tensor's elements and their order, among tensors that live at a time."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


# Full: entire layers


class RecomputablePart(Protocol):
    """A part of a stage, ready to run on what the part before it returned."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def is_layer(self) -> bool: ...

    @property
    def run(self) -> Callable[[Any], Any]: ...


class RecomputeRunner:
    """Runs the parts of a stage in turn, its layers recomputed as the configuration says; `tp` cuts saved inputs."""

    def __init__(self, config: RecomputeConfig, *, tp: Axis, sp: Axis) -> None:
        self._config = config
        self._tp = tp
        self._sp = sp
        self._is_sharding = config.shard_saved_inputs and tp.size > 1 and sp.size == 1
        self.to_host: Callable[[Tensor], Tensor] = to_host
        """Copies a tensor to host memory."""

    def with_config(self, config: RecomputeConfig) -> "RecomputeRunner":
        """A runner on the same ranks that follows another configuration."""
        runner = RecomputeRunner(config, tp=self._tp, sp=self._sp)
        runner.to_host = self.to_host
        return runner

    def __call__(self, parts: Sequence[RecomputablePart], hidden: Any) -> Any:
        for indices, is_recomputed in groups_of(self._config, [part.is_layer for part in parts]):
            group = [parts[index] for index in indices]
            run = self._run_recomputed if is_recomputed else _run_in_turn
            is_offloaded = self._config.offload and group[0].is_layer and torch.is_grad_enabled()
            hidden = self._run_offloaded(run, group, hidden) if is_offloaded else run(group, hidden)
        return hidden

    def _run_offloaded(
        self,
        run: Callable[[Sequence[RecomputablePart], Any], Any],
        group: Sequence[RecomputablePart],
        hidden: Any,
    ) -> Any:
        """Runs layers whose saved activations wait in host memory; weights stay, and integers, which are few."""
        # By their storages: autograd saves views of weights, too.
        kept = {
            x.untyped_storage()._cdata for part in group for x in (*part.module.parameters(), *part.module.buffers())
        }
        # Copies of this call, with what was copied: its name is another tensor's once it is freed.
        copies: dict[object, tuple[Tensor, _OnHost]] = {}

        def pack(saved: Tensor) -> "Tensor | _OnHost":
            is_moved = saved.is_floating_point() and saved.numel() > 0
            if not is_moved or saved.untyped_storage()._cdata in kept:
                return saved
            name = *_name_of(saved), saved.dtype, saved._version
            if name not in copies:
                copies[name] = saved, _OnHost(self.to_host(saved.detach()), saved.device)
            return copies[name][1]

        with saved_tensors_hooks(pack, _from_host):
            output = run(group, hidden)
        copies.clear()
        return output

    # What is recomputed is layers, which a compiler may have compiled each.
    @torch.compiler.disable
    def _run_recomputed(self, group: Sequence[RecomputablePart], hidden: Any) -> Any:
        tensors, spec = tree_flatten(hidden)
        buffers = [buffer for part in group for buffer in part.module.buffers()]
        # Outputs of a user's own layers may differ between the ranks of tp; hidden states of ours do not.
        is_alike = all(isinstance(part.module, RecomputeLayer) for part in group)
        ways = [part.module.checkpoint for part in group if isinstance(part.module, RecomputeLayer)]
        by = next((way for way in ways if way is not TORCH_CHECKPOINT), TORCH_CHECKPOINT)
        with _saved_in_shards(self._tp) if self._is_sharding and is_alike else nullcontext():
            return checkpoint(
                lambda *given: _run_in_turn(group, tree_unflatten(given, spec)), *tensors, by=by, buffers=buffers
            )


def groups_of(config: RecomputeConfig, are_layers: Sequence[bool]) -> list[tuple[range, bool]]:
    """Ranges of a stage's parts in order, and whether each is recomputed from its first input."""
    groups: list[tuple[range, bool]] = []
    num_layers = 0
    for index, is_layer in enumerate(are_layers):
        num_layers += is_layer
        is_full = is_layer and config.granularity == "full"
        is_recomputed = is_full and (config.method == "uniform" or num_layers <= config.num_layers)
        before, was_recomputed = groups[-1] if groups else (range(0), False)
        longest = config.num_layers if config.method == "uniform" else 1
        if is_recomputed and was_recomputed and len(before) < longest:
            groups[-1] = (range(before.start, index + 1), True)
        else:
            groups.append((range(index, index + 1), is_recomputed))
    return groups


def _run_in_turn(parts: Sequence[RecomputablePart], hidden: Any) -> Any:
    for part in parts:
        hidden = part.run(hidden)
    return hidden


class _OnHost(NamedTuple):
    """A saved tensor in host memory, and the device that it is of."""

    copy: Tensor
    device: torch.device


def to_host(x: Tensor) -> Tensor:
    """A copy in host memory, pinned beside a GPU: the host does not wait for it, which the device reads alone."""
    strides = torch.empty_like(x, device="meta").stride()
    held = torch.empty_strided(x.size(), strides, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
    return held.copy_(x, non_blocking=True)


def _from_host(saved: Tensor | _OnHost) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    held = saved.copy
    # No tensor is given to it from which its place would be taken.
    moved = torch.empty_strided(held.size(), held.stride(), dtype=held.dtype, device=saved.device)
    return moved.copy_(held, non_blocking=True)


class _SavedShard(NamedTuple):
    """This rank's shard of a saved tensor that all ranks share."""

    shard: Tensor
    shape: torch.Size


def _saved_in_shards(axis: Axis) -> saved_tensors_hooks:
    """Hooks that shard saved tensors, alike on all ranks of the axis, over it, and all-gather them in the backward."""

    def pack(saved: Tensor) -> Tensor | _SavedShard:
        if not saved.is_floating_point():
            return saved
        flat = F.pad(saved.detach().flatten(), (0, -saved.numel() % axis.size))
        return _SavedShard(collectives.shard_slice(flat, axis).clone(), saved.shape)

    def unpack(saved: Tensor | _SavedShard) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        return collectives.all_gather(saved.shard, axis)[: saved.shape.numel()].view(saved.shape)

    return saved_tensors_hooks(pack, unpack)

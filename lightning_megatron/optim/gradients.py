"""From the gradients that backward left on each rank to those of one device: sums over every axis that split them.

Runs once per optimizer step, between the last backward and the user's `on_after_backward`. Which sums a parameter needs
is read off its `Shard` and off the stages that hold its name:

    over          which parameters                                             why
    sp (tp)       those with `Shard.partial`                                   each rank saw its tokens only
    dp+cp         all                                                          each replica saw its samples only
    stages        names held by several stages of the model (tied weights)     each use adds its part
    stages        modules outside the pipelined model, in a schedule           only one stage ran them
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_megatron.comm import collectives
from lightning_megatron.comm.collectives import Pending
from lightning_megatron.mesh import Axis, Mesh, NewGroup
from lightning_megatron.sharding import Shard, shard_of

# Gradients above this size travel by themselves, in place; smaller ones are joined to save messages.
# Elements of a gradient whose squares are summed in float32.
_NORM_ROW = 256
_ALONE_BYTES = 1 << 18


@dataclass(frozen=True, eq=False)
class Held:
    """A parameter that this rank holds."""

    name: str
    parameter: nn.Parameter
    shard: Shard
    stages: Axis | None
    # the pp ranks that hold this name, where there are several
    is_outside: bool
    # of the pipelined model: a plain module that every stage holds

    @property
    def is_counted(self) -> bool:
        """Whether a sum over all parameters of the model takes this rank's copy."""
        return self.shard.is_counted and (self.stages is None or self.stages.is_first)


class Gradients:
    """The gradients of one rank's parameters.

    `named_parameters` in the same order on all ranks of a stage; `inside` are the names that belong to the pipelined
    model. Construction is collective over pp, and over the world where names are held by several stages.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        inside: set[str],
        mesh: Mesh,
        new_group: NewGroup,
        device: torch.device,
    ) -> None:
        self._mesh = mesh
        self._device = device
        # of every rank's messages, also those of a stage that has no parameter to tell it by
        self._replicas = mesh.axis("dp+cp")
        named = list(named_parameters)
        stages = stage_axes([name for name, _ in named], mesh, new_group)
        self.held = []
        for name, parameter in named:
            shard = shard_of(parameter)
            if not isinstance(getattr(parameter, "shard", None), Shard):
                # A user's own parameter is whole on every tp rank and must count once.
                shard = Shard(global_shape=tuple(parameter.shape), replicas=(mesh.tp,))
            self.held.append(Held(name, parameter, shard, stages.get(name), name not in inside))

    def take(self) -> dict[nn.Parameter, Tensor]:
        """Takes all gradients off their parameters."""
        taken = {}
        for held in self.held:
            if held.parameter.grad is not None:
                taken[held.parameter] = held.parameter.grad
                held.parameter.grad = None
        return taken

    def add(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Adds gradients that were taken to those that are there now."""
        for parameter, gradient in gradients.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    @torch.no_grad()
    def reduce(self, *, outside_over_stages: bool) -> None:
        """Makes every `.grad` that of one device, in place.

        `outside_over_stages` says that modules outside the pipelined model ran on one stage only, so that their
        gradients are to be summed; else each stage has them whole. A parameter with a gradient on some rank gets one on
        all; one without any keeps None.
        """
        trained = [held for held in self.held if held.parameter.requires_grad]
        self._agree_on_presence(trained, outside_over_stages)
        present = [held for held in trained if held.parameter.grad is not None]
        partial_by_axis: dict[tuple[int, ...], tuple[Axis, list[Tensor]]] = {}
        for held in present:
            if held.shard.partial is not None:
                axis = held.shard.partial
                partial_by_axis.setdefault(axis.ranks, (axis, []))[1].append(_grad(held))
        for axis, gradients in partial_by_axis.values():
            sum_in_place(gradients, axis)
        sum_in_place([_grad(held) for held in present], self._replicas)
        for axis, shared in self._by_stages(present, outside_over_stages):
            sum_in_place([_grad(held) for held in shared], axis)

    def _by_stages(self, held_ones: Sequence[Held], with_outside: bool) -> list[tuple[Axis, list[Held]]]:
        """What is to be summed over stages, by the axis of stages that hold it."""
        by_axis: dict[tuple[int, ...], tuple[Axis, list[Held]]] = {}
        # By name: stages hold shared parameters in orders of their own.
        for held in sorted(held_ones, key=lambda held: held.name):
            if held.stages is not None and (with_outside or not held.is_outside):
                by_axis.setdefault(held.stages.ranks, (held.stages, []))[1].append(held)
        return [by_axis[ranks] for ranks in sorted(by_axis)]

    def _agree_on_presence(self, trained: Sequence[Held], outside_over_stages: bool) -> None:
        """Gives zeros to parameters without a gradient here but with one on another rank that sums with this one."""
        shared = self._by_stages(trained, outside_over_stages)
        if self._replicas.size == 1 and not shared:
            return
        flags = torch.tensor([held.parameter.grad is not None for held in trained], dtype=torch.int32)
        flags = flags.to(self._device)
        collectives.all_reduce_(flags, self._replicas, "max")
        place = {held.name: i for i, held in enumerate(trained)}
        for axis, held_ones in shared:
            own = torch.tensor([place[held.name] for held in held_ones], device=flags.device)
            flags[own] = collectives.all_reduce(flags[own], axis, "max")
        for held, flag in zip(trained, flags.tolist(), strict=True):
            if flag and held.parameter.grad is None:
                held.parameter.grad = torch.zeros_like(held.parameter)

    def norm(self, parameters: Iterable[nn.Parameter] | None = None) -> Tensor:
        """The 2-norm of the whole model's gradient, [], float64: each parameter of the unsplit model counts once.

        Of `parameters` only, where given. Talks over pp+tp.
        """
        chosen = None if parameters is None else set(parameters)
        counted = [
            _grad(held)
            for held in self.held
            if held.parameter.grad is not None and held.is_counted and (chosen is None or held.parameter in chosen)
        ]
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        if counted:
            square = torch.stack([_square(gradient) for gradient in counted]).sum()
        return collectives.all_reduce(square, self._mesh.axis("pp+tp")).sqrt()

    @torch.no_grad()
    def clip(self, max_norm: float, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Scales the gradients of `parameters` so that their norm is at most `max_norm`; returns the norm before.

        As torch.nn.utils.clip_grad_norm_ on one device: the factor is max_norm / (norm + 1e-6) where that is below 1.
        """
        own = list(parameters)
        norm = self.norm(own)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        scale_in_place([parameter.grad for parameter in own if parameter.grad is not None], factor)
        return norm


def _grad(held: Held) -> Tensor:
    assert held.parameter.grad is not None
    return held.parameter.grad


def _square(x: Tensor) -> Tensor:
    """The sum of the squares of `x`, [], float64.

    Rows in float32 at least, their sum in float64: one float32 sum over a large tensor drifts on CPU, and float64
    throughout converts every element.
    """
    if x.is_contiguous() and x.numel() % _NORM_ROW == 0:
        dtype = torch.promote_types(x.dtype, torch.float32)
        x = torch.linalg.vector_norm(x.view(-1, _NORM_ROW), dim=1, dtype=dtype)
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm.square()


def sum_in_place(tensors: Sequence[Tensor], axis: Axis) -> None:
    """Sums each tensor over the axis, in place: large ones by themselves, small ones joined."""
    if axis.size == 1:
        return
    pending: list[Pending] = []
    joined: list[tuple[Pending, list[Tensor]]] = []
    small: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_contiguous() and tensor.numel() * tensor.element_size() >= _ALONE_BYTES:
            pending.append(collectives.all_reduce_(tensor, axis, wait=False))
        else:
            small.setdefault(tensor.dtype, []).append(tensor)
    for members in small.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in members])
        joined.append((collectives.all_reduce_(flat, axis, wait=False), members))
    for work in pending:
        work.wait()
    for work, members in joined:
        for tensor, summed in zip(members, work.wait().split([t.numel() for t in members]), strict=True):
            tensor.copy_(summed.view_as(tensor))


def stage_axes(names: Sequence[str], mesh: Mesh, new_group: NewGroup) -> dict[str, Axis]:
    """For each name that several stages hold, the axis of those stages. Collective over pp and the world."""
    by_stage = [set(held) for held in collectives.gather_objects(list(names), mesh.pp)]
    holders: dict[str, tuple[int, ...]] = {}
    for name in sorted(set().union(*by_stage)):
        stages = tuple(stage for stage, held in enumerate(by_stage) if name in held)
        if len(stages) > 1:
            holders[name] = stages
    axes: dict[tuple[int, ...], Axis] = {}
    for stages in sorted(set(holders.values())):
        if len(stages) == mesh.pp.size:
            axes[stages] = mesh.pp
            continue
        if mesh.pp.rank not in stages:
            # torch names a group after how many groups its rank has made: a rank that made none here would disagree
            # with the others about the name of the next one, and both would wait for ever.
            new_group((mesh.global_rank,))
            continue
        ranks = tuple(mesh.pp.ranks[stage] for stage in stages)
        group = new_group(tuple(sorted(ranks)))
        axes[stages] = Axis("stages", len(stages), stages.index(mesh.pp.rank), ranks, group)
    return {name: axes[stages] for name, stages in holders.items() if stages in axes}


def scale_in_place(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies each tensor by the number `factor`, []."""
    for dtype in {tensor.dtype for tensor in tensors}:
        torch._foreach_mul_([t for t in tensors if t.dtype is dtype], factor.to(dtype))

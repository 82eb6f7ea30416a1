"""Reduction of the gradients of each rank to those of one device, their norm, and clipping.

Runs once per optimizer step, between the last backward and the user's `on_after_backward`. Which reductions a parameter
needs is read off its `Shard` and off the pp ranks that hold its name:

    over          which parameters                                             why
    sp (tp)       those with `Shard.partial`                                   each rank saw its tokens only
    dp+cp         all but experts                                              each dp rank saw its samples only
    edp           experts: the axis that their `Shard` names                   the same
    pp ranks      names held by several of them (tied weights)                 each use adds its part
    pp ranks      modules outside the pipelined model, in a schedule           only one stage ran them

Gradients live in buckets (`optim.bucket`). Where the optimizer steps master weights (`optim.master_weights`), the sums
go to those, each rank's shard of them; else they stay on the parameters.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from lightning_megatron.comm import collectives
from lightning_megatron.comm.host_numbers import on_device
from lightning_megatron.host_memory import wait_for_copies
from lightning_megatron.mesh import Axis, Mesh, NewGroup
from lightning_megatron.optim.bucket import (
    Bucket,
    FlatParams,
    GradReducer,
    ModelParam,
    PartName,
    frozen_params,
    make_buckets,
)
from lightning_megatron.optim.bucket_layout import Range
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.reductions import divided, extremes, scale_in_place, square, stage_axes, total
from lightning_megatron.precision.scaling import WeightCast
from lightning_megatron.sharding import DeferredParameter, Shard, ShardedParameter, shard_of

# An axis of one rank: a tensor cut over it is unsharded.
ALONE = Axis.alone(0)


@dataclass(frozen=True, eq=False)
class ParamShard:
    """The part of a parameter that this rank's optimizer steps."""

    param: ModelParam
    tensor: nn.Parameter
    """Tensor in the optimizer: the parameter itself, or master weights, flat where they are a part of it."""
    range: Range
    """Elements of the flattened parameter."""


class Gradients:
    """The gradients of one rank's parameters.

    `named_parameters` in the same order on all ranks of a stage; `inside` are the names that belong to the pipelined
    model; `stages` the stages of this rank whose backwards make gradients of a name, all of them where a name is
    absent. `dtype` is the dtype of accumulated gradients, `low` that of matrices with master weights. `no_split`: the
    optimizer reads full parameters. `names_by_rank` are the names on each pp rank; without it ranks gather them.
    `part_of` tells the first part of the model that uses a parameter, by which sharded ones are gathered; `kept` are
    frozen parameters that stay whole, because an optimizer may step them later; `casts` are those of sharded parameters
    that are gathered in float8.
    Construction is collective over pp, and over the world where names are held by several pp ranks.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        inside: set[str],
        mesh: Mesh,
        new_group: NewGroup,
        device: torch.device,
        *,
        config: OptimizerConfig | None = None,
        stages: Mapping[str, Sequence[int]] | None = None,
        dtype: torch.dtype | None = None,
        no_split: bool = False,
        low: torch.dtype | None = None,
        names_by_rank: Sequence[Sequence[str]] | None = None,
        part_of: Callable[[nn.Parameter], PartName | None] = lambda parameter: None,
        kept: Collection[nn.Parameter] = (),
        casts: Mapping[nn.Parameter, WeightCast] = MappingProxyType({}),
    ) -> None:
        self.mesh = mesh
        self.device = device
        self.config = config if config is not None else OptimizerConfig()
        is_distributed = self.config.shards_states
        named = list(named_parameters)
        if names_by_rank is None:
            names_by_rank = collectives.gather_objects([name for name, _ in named], mesh.pp)
        holders = stage_axes(names_by_rank, mesh, new_group)
        self.params = []
        for name, parameter in named:
            shard = shard_of(parameter)
            if not isinstance(getattr(parameter, "shard", None), Shard):
                # A user's own parameter is replicated over tp and must count once.
                shard = Shard(global_shape=tuple(parameter.shape), replicas=(mesh.tp,))
            own = mesh.own_stages if stages is None or name not in stages else tuple(stages[name])
            # The axis by its name, because a module built before the ranks were known has the axes of one device.
            replicas = mesh.axis("dp+cp" if shard.data is None else shard.data.name)
            self.params.append(ModelParam(name, parameter, shard, replicas, holders.get(name), name not in inside, own))
        # Of a stage without experts, too: all ranks make as many groups.
        axes = [mesh.axis(name) for name in ("dp+cp", "edp")]
        divided_axes = {axis.ranks: divided(axis, self.config.shard_size, new_group) for axis in axes}
        self._copies = {ranks: outer for ranks, (_, outer) in divided_axes.items() if outer.size > 1}
        self.buckets: list[Bucket] = make_buckets(
            (param for param in self.params if param.parameter.requires_grad),
            shards_of=lambda replicas: divided_axes[replicas.ranks][0] if is_distributed else ALONE,
            copies_of=lambda replicas: self._copies.get(replicas.ranks),
            bucket_size=self.config.bucket_size,
            no_split=no_split,
            part_of=part_of if self.config.shards_parameters else None,
            apart=casts,
            dtype_of=lambda parameter: parameter.dtype if dtype is None else dtype,
            low_of=lambda parameter: low if _is_lowered(parameter) else None,
            adds_shards=self.config.shards_gradients,
        )
        in_buckets = {param.parameter for bucket in self.buckets for param in bucket.members}
        # Frozen so far; if they are unfrozen later, they are reduced one by one.
        self._loose = [param for param in self.params if param.parameter not in in_buckets]
        held = set(kept)
        # Quantised weights have classes, or dtypes, of their own, and no NaN to stand for what is elsewhere.
        plain = (nn.Parameter, ShardedParameter, DeferredParameter)
        self.frozen = frozen_params(
            (
                param
                for param in (self._loose if self.config.shards_parameters else ())
                if param.parameter not in held
                and type(param.parameter) in plain
                and param.parameter.is_floating_point()
            ),
            shards_of=lambda replicas: divided_axes[replicas.ranks][0],
            bucket_size=self.config.bucket_size,
            part_of=part_of,
            apart=casts,
        )
        """Frozen parameters that are sharded."""
        self._casts = casts
        self.param_shards = [
            ParamShard(param, param.parameter, Range(0, param.parameter.numel()))
            for param in self.params
            if param.parameter in in_buckets
        ]
        self.has_master_weights = False
        # Whether gradients were reduced since the last optimizer step.
        self.are_new = False
        # Parameters whose last reduced gradient the master weights have, as a view of the bucket where dtypes agree.
        self.handed_over: dict[Bucket, list[ModelParam]] = {}
        self._is_checked = self.config.on_nonfinite == "stop"
        self.reducer = GradReducer(self.buckets, is_checked=self._is_checked)
        # Minimum and maximum of each gradient, as `Bucket.extremes` has them.
        self._loose_extremes: list[tuple[ModelParam, Tensor]] = []

    @property
    def sharded(self) -> list[FlatParams]:
        """Parameters that are sharded themselves, and not their gradients and optimizer states alone."""
        return [*(bucket for bucket in self.buckets if bucket.shards_params), *self.frozen]

    def casts_of(self, flat: FlatParams) -> list[WeightCast]:
        """The casts of the members of a flat group that is gathered in float8."""
        return [self._casts[param.parameter] for param in flat.members if param.parameter in self._casts]

    def copies_of(self, param: ModelParam) -> Axis:
        """The data-parallel ranks that have the shard of this one."""
        return self._copies.get(param.replicas.ranks, ALONE)

    # --- between two backwards ---------------------------------------------------------------------------------------

    def take(self, *, copied: bool = False) -> dict[nn.Parameter, Tensor]:
        """Takes all gradients off their parameters; `copied` where others are made before these are added back."""
        taken = {}
        for param in self.params:
            gradient = param.parameter.grad
            if gradient is not None:
                has_grad_view = copied and self.reducer.has_grad_view(param)
                taken[param.parameter] = gradient.clone() if has_grad_view else gradient
                param.parameter.grad = None
        return taken

    def add(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Adds gradients that were taken to those that are there now."""
        for parameter, gradient in gradients.items():
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is self.reducer.grad_view(parameter):
                parameter.grad = gradient.add_(parameter.grad)
            else:
                parameter.grad.add_(gradient)

    def free(self, *, dropped: bool) -> None:
        """Frees the buckets for new gradients where gradients of master weights are views of them: those are copied, or
        dropped."""
        if not self.handed_over:
            return
        self.handed_over = {}
        for shard in self.param_shards:
            if shard.tensor.grad is not None:
                shard.tensor.grad = None if dropped else shard.tensor.grad.clone()
        for bucket in self.buckets:
            for param in bucket.members:
                param.parameter.grad = None

    # --- reduction ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce(self, *, outside_over_stages: bool, factor: Tensor | None = None) -> None:
        """Reduces every gradient to that of one device, times `factor` [].

        `outside_over_stages` says that modules outside the pipelined model ran on one stage only, so that their
        gradients are to be summed; else each stage has full ones. A parameter with a gradient on some rank gets one on
        all; one without any keeps None.
        """
        # With overlap some ranks have begun reductions that others have not: all must begin all before other messages.
        overlaps = self.config.overlap_grad_reduce or self.reducer.is_scattering
        if overlaps:
            self.reducer.close(everything=True)
        else:
            self.reducer.begin()
        late = self._agree_on_presence(outside_over_stages)
        self.reducer.reduce_late(late)
        if not overlaps:
            self.reducer.close(everything=False)
        sent = [bucket for bucket in self.buckets if bucket.wait()]
        for bucket in sent:
            if bucket.copies.size > 1:
                collectives.all_reduce_(bucket.own, bucket.copies)
            if bucket.partial is not None:
                collectives.all_reduce_(bucket.own, bucket.partial)
        for bucket in sorted(sent, key=lambda bucket: [param.name for param in bucket.members]):
            if bucket.holders is not None and (outside_over_stages or not bucket.is_outside):
                collectives.all_reduce_(bucket.own, bucket.holders)
        if factor is not None:
            strays = [
                param.parameter.grad for bucket in sent for param in bucket.members if not bucket.has_grad_view(param)
            ]
            scale_in_place([*(bucket.own for bucket in sent), *(x for x in strays if x is not None)], factor)
        self._reduce_loose(outside_over_stages, factor)
        if self.has_master_weights:
            self._hand_over()
        self.are_new = True

    def nonfinite_before_reduce(self) -> set[str]:
        """Names of parameters in whose gradients this rank had NaN or Inf before the last reduction; recorded only with
        `on_nonfinite="stop"`."""
        recorded = [*self._loose_extremes, *(entry for bucket in self.buckets for entry in bucket.extremes)]
        return {param.name for param, ends in recorded if not bool(ends.isfinite().all())}

    def _reduce_loose(self, outside_over_stages: bool, factor: Tensor | None) -> None:
        self._loose_extremes = []
        for param in sorted(self._loose, key=lambda param: param.name):
            gradient = param.parameter.grad
            if gradient is None:
                continue
            if self._is_checked:
                self._loose_extremes.append((param, extremes(gradient)))
            full = gradient.contiguous()
            if param.shard.partial is not None:
                collectives.all_reduce_(full, param.shard.partial)
            collectives.all_reduce_(full, param.replicas)
            if param.holders is not None and (outside_over_stages or not param.is_outside):
                collectives.all_reduce_(full, param.holders)
            param.parameter.grad = full if factor is None else full.mul_(factor.to(full.dtype))

    def _hand_over(self) -> None:
        """Gives each master weight its part of the reduced gradients; sharded ones leave the parameter."""
        if sent := [bucket for bucket in self.buckets if bucket.send_to_host()]:
            wait_for_copies(sent[0].device)
        for shard in self.param_shards:
            parameter, main = shard.param.parameter, shard.tensor
            # Lightning's `toggle_optimizer` freezes what other optimizers step.
            if not self.reducer.has_gradient(shard.param) or not main.requires_grad:
                continue
            # A sparse gradient of a single data-parallel rank is not in its bucket.
            is_sparse = parameter.grad is not None and parameter.grad.is_sparse
            gradient = parameter.grad if is_sparse else self.reducer.own_part(parameter).view(main.shape)
            assert gradient is not None
            part = gradient.to(main)
            main.grad = part if main.grad is None else main.grad.add_(part)
        for bucket in self.buckets:
            self.handed_over[bucket] = [
                param
                for param in bucket.members
                if (bucket.adds_shards and bucket.has_gradient(param)) or bucket.has_grad_view(param)
            ]
            if bucket.shards.size > 1:
                for param in bucket.members:
                    param.parameter.grad = None

    def _agree_on_presence(self, outside_over_stages: bool) -> list[ModelParam]:
        """Gives zero gradients to parameters with none here but one on a rank that reduces with this one or has other
        experts of the tensor: on one device all experts of a tensor are stepped or none. Returns parameters with a late
        gradient on such a rank."""
        trained = [param for param in self.params if param.parameter.requires_grad]
        groups: dict[tuple[int, ...], tuple[Axis, list[int]]] = {}
        others: dict[tuple[int, ...], tuple[Axis, list[int]]] = {}
        for index, param in enumerate(trained):
            groups.setdefault(param.replicas.ranks, (param.replicas, []))[1].append(index)
            if (leading := param.shard.leading) is not None:
                others.setdefault(leading.ranks, (leading, []))[1].append(index)
        shared: dict[tuple[int, ...], tuple[Axis, list[int]]] = {}
        # Names give the order: ranks hold shared parameters in orders of their own.
        for index, param in sorted(enumerate(trained), key=lambda item: item[1].name):
            if param.holders is not None and (outside_over_stages or not param.is_outside):
                shared.setdefault(param.holders.ranks, (param.holders, []))[1].append(index)
        # First data-parallel axes, in the order of the stage's parameters, then axes of experts, then holders, so that
        # all ranks of an axis enter its collectives in one order.
        axes = [group for group in [*groups.values(), *others.values()] if group[0].size > 1]
        axes += [shared[ranks] for ranks in sorted(shared)]
        if not axes:
            return []
        reducer = self.reducer
        # 0: no gradient; 1: one; 2: one that is late.
        has = [int(reducer.has_gradient(param)) + int(reducer.is_late(param)) for param in trained]
        flags = on_device(has, self.device, torch.int32)
        for axis, indices in axes:
            own = on_device(indices, self.device)
            flags[own] = collectives.all_reduce(flags[own], axis, "max")
        found = list(zip(trained, flags.tolist(), strict=True))
        self.add_zeros(param.parameter for param, flag in found if flag)
        return [param for param, flag in found if flag > 1]

    def add_zeros(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gives zero gradients to those of the parameters that have none."""
        for parameter in parameters:
            if parameter.grad is not None or self.reducer.note_zero(parameter):
                continue
            grad_view = self.reducer.grad_view(parameter)
            if grad_view is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                # A bucket in flight has zeros for it already.
                parameter.grad = grad_view if self.config.overlap_grad_reduce else grad_view.zero_()

    # --- the norm ---------------------------------------------------------------------------------------------------

    def norm(self, parameters: Iterable[nn.Parameter] | None = None) -> Tensor:
        """The 2-norm of the full model's gradient, float64 []: each element of the unsplit model counts once.

        Only `parameters`, as the optimizer has them, count where given. Collective over the world.
        """
        chosen = None if parameters is None else set(parameters)
        squares = [
            square(tensor.grad)
            for tensor in self.counted()
            if tensor.grad is not None and (chosen is None or tensor in chosen)
        ]
        return collectives.all_reduce(total(squares, self.device), self.mesh.world).sqrt()

    def counted(self) -> Iterator[nn.Parameter]:
        """Tensors that optimizers may step and whose gradients on this rank count in the norm."""
        for param, tensor, is_shard in self.stepped():
            if self.counts(param, is_shard=is_shard):
                yield tensor

    def counts(self, param: ModelParam, *, is_shard: bool) -> bool:
        """Whether this rank's part of a parameter, a shard or all of it, counts in a sum over the model."""
        holders = self._copies.get(param.replicas.ranks) if is_shard else param.replicas
        return param.is_counted and (holders is None or holders.is_first)

    def stepped(self) -> Iterator[tuple[ModelParam, nn.Parameter, bool]]:
        """Tensors that optimizers may step, and whether this data-parallel rank alone has the gradient."""
        for shard in self.param_shards:
            yield shard.param, shard.tensor, self.has_master_weights and self.config.shards_states
        for param in self._loose:
            yield param, param.parameter, False

    @torch.no_grad()
    def clip(self, max_norm: float, parameters: Iterable[nn.Parameter], norm: Tensor | None = None) -> Tensor:
        """Scales the gradients of `parameters` so that their norm (`norm`, where it is known) is at most `max_norm`;
        returns the norm before.

        As torch.nn.utils.clip_grad_norm_ on one device: the factor is max_norm / (norm + 1e-6) where that is below 1.
        """
        own = list(parameters)
        norm = self.norm(own) if norm is None else norm
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        scale_in_place([parameter.grad for parameter in own if parameter.grad is not None], factor)
        return norm

    def release(self) -> None:
        """Removes the hooks from the parameters."""
        self.reducer.release()


def _is_lowered(parameter: nn.Parameter) -> bool:
    """Whether a parameter is lowered: float32 matrices are; vectors are small, and norms want them in float32."""
    return parameter.dim() > 1 and parameter.dtype is torch.float32

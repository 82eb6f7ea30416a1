"""Gradient buckets: gradients of several parameters in one flat tensor, reduced by one message.

Backward makes new tensors for `.grad`, or adds to those that are there. When a parameter's gradient is complete for one
backward it moves to its `grad_view`, a view of the bucket, which is `.grad` from then on; where parameters are sharded
it moves when the bucket is reduced, as until then the one in flight has such memory. A bucket whose last gradient of a
step is ready may be reduced. Buckets are reduced in one order on all data-parallel ranks, whatever the order in which
they fill.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.comm import collectives
from lightning_megatron.comm.collectives import Pending
from lightning_megatron.comm.host_numbers import on_device
from lightning_megatron.mesh import Axis
from lightning_megatron.optim.bucket_layout import BucketLayout, Range, bucket_layouts, own_range
from lightning_megatron.optim.reductions import extremes
from lightning_megatron.sharding import Shard

PartName = tuple[str, str]
"""A part of a model: the model's name in the module that is trained, and the part's."""


@dataclass(frozen=True, eq=False)
class ModelParam:
    """A parameter of the model that this rank holds."""

    name: str
    parameter: nn.Parameter
    shard: Shard
    replicas: Axis
    """Data-parallel axis: its ranks hold the same slice and see other samples."""
    holders: Axis | None
    """Pipeline ranks that hold a parameter of this name (tied weights), where there are several."""
    is_outside: bool
    """Whether the parameter is outside of the pipelined model, in a module that every stage holds."""
    stages: tuple[int, ...]
    """Stages of this rank whose backwards add to the gradient."""

    @property
    def is_counted(self) -> bool:
        """Whether this rank's copy is the one that counts in a sum over all parameters of the model."""
        return self.shard.is_counted and (self.holders is None or self.holders.is_first)


class FlatParams:
    """Parameters that lie one behind the other in one flat tensor, which is cut into equal shards over an axis.

    `part` is the first part of the model that uses them, where each is used in parts.
    """

    def __init__(
        self, members: Sequence[ModelParam], layout: BucketLayout, *, shards: Axis, part: PartName | None = None
    ) -> None:
        self.members = tuple(members)
        self.layout = layout
        self.shards = shards
        self.part = part
        self.device = members[0].parameter.device

    def own_range(self, index: int) -> Range:
        """The elements of the member number `index` that lie in this rank's shard."""
        size = self.members[index].parameter.numel()
        shards = self.shards
        return own_range(self.layout.starts[index], size, self.layout.num_elements, shards.size, shards.rank)

    def part_of(self, shard: Tensor, index: int) -> Tensor:
        """What this rank's flat shard has of the member number `index`, flat."""
        found, length = self.own_range(index), self.layout.num_elements // self.shards.size
        first = self.layout.starts[index] + found.start - self.shards.rank * length
        return shard[first : first + found.end - found.start]


class Bucket(FlatParams):
    """Gradients that need the same reductions: over data-parallel ranks, over the axis of a partial sum, over holders.

    `shards` is the axis over which the sum is scattered: the data-parallel ranks, some of them, or a single rank;
    `copies` the ranks that have the shard of this one, over which it is summed once a step. `dtype` is of the
    gradients, `low` of the parameters with master weights, None where they keep their own. Where `adds_shards` says so
    the memory of all gradients is there from the first gradient that moves to it to the end of their reduction, and
    reductions of a step add up in this rank's shard. `shards_params` says that the parameters are sharded, too.
    """

    def __init__(
        self,
        members: Sequence[ModelParam],
        layout: BucketLayout,
        *,
        shards: Axis,
        dtype: torch.dtype,
        copies: Axis | None = None,
        low: torch.dtype | None = None,
        adds_shards: bool = False,
        shards_params: bool = False,
        part: PartName | None = None,
    ) -> None:
        super().__init__(members, layout, shards=shards, part=part)
        first = members[0]
        self.low = low
        self.stages = first.stages
        self.partial = first.shard.partial
        self.holders = first.holders
        self.is_outside = first.is_outside
        self.replicas = first.replicas
        self.copies = Axis.alone(0) if copies is None else copies
        self.dtype = dtype
        self.shards_params = shards_params and shards.size > 1
        self.adds_shards = adds_shards and shards.size > 1
        self._gradient: Tensor | None = None
        self._grad_views: dict[Tensor, Tensor] = {}
        # Sum of this step's reductions, where shards are added.
        self._sum: Tensor | None = None
        if self.adds_shards:
            self._sum = torch.zeros(layout.num_elements // shards.size, dtype=dtype, device=self.device)
        else:
            self._allocate()
        self.on_host: Tensor | None = None
        """Host memory for this rank's shard of the gradients, flat, where the optimizer steps there."""
        self.pending: Pending | None = None
        self.reduced: set[Tensor] = set()
        """Parameters with a gradient in this step whose gradients are in the sum of shards."""
        self.was_reduced = False
        """Whether a reduction was complete in this step, where shards are added."""
        # Minimum and maximum [2] of each of this rank's own gradients before the last reduction.
        self.extremes: list[tuple[ModelParam, Tensor]] = []

    def _allocate(self) -> None:
        # Zeros, because gaps between parameters are reduced too.
        self._gradient = torch.zeros(self.layout.num_elements, dtype=self.dtype, device=self.device)
        self._grad_views = {
            param.parameter: self._gradient[start : start + param.parameter.numel()].view(param.parameter.shape)
            for param, start in zip(self.members, self.layout.starts, strict=True)
        }

    @property
    def gradient(self) -> Tensor:
        """The gradients of all members, flat."""
        if self._gradient is None:
            self._allocate()
        assert self._gradient is not None
        return self._gradient

    @property
    def grad_views(self) -> dict[Tensor, Tensor]:
        """The view of the flat gradients of each parameter."""
        if self._gradient is None:
            self._allocate()
        return self._grad_views

    @property
    def held(self) -> list[Tensor]:
        """The memory of gradients that is there now."""
        return [one for one in (self._gradient, self._sum) if one is not None]

    @property
    def own(self) -> Tensor:
        """This rank's flat shard of the gradients."""
        return collectives.shard_slice(self.gradient, self.shards) if self._sum is None else self._sum

    def own_part(self, index: int) -> Tensor:
        """What this rank's shard has of the member number `index`, flat; on the host, once that has been sent it."""
        return self.part_of(self.own if self.on_host is None else self.on_host, index)

    def send_to_host(self) -> bool:
        """Whether the optimizer steps on the host: starts to copy this rank's reduced gradients there."""
        if self.on_host is None:
            return False
        self.on_host.copy_(self.own, non_blocking=True)
        return True

    def begin(self) -> None:
        """Begins the sums of a step, where shards are added."""
        if self._sum is not None:
            self.reduced, self.was_reduced, self.extremes = set(), False, []
            self._sum.zero_()

    def land(self) -> None:
        """Adds a reduction to the sum of shards, once it is complete, and frees the memory of all gradients."""
        assert self._sum is not None
        if self.pending is None:
            return
        self.pending.wait()
        self.pending = None
        self._sum += collectives.shard_slice(self.gradient, self.shards)
        self.was_reduced = True
        self.drop()

    def drop(self) -> None:
        """Frees the memory of all gradients, where shards are added."""
        if self._sum is not None:
            for param in self.members:
                if self.has_grad_view(param):
                    param.parameter.grad = None
            self._gradient, self._grad_views = None, {}

    @property
    def is_trained(self) -> bool:
        """Whether any of the bucket's parameters requires a gradient."""
        return any(param.parameter.requires_grad for param in self.members)

    @property
    def is_touched(self) -> bool:
        """Whether any of the bucket's parameters has a gradient."""
        return any(param.parameter.grad is not None for param in self.members)

    def has_grad_view(self, param: ModelParam) -> bool:
        """Whether a parameter's gradient is its view of the bucket."""
        view = self._grad_views.get(param.parameter)
        return view is not None and param.parameter.grad is view

    def has_gradient(self, param: ModelParam) -> bool:
        """Whether a parameter has a gradient in this step, on it or in the sum of shards."""
        return param.parameter.grad is not None or param.parameter in self.reduced

    def move_grad(self, param: ModelParam) -> None:
        """Moves a parameter's gradient into the bucket, unless it is there; a sparse one of a single rank stays."""
        parameter = param.parameter
        gradient = parameter.grad
        if gradient is None or self.has_grad_view(param):
            return
        grad_view = self.grad_views[parameter]
        if gradient.is_sparse:
            if self.replicas.size == 1 and self.holders is None:
                return
            gradient = gradient.to_dense()
        grad_view.copy_(gradient)
        # Where a parameter's own dtype is narrower than its gradient's, `.grad` takes it by `grad_dtype`.
        parameter.grad = grad_view

    def reduce(self, *, is_checked: bool) -> None:
        """Starts the reduction over data-parallel ranks; a parameter without a gradient counts as zeros."""
        if self._sum is not None:
            self.reduced |= {param.parameter for param in self.members if param.parameter.grad is not None}
        for param in self.members:
            self.move_grad(param)
            if not self.has_grad_view(param):
                self.grad_views[param.parameter].zero_()
        if is_checked:
            # Read later, so that no device is waited for in the middle of a backward.
            present = [(param, param.parameter.grad) for param in self.members]
            found = [(param, extremes(gradient)) for param, gradient in present if gradient is not None]
            self.extremes = found if self._sum is None else [*self.extremes, *found]
        if self.shards.size > 1:
            self.pending = collectives.reduce_scatter_(self.gradient, self.shards, wait=False)
        else:
            self.pending = collectives.all_reduce_(self.gradient, self.replicas, wait=False)
        if self.adds_shards:
            for param in self.members:
                # What another use makes from here on is no part of what is on its way.
                param.parameter.grad = None

    def wait(self) -> bool:
        """Whether the bucket was reduced in this step, once the reduction is complete."""
        if self._sum is not None:
            self.land()
            return self.was_reduced
        if self.pending is None:
            return False
        self.pending.wait()
        self.pending = None
        return True


def make_buckets(
    params: Iterable[ModelParam],
    *,
    shards_of: Callable[[Axis], Axis],
    bucket_size: int,
    no_split: bool,
    copies_of: Callable[[Axis], Axis | None] = lambda replicas: None,
    dtype_of: Callable[[nn.Parameter], torch.dtype],
    low_of: Callable[[nn.Parameter], torch.dtype | None],
    adds_shards: bool = False,
    part_of: Callable[[nn.Parameter], PartName | None] | None = None,
    apart: Collection[nn.Parameter] = (),
) -> list[Bucket]:
    """Buckets of the parameters, in about the order in which backward completes them.

    With `part_of` parameters are sharded, and a bucket has those of one part of the model. Vectors, which are small,
    stay whole where they share no bucket with matrices. Parameters that are gathered `apart` have buckets of their own.
    """
    groups: dict[tuple[Any, ...], list[ModelParam]] = {}
    # Backward runs through the model from its end.
    in_turn = list(reversed(list(params)))
    turns = {param: turn for turn, param in enumerate(in_turn)}
    for param in in_turn:
        partial, holders = param.shard.partial, param.holders
        # Ranks that sum shared parameters must group them alike, and each has stages of its own.
        is_alone = holders is not None and not param.is_outside
        key = (
            param.name if is_alone else "",
            param.stages,
            param.is_outside,
            param.replicas.ranks,
            None if partial is None else partial.ranks,
            None if holders is None else holders.ranks,
            param.parameter.dtype,
            low_of(param.parameter),
            param.parameter in apart,
        )
        groups.setdefault(key, []).append(param)
    buckets = []
    for members in groups.values():
        if members[0].holders is not None:
            # Names give the order: ranks hold shared parameters in orders of their own.
            members.sort(key=lambda param: param.name)
        replicas, parameter = members[0].replicas, members[0].parameter
        shards = shards_of(replicas)
        for chosen, layout, is_sharded, part in _laid_out(members, shards, bucket_size, part_of, no_split=no_split):
            buckets.append(
                Bucket(
                    chosen,
                    layout,
                    shards=shards,
                    copies=copies_of(replicas),
                    dtype=dtype_of(parameter),
                    low=low_of(parameter),
                    adds_shards=adds_shards,
                    shards_params=is_sharded,
                    part=part,
                )
            )
    # Buckets of the first stages come last, and within a stage those of its first layers.
    # A bucket of norms alone is complete late, and no other may wait for it.
    # Sharded parameters around the parts come after all parts, which tell when their gradients are complete.
    return sorted(
        buckets,
        key=lambda bucket: (
            -min(bucket.stages, default=0),
            bucket.shards_params and bucket.part is None,
            max(turns[param] for param in bucket.members),
        ),
    )


def frozen_params(
    params: Iterable[ModelParam],
    *,
    shards_of: Callable[[Axis], Axis],
    bucket_size: int,
    part_of: Callable[[nn.Parameter], PartName | None],
    apart: Collection[nn.Parameter] = (),
) -> list[FlatParams]:
    """Parameters without gradients, flat by the parts that use them, to be sharded; vectors stay whole.

    Parameters that are gathered `apart` share no flat tensor with others.
    """
    groups: dict[tuple[Any, ...], list[ModelParam]] = {}
    for param in params:
        key = (param.replicas.ranks, param.parameter.dtype, param.parameter in apart)
        if param.parameter.dim() > 1 and shards_of(param.replicas).size > 1:
            groups.setdefault(key, []).append(param)
    return [
        FlatParams(chosen, layout, shards=shards, part=part)
        for members in groups.values()
        for shards in (shards_of(members[0].replicas),)
        for chosen, layout, _, part in _laid_out(members, shards, bucket_size, part_of)
    ]


def _laid_out(
    members: list[ModelParam],
    shards: Axis,
    bucket_size: int,
    part_of: Callable[[nn.Parameter], PartName | None] | None,
    *,
    no_split: bool = False,
) -> Iterator[tuple[list[ModelParam], BucketLayout, bool, PartName | None]]:
    """The parameters of a group that lie in one flat tensor, their layout there, whether they are sharded themselves,
    and the part of the model that they are of then."""
    by_part: dict[PartName | None, list[ModelParam]] = {}
    is_sharded = part_of is not None and any(param.parameter.dim() > 1 for param in members)
    for param in members:
        part = part_of(param.parameter) if part_of is not None and is_sharded else None
        by_part.setdefault(part, []).append(param)
    for part, own in by_part.items():
        sizes = [param.parameter.numel() for param in own]
        # What is around the parts is used at both ends of a step: one bucket of embedding and head would always stay.
        # Small weights go with either, and many of one size go in a few.
        apart = max(max(sizes) * 9 // 8, sum(sizes) // 4)
        limit = min(bucket_size, apart) if is_sharded and part is None else bucket_size
        for layout in bucket_layouts(sizes, num_shards=shards.size, bucket_size=limit, no_split=no_split):
            yield [own[index] for index in layout.members], layout, is_sharded, part


class GradReducer:
    """Reduces buckets as their last gradients are ready.

    A schedule says which backward of a stage is the last of the step (`expect`), and when a stage is done
    (`complete`). Buckets that add shards are reduced in each backward that a schedule expects, and are complete when it
    has ended (`end_backward`). Those of sharded parameters are complete when the backward has left the parts that use
    them (`leave_parts`): ranks that gather parameters in between must do both in one order, and their gradients may be
    ready in several. Of what is around the parts those are complete at the first part (`reach_parts`) that were so when
    a backward first came there, on all ranks; a gradient that comes later all the same is reduced when the step's
    backwards have ended (`reduce_late`).
    """

    def __init__(self, buckets: Sequence[Bucket], *, is_checked: bool) -> None:
        self._buckets = list(buckets)
        self._is_checked = is_checked
        self._bucket_of: dict[Tensor, Bucket] = {
            param.parameter: bucket for bucket in buckets for param in bucket.members
        }
        self._params = {param.parameter: param for bucket in buckets for param in bucket.members}
        self._indices: dict[Tensor, int] = {
            param.parameter: index for bucket in buckets for index, param in enumerate(bucket.members)
        }
        self._is_open = False
        self._by_parts = any(bucket.shards_params for bucket in self._buckets)
        self._num_reduced = 0
        self._stages_left: dict[Bucket, set[int]] = {}
        # Buckets that add shards, in the backward that runs now, and the one whose reduction is in flight.
        self._queue: list[Bucket] = []
        self._in_flight: Bucket | None = None
        # Sharded parameters around the parts: whether they are behind them, so that their gradients come first.
        self._are_behind: dict[Bucket, bool] = {}
        # Parameters whose gradients this backward has made, where parts tell that buckets are complete.
        self._made: set[Tensor] = set()
        # Buckets in their last backward, with the parameters whose gradients are not ready yet.
        self._missing: dict[Bucket, set[Tensor]] = {}
        # Nodes with their hooks: autograd keeps a node only as long as somebody holds it.
        self._watched: list[tuple[Any, Any]] = []
        self.require_own_backward: Callable[[str], None] = _allow
        """Is called with the name of a parameter whose gradient autograd has accumulated; may raise."""

    def watch(self) -> None:
        """Hooks the accumulation of gradients. Parameters must have their final data: with a new dtype autograd makes a
        new node."""
        self._watched = [self._watch(param) for param in self._params.values() if param.parameter.requires_grad]

    def _watch(self, param: ModelParam) -> tuple[Any, Any]:
        """Hooks autograd's accumulation node, which runs once per backward, after all uses of the parameter."""
        grad_fn = param.parameter.view_as(param.parameter).grad_fn
        assert grad_fn is not None
        node = grad_fn.next_functions[0][0]
        assert node is not None
        return node, node.register_hook(lambda *_: self._accumulated(param))

    def release(self) -> None:
        """Removes the hooks."""
        for _, handle in self._watched:
            handle.remove()
        self._watched = []

    def grad_view(self, parameter: Tensor) -> Tensor | None:
        """The view of a bucket for a parameter's gradient; None for a parameter in no bucket, or one in flight."""
        bucket = self._bucket_of.get(parameter)
        if bucket is None or (bucket.shards_params and bucket.pending is not None):
            return None
        self._make_room()
        return bucket.grad_views[parameter]

    @property
    def adds_shards(self) -> bool:
        """Whether buckets are reduced in each backward."""
        return any(bucket.adds_shards for bucket in self._buckets)

    def has_gradient(self, param: ModelParam) -> bool:
        """Whether a parameter has a gradient in this step, on it or in a sum of shards."""
        bucket = self._bucket_of.get(param.parameter)
        return param.parameter.grad is not None if bucket is None else bucket.has_gradient(param)

    def has_grad_view(self, param: ModelParam) -> bool:
        """Whether a parameter's gradient is its view of a bucket."""
        bucket = self._bucket_of.get(param.parameter)
        return bucket is not None and bucket.has_grad_view(param)

    def own_part(self, parameter: Tensor) -> Tensor:
        """What this rank's shard has of the gradient of a parameter in a bucket, flat."""
        bucket = self._bucket_of[parameter]
        return bucket.own_part(self._indices[parameter])

    @property
    def is_scattering(self) -> bool:
        """Whether buckets are reduced in the backwards of the step that is under way."""
        return self._is_open and self.adds_shards

    def note_zero(self, parameter: Tensor) -> bool:
        """Notes that a parameter has a gradient of zeros, where its bucket has been added to a sum of shards."""
        bucket = self._bucket_of.get(parameter)
        if bucket is None or not bucket.was_reduced:
            return False
        bucket.reduced.add(parameter)
        return True

    def begin(self) -> None:
        """Begins the sums of a step."""
        for bucket in self._buckets:
            bucket.begin()

    def open(self) -> None:
        """Begins a step whose buckets may be reduced as soon as they are complete."""
        self._is_open, self._num_reduced = True, 0
        self.begin()
        self._stages_left = {bucket: set(bucket.stages) for bucket in self._buckets}
        self._missing = {}

    def expect(self, stage: int, parameters: Iterable[Tensor] | None = None) -> None:
        """The last backward of a stage in this step is about to run; only the gradients of `parameters`, if given, are
        missing."""
        if not self._is_open:
            return
        chosen = None if parameters is None else set(parameters)
        expected = [bucket for bucket, stages in self._stages_left.items() if stages == {stage}]
        for bucket in expected:
            trained: set[Tensor] = {param.parameter for param in bucket.members if param.parameter.requires_grad}
            self._missing[bucket] = trained if chosen is None else trained & chosen
        if self.adds_shards:
            self._made.clear()
            self._queue = [bucket for bucket in expected if bucket.adds_shards and bucket.is_trained]
            self._reduce_complete()

    def end_backward(self) -> None:
        """A backward has ended: buckets that add shards are reduced, and their memory is freed."""
        for bucket in self._queue:
            self._missing[bucket] = set()
        self._reduce_complete()
        self._land()

    def leave_parts(self, parts: Collection[PartName]) -> None:
        """The backward of these parts of the model has ended."""
        self._complete([one for one in self._queue if one.shards_params and one.part in parts])

    def reach_parts(self) -> None:
        """The backward comes to the first of its parts: that of what is behind all parts, such as a head, has ended.

        Collective over the shards of buckets around the parts that none has reached yet: ranks agree which of them are
        behind the parts.
        """
        around = [bucket for bucket in self._queue if bucket.shards_params and bucket.part is None]
        unknown = [bucket for bucket in around if bucket not in self._are_behind]
        for axis in dict.fromkeys(bucket.shards for bucket in unknown):
            own = [bucket for bucket in unknown if bucket.shards == axis]
            are_ready = on_device([self._missing[one] <= self._made for one in own], own[0].device, torch.int32)
            agreed = collectives.all_reduce(are_ready, axis, "min").tolist()
            self._are_behind |= {bucket: bool(is_ready) for bucket, is_ready in zip(own, agreed, strict=True)}
        behind = [bucket for bucket in around if self._are_behind[bucket]]
        self._queue = [*behind, *(bucket for bucket in self._queue if bucket not in behind)]
        self._complete(behind)

    def _complete(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            self._missing[bucket] = set()
        self._reduce_complete()

    def is_late(self, param: ModelParam) -> bool:
        """Whether a gradient came after the reduction of its bucket, which ranks had taken for behind all parts."""
        bucket = self._bucket_of.get(param.parameter)
        is_sum = bucket is not None and bucket.was_reduced and self._are_behind.get(bucket, False)
        return is_sum and param.parameter.grad is not None

    def reduce_late(self, params: Iterable[ModelParam]) -> None:
        """Reduces the buckets of parameters whose gradients are late on some rank, which from now on end a backward."""
        buckets = dict.fromkeys(map(self._bucket_of.get, (param.parameter for param in params)))
        for bucket in [one for one in buckets if one is not None and one.shards_params]:
            self._are_behind[bucket] = False
            bucket.reduce(is_checked=self._is_checked)
            bucket.land()

    def _make_room(self) -> None:
        """Frees the memory of the bucket in flight if its reduction is complete: more gradients come."""
        pending = None if self._in_flight is None else self._in_flight.pending
        if pending is not None and pending.is_complete:
            self._land()

    def _land(self) -> None:
        if self._in_flight is not None:
            self._in_flight.land()
            self._in_flight = None

    def grad_ready(self, parameter: Tensor) -> None:
        """A parameter's gradient of this backward is complete."""
        bucket = self._bucket_of.get(parameter)
        missing = None if bucket is None else self._missing.get(bucket)
        if missing is not None:
            missing.discard(parameter)
            if not missing:
                self._reduce_complete()

    def complete(self, stage: int) -> None:
        """All backwards of a stage have run."""
        if not self._is_open or self.adds_shards:
            return
        for bucket, stages in self._stages_left.items():
            stages.discard(stage)
            if not stages:
                self._missing[bucket] = set()
        self._reduce_complete()

    def close(self, *, everything: bool) -> None:
        """Ends the step's backwards and reduces the buckets left: all, or those with a gradient.

        Raises RuntimeError where a gradient was made after its last sum.
        """
        self._land()
        sent = self._buckets[: self._num_reduced] if self._is_open else []
        for bucket in self._buckets:
            if bucket.adds_shards and bucket.was_reduced:
                for param in bucket.members:
                    if not self.is_late(param):
                        self._refuse_late(param)
            elif bucket not in sent and bucket.is_trained and (everything or bucket.is_touched):
                bucket.reduce(is_checked=self._is_checked)
                if bucket.adds_shards:
                    bucket.land()
        self._is_open, self._missing, self._num_reduced = False, {}, 0

    def _accumulated(self, param: ModelParam) -> None:
        self.require_own_backward(param.name)
        bucket = self._bucket_of[param.parameter]
        if bucket.pending is not None and not self._are_behind.get(bucket, False):
            self._refuse_late(param)
        self._make_room()
        if not (self._is_open and bucket.shards_params):
            bucket.move_grad(param)
        if self._by_parts:
            self._made.add(param.parameter)
        else:
            self.grad_ready(param.parameter)

    @staticmethod
    def _refuse_late(param: ModelParam) -> None:
        if param.parameter.grad is not None:
            raise RuntimeError(
                f"a gradient of {param.name!r} was made after its sum over ranks had begun; a step that runs "
                'several backwards needs OptimizerConfig(overlap_grad_reduce=False) and no kind "distributed_gradients"'
            )

    def _reduce_complete(self) -> None:
        while self._queue and not self._missing.get(self._queue[0]):
            bucket = self._queue.pop(0)
            # One at a time has all of its gradients here, beside the one that fills.
            self._land()
            bucket.reduce(is_checked=self._is_checked)
            self._in_flight = bucket
        if self.adds_shards:
            return
        while self._num_reduced < len(self._buckets):
            bucket = self._buckets[self._num_reduced]
            missing = self._missing.get(bucket)
            if missing is None or missing:
                return
            self._num_reduced += 1
            if bucket.is_trained:
                bucket.reduce(is_checked=self._is_checked)


def _allow(name: str) -> None:
    """Lets any backward make a gradient of the parameter."""

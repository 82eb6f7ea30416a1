"""Gathers of sharded parameters as the parts of a model run, one part ahead, forward and backward.

A hook on the nodes that made the output of a part tells that its backward is about to run. By then the backward of all
later parts has ended, because autograd runs nodes in the reverse order of their making, so that their parameters can be
freed.

    forward    gather 1 | run 0, free 0, gather 2 | run 1, free 1 ...
    backward   gather 1 | run 2, free 2, gather 0 | run 1, free 1 ...

What a backward recomputes holds the parameters of its own forward. Data-parallel ranks gather the same parts in the
same order, whatever their data: where no gradient reaches a part on one of them, that one gathers it in its turn.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

import torch
from torch import Tensor, nn

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis
from lightning_megatron.optim.bucket import PartName
from lightning_megatron.optim.sharded_params import (
    ShardedParams,
    set_scales,
    written_in_float8,
    written_while_absent,
)

# Holders of parameters.
_FORWARD, _BACKWARD, _STEP, _OUTSIDE, _ALL = "forward", "backward", "step", "outside", "all"


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """Parts of the models of a rank that use sharded parameters."""

    params: Mapping[PartName, Sequence[ShardedParams]]
    """Sharded parameters that each part uses."""
    outside: Sequence[ShardedParams]
    """Sharded parameters that something outside of all parts may use."""
    stages: Sequence[Sequence[PartName]]
    """Parts of each stage of each model, in order."""
    lasts: Collection[PartName]
    """Parts at the ends of the models, whose backward comes next."""
    layers: Collection[PartName] = ()
    """Parts that code of a user's may run again in a backward, in any way."""

    @staticmethod
    def of(
        sharded: Iterable[ShardedParams],
        parameters_by_part: Mapping[PartName, Iterable[nn.Parameter]],
        stages: Sequence[Sequence[PartName]],
        lasts: Collection[PartName],
        layers: Collection[PartName] = (),
    ) -> "ModelParts":
        """The parts that use these parameters."""
        owner = {param.parameter: one for one in sharded for param in one.flat.members}
        params = {
            part: list(dict.fromkeys(owner[parameter] for parameter in own if parameter in owner))
            for part, own in parameters_by_part.items()
        }
        used = {parameter for own in parameters_by_part.values() for parameter in own}
        outside = list(dict.fromkeys(one for parameter, one in owner.items() if parameter not in used))
        return ModelParts(params=params, outside=outside, stages=stages, lasts=lasts, layers=layers)


def first_parts(parameters_by_part: Mapping[PartName, Iterable[nn.Parameter]]) -> dict[nn.Parameter, PartName]:
    """The first part of the model that uses each parameter."""
    found: dict[nn.Parameter, PartName] = {}
    for part, own in parameters_by_part.items():
        for parameter in own:
            found.setdefault(parameter, part)
    return found


@dataclass(eq=False)
class Graph:
    """The parts that a forward ran, through which one backward goes."""

    parts: list[PartName] = field(default_factory=list)
    """In order; those alone to which gradients may come."""
    reaches: bool = False
    """Whether gradients come to the next part that runs."""
    num_left: int = 0
    """Parts whose backward has not begun in the backward under way."""
    task: int = -1
    """Autograd's number of that backward."""


@dataclass
class _Pass:
    """A forward or backward under way: the parts that it holds."""

    name: str
    held: dict[PartName, None] = field(default_factory=dict)


class PartGathers:
    """Gathers the parameters of parts before they run, and frees them afterwards, or with `keeps` when a step ends.

    `reach_parts` is called in a backward before it comes to the first of its parts, and `leave_parts` with those that
    it has left.
    """

    def __init__(
        self,
        parts: ModelParts,
        *,
        keeps: bool,
        reach_parts: Callable[[], None],
        leave_parts: Callable[[Collection[PartName]], None],
    ) -> None:
        self._parts = parts
        self._keeps = keeps
        self._reach_parts, self._leave_parts = reach_parts, leave_parts
        self._all = list(dict.fromkeys([*parts.outside, *(one for own in parts.params.values() for one in own)]))
        self._after = {first: second for stage in parts.stages for first, second in pairwise(stage)}
        self._forward, self._backward = _Pass(_FORWARD), _Pass(_BACKWARD)
        self._is_in_step = False
        self._has_all = self._frees_all = False
        # Number of each of all, and those that were gathered since ranks compared them last, in order.
        self._numbers = {one: number for number, one in enumerate(self._all)}
        self._gathered: list[int] = []
        self._graph = Graph()
        # The part whose backward runs, by its graph and its place there, and autograd's number of that backward.
        self._current: tuple[Graph, int] | None = None
        self._task = -1

    # --- a step -----------------------------------------------------------------------------------------------------

    def begin(self, *, is_training: bool, needs_all: bool = False) -> None:
        """Forwards come next: gathers what no part alone uses, and in training frees what hooks between steps saw.

        With `needs_all`, all parameters are gathered until `end`.
        """
        if self._is_in_step:
            return
        self._is_in_step = True
        for one in self._parts.outside:
            self._gather(one, _OUTSIDE)
        if needs_all:
            self._frees_all = not self._has_all
            if is_training:
                self.take_changed()
            self.show_all()
        elif is_training:
            self.let_all_go()
        if not self._has_all:
            # One message for all of them, before the first is gathered.
            set_scales(self._all)
        for one in self._parts.outside:
            one.wait()

    def end(self) -> None:
        """All forwards and backwards of a step have run."""
        self._is_in_step = False
        self.end_backward()
        self._let_go(self._forward, ())
        for one in self._all:
            one.let_go(_STEP)
            one.let_go(_OUTSIDE)
        if self._frees_all:
            self.let_all_go()

    @property
    def has_all(self) -> bool:
        """Whether `gather_all` has gathered all parameters, which are there still."""
        return self._has_all

    def gather_all(self) -> None:
        """Gathers all parameters, for a reader that may read any, until `begin`."""
        self._has_all = True
        for one in self._all:
            self._gather(one, _ALL)
        for one in self._all:
            one.wait()

    def show_all(self) -> None:
        """Gathers all parameters for code of a user's, which may write to them, until `begin`."""
        self.gather_all()
        for one in self._all:
            one.note()

    def let_all_go(self) -> None:
        """Takes over what readers changed of the parameters that `gather_all` gathered, and frees those."""
        self._has_all = self._frees_all = False
        for one in self._all:
            one.take_changed()
            one.let_go(_ALL)

    def take_changed(self) -> None:
        """Takes over parameters that were changed while they were gathered."""
        for one in self._all:
            one.take_changed()

    @property
    def axes(self) -> list[Axis]:
        """Axes over which parameters are gathered: their ranks run the same parts, equally often."""
        return list(dict.fromkeys(one.flat.shards for one in self._all))

    def require_same(self) -> None:
        """Raises RuntimeError on all ranks where some gathered other parameters than others since the last call, or
        wrote to some that were absent. Collective over the shards."""
        gathered, self._gathered = self._gathered, []
        for axis in self.axes:
            sharing = [one for one in self._all if one.flat.shards == axis]
            own = [number for number in gathered if self._all[number].flat.shards == axis]
            written = torch.stack([one.stand_ins.isnan().all().logical_not() for one in sharing]).any().long()
            # Hashes of numbers are the same in all processes.
            mark = hash(tuple(own)) % 2**62
            rounded = torch.stack([one.is_written for one in sharing])
            flags = torch.stack([written, rounded.any().long()])
            seen = torch.cat([torch.tensor([mark, -mark], device=written.device), flags])
            most, least, are_written, are_written_in_float8 = collectives.all_reduce(seen, axis, "max").tolist()
            if are_written:
                names = [name for one in sharing for name in one.written_names()]
                by_rank = collectives.gather_objects(names, axis)
                raise written_while_absent(dict.fromkeys(name for names in by_rank for name in names))
            if are_written_in_float8:
                names = [one.flat.members[0].name for one in sharing if one.is_written]
                by_rank = collectives.gather_objects(names, axis)
                raise written_in_float8(dict.fromkeys(name for names in by_rank for name in names))
            if most != -least:
                raise self._differing(collectives.gather_objects(own, axis), axis)

    def _differing(self, by_rank: Sequence[Sequence[int]], axis: Axis) -> RuntimeError:
        place = next(place for place, numbers in enumerate(zip_longest(*by_rank)) if len(set(numbers)) > 1)
        told = [
            f"rank {rank}: {self._all[own[place]].flat.members[0].name if place < len(own) else 'nothing'}"
            for rank, own in zip(axis.ranks, by_rank, strict=True)
        ]
        return RuntimeError(
            "data-parallel ranks ran different parts of the model, or in another order or number, and mixed up their "
            f"weights; the first weights in which they differ are of {', '.join(told)}. Under OptimizerConfig("
            'kind="distributed_parameters") every rank runs the same parts equally often, in training and in '
            'evaluation; use kind "distributed_gradients"'
        )

    def forget(self) -> None:
        """The shards have been stepped: what was gathered of them is old."""
        self._is_in_step = self._has_all = self._frees_all = False
        self._forward.held.clear()
        self._backward.held.clear()
        for one in self._all:
            one.let_all_go()

    # --- a part -----------------------------------------------------------------------------------------------------

    def begin_graph(self, *, reaches: bool = False) -> Graph:
        """A forward is about to run that one backward will go through; `reaches` says that its input takes
        gradients."""
        self._graph = Graph(reaches=reaches)
        return self._graph

    def enter(self, part: PartName) -> None:
        """The forward of a part is about to run."""
        is_recomputed = _graph_task() >= 0
        if is_recomputed:
            self._hold(self._backward, part)
        else:
            self._let_go(self._forward, (part,))
            self._hold(self._forward, part)
        for one in self._parts.params[part]:
            one.wait()
        if not is_recomputed and part in self._after:
            self._hold(self._forward, self._after[part])

    def leave(self, part: PartName, outputs: Iterable[Tensor]) -> None:
        """The forward of a part has run, and returned these tensors."""
        if _graph_task() >= 0:
            if part != self._current_part and part not in self._parts.layers:
                self._drop(self._backward, part)
            return
        if torch.is_grad_enabled():
            self._follow(part, outputs)
        self._drop(self._forward, part)

    def _follow(self, part: PartName, outputs: Iterable[Tensor]) -> None:
        """Has the nodes of what the part returned tell when its backward begins."""
        # A part may hand on what it was given: the hooks of nodes that it has not made come too late, and do nothing.
        graph, found = self._graph, list(outputs)
        # The output of a linear of [B, T, H] is a view: a write in place takes its node out of the graph.
        found += [base for tensor in found if (base := tensor._base) is not None]
        made = [node for tensor in found if (node := tensor.grad_fn) is not None]
        if not found and self._is_trained(part):
            raise RuntimeError(
                f"{'.'.join(part)} returned no tensor, or a value in which none is found: with OptimizerConfig("
                'kind="distributed_parameters") its weights are gathered anew for the backward of what it returned; '
                'have it return tensors, or tuples, lists and dicts of them, or use kind "distributed_gradients"'
            )
        # A part without gradients on this rank, such as one for images, may have them on another.
        graph.reaches |= bool(made) or self._is_trained(part)
        if not graph.reaches:
            return
        place = len(graph.parts)
        graph.parts.append(part)
        graph.num_left = place + 1
        for node in made:
            # Not of the tensor: what looks at a step would take that for its own.
            node.register_prehook(lambda _: self._enter_backward(graph, place))
        if part in self._parts.lasts:
            self._hold(self._backward, part)

    def _is_trained(self, part: PartName) -> bool:
        flats = (one.flat for one in self._parts.params[part])
        return any(param.parameter.requires_grad for flat in flats for param in flat.members)

    def end_backward(self, graph: Graph | None = None) -> None:
        """A backward has run, through this graph."""
        if graph is not None:
            # Parts that no gradient came to.
            self._go_back(graph, 0)
        self._current = None
        self._let_go(self._backward, ())

    def _enter_backward(self, graph: Graph, place: int) -> None:
        """The backward of a part is about to run."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "training_step asked for a gradient that can be differentiated again (create_graph=True) through a "
                'model of OptimizerConfig(kind="distributed_parameters"), whose weights are gone by then; use kind '
                '"distributed_gradients"'
            )
        task = _graph_task()
        if task != self._task:
            # A backward of the step's own, as of a penalty, has ended somewhere and told nobody.
            self._task, self._current = task, None
        if task != graph.task:
            graph.task, graph.num_left = task, len(graph.parts)
        self._go_back(graph, place)

    def _go_back(self, graph: Graph, place: int) -> None:
        """Goes back through the parts of a graph to the one at a place."""
        while graph.num_left > place:
            graph.num_left -= 1
            self._begin_backward(graph, graph.num_left)

    def _begin_backward(self, graph: Graph, place: int) -> None:
        part, before = graph.parts[place], self._current
        self._current = graph, place
        self._let_go(self._backward, (part,))
        if before is None:
            self._reach_parts()
        else:
            left = before[0].parts[before[1]]
            # A part that ran several times has its gradients once it was left as often.
            if left not in before[0].parts[: before[1]]:
                self._leave_parts((left,))
        self._hold(self._backward, part)
        for one in self._parts.params[part]:
            one.wait()
        if place:
            self._hold(self._backward, graph.parts[place - 1])

    @property
    def _current_part(self) -> PartName | None:
        return None if self._current is None else self._current[0].parts[self._current[1]]

    def _gather(self, one: ShardedParams, holder: Hashable) -> None:
        # Whoever may read any weights wants their numbers, and not those of a GEMM.
        if one.hold(holder, is_exact=holder == _ALL):
            self._gathered.append(self._numbers[one])

    def _hold(self, one: _Pass, part: PartName) -> None:
        one.held[part] = None
        for params in self._parts.params[part]:
            self._gather(params, _STEP if self._keeps else (one.name, part))

    def _drop(self, one: _Pass, part: PartName) -> None:
        one.held.pop(part, None)
        for params in self._parts.params[part]:
            params.let_go((one.name, part))

    def _let_go(self, one: _Pass, but: Collection[PartName]) -> None:
        for part in [part for part in one.held if part not in but]:
            self._drop(one, part)


def _graph_task() -> int:
    """Autograd's number of the backward that runs on this thread; negative where none does."""
    return int(torch._C._current_graph_task_id())

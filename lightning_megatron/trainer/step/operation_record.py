"""A record of torch's operations on what a network's last weights computed, which runs again with other numbers.

Only what follows from that, or from the batch alone, is kept: an operation that applies a weight to numbers of the
batch begins anew.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache, partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_megatron.any_module.loss_count import is_output
from lightning_megatron.pipeline.microbatches import map_tensors

MAX_NUMBERS = 2**20
"""Numbers of a network of which a record keeps the newest: a look takes several copies of them in double. A tensor of
more counts as data."""
# Their results follow from their arguments, and from torch's random numbers.
_REPLAYED = ("aten", "prims")
_COMMUNICATING = ("c10d", "_c10d_functional")
_WIDE = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    **dict.fromkeys((torch.complex32, torch.complex64), torch.complex128),
}


class _Kind(Enum):
    """What a tensor, or the result of an operation, is made of."""

    CONSTANT = auto()
    """Buffers, or no tensor at all."""
    WEIGHTS = auto()
    DATA = auto()
    """Random numbers, and what no operation in sight made, such as a batch; no weight was applied to them."""
    COMPUTED = auto()
    """Computed by the last weights, or by what cannot be seen."""
    FOLLOWS = auto()
    """Follows from what is computed, by operations that can run again."""
    UNKNOWN = auto()
    """Follows from numbers of other ranks, or by operations that cannot run again."""


@dataclass(eq=False)
class Value:
    """A tensor that follows from what the last weights computed, or from the batch: an output of an operation on such
    tensors, or, without one, what they computed or the batch holds; there its `numbers` are None where they are
    unknown."""

    numbers: Tensor | None = None
    operation: "Operation | None" = None
    output: int = 0
    is_given: bool = False
    """Whether it follows from the batch alone."""
    rows: Tensor | None = None
    """Rows that a tensor of the batch may have in place of its own; None of any other tensor."""


@dataclass(eq=False)
class Operation:
    """An operation on values. Its outputs are the tensors that it returns, and behind them those that it changes."""

    order: int
    func: Any
    given: list[Any]
    """Its arguments, with a value in the place of a tensor that follows from a network."""
    names: tuple[str, ...] = ()
    """Names of the last of them, which are given by name."""
    changed: tuple[int, ...] = ()
    """Places of the arguments that it changes."""

    @property
    def is_given(self) -> bool:
        """Whether all values among its arguments follow from the batch alone."""
        return all(leaf.is_given for leaf in _leaves(self.given) if isinstance(leaf, Value))

    def run(self, known: Mapping[Any, Any]) -> list[Tensor]:
        """Its outputs in double precision; no argument is changed."""
        given = [_mapped(one, partial(_taken, known)) for one in self.given]
        for place in self.changed:
            given[place] = _mapped(given[place], Tensor.clone)
        split = len(given) - len(self.names)
        result = self.func(*given[:split], **dict(zip(self.names, given[split:], strict=True)))
        return [*_tensors([result]), *_tensors([given[place] for place in self.changed])]


def history(results: Iterable[Value]) -> tuple[list[Value], list[Operation]]:
    """Finds what `results` follow from, of what the last weights computed and of the batch, and the operations between,
    in their order."""
    sources: dict[Value, None] = {}
    operations: dict[Operation, None] = {}
    todo = list(results)
    while todo:
        value = todo.pop()
        if value.operation is None:
            sources[value] = None
        elif value.operation not in operations:
            operations[value.operation] = None
            todo.extend(leaf for leaf in _leaves(value.operation.given) if isinstance(leaf, Value))
    return list(sources), sorted(operations, key=lambda operation: operation.order)


def run_again(results: Sequence[Value], operations: Iterable[Operation], sources: Mapping[Value, Tensor]) -> Tensor:
    """Computes results of one number each, float64 [N], from other numbers of a network.

    Random numbers are the same in every run.

    In host memory: an index that other numbers lead out of a table raises IndexError there, and ends a GPU's context.
    """
    known: dict[Any, Any] = dict(sources)
    with torch.no_grad(), torch.random.fork_rng([]):
        for operation in operations:
            known[operation] = operation.run(known)
    return torch.stack([_taken(known, result).to("cpu", torch.float64).reshape(()) for result in results])


def tensors_of_rows(batch: Any, num_rows: int) -> list[Tensor]:
    """Tensors of a batch whose first dim are its rows, of few enough numbers."""
    found: list[Tensor] = []
    map_tensors(batch, lambda one: found.append(one) or one)  # type: ignore[func-returns-value]
    return [one for one in found if _is_plain(one) and one.shape[:1] == (num_rows,) and one.numel() <= MAX_NUMBERS]


def widened(numbers: Tensor) -> Tensor:
    """A copy in host memory and double precision; integers as they are."""
    return numbers.detach().to("cpu", _WIDE.get(numbers.dtype, numbers.dtype), copy=True)


class OperationRecord(TorchDispatchMode):
    """Inside the block operations are recorded; numbers and gradients are as without it.

    `num_rows`: rows of the batch; weights that are applied to fewer numbers begin nothing anew (those of losses).
    `batch`: tensors of its rows, each with rows to take in their place. `constants`: tensors that are no part of a
    batch. `own_ranks`: ranks that compute the same rows; what they send counts as computed by the network, and what
    others send as unknown. Compiled code and kernels outside of torch are not seen: what they return counts as computed
    by the network.
    """

    def __init__(
        self,
        num_rows: int,
        constants: Iterable[Tensor] = (),
        own_ranks: Collection[int] = (),
        batch: Iterable[tuple[Tensor, Tensor]] = (),
    ) -> None:
        super().__init__()
        self.num_rows, self._own_ranks = num_rows, frozenset(own_ranks)
        self._found = WeakTensorKeyDictionary()
        self._unseen = WeakTensorKeyDictionary()
        # Storages that an operation on values changed.
        self._changed: dict[int, tuple[StorageWeakRef, torch.dtype, Value]] = {}
        self._kept: list[ref[Value]] = []
        self._num_kept = 0
        self._num_operations = 0
        for tensor in constants:
            self._found[tensor] = _Kind.WEIGHTS if tensor.requires_grad else _Kind.CONSTANT
        for tensor, rows in batch:
            self._found[tensor] = Value(tensor.detach(), is_given=True, rows=rows)

    # Else torch refuses those that have others within them, such as `torch.cond`.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: compiled code stays compiled."""
        return True

    def value_of(self, tensor: Tensor) -> Value | None:
        """What a tensor follows from; None where nothing that a weight computed or the batch holds."""
        found = self._read(tensor)
        return found if isinstance(found, Value) else None

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        by_name = kwargs or {}
        if not isinstance(func, OpOverload):
            # It runs others, such as attention of a mask in Python.
            return func(*args, **by_name)
        given = [*args, *by_name.values()]
        tensors = _tensors(given)
        found = [self._read(tensor) for tensor in tensors]
        kind = self._kind(func, args, by_name, tensors, found)
        places = _changed_places(func, len(args), tuple(by_name))
        changed = _tensors([given[place] for place in places])
        if kind in (_Kind.CONSTANT, _Kind.WEIGHTS, _Kind.DATA):
            result = func(*args, **by_name)
            for tensor in _tensors([result]):
                self._found[tensor] = kind
            for tensor in changed:
                self._found[tensor] = self._found[_root(tensor)] = kind
            return result
        # All as it is before the operation changes it.
        for tensor in changed:
            for value in (self._read(tensor), self._read(_root(tensor))):
                if isinstance(value, Value) and value.numbers is not None:
                    value.numbers = value.numbers.clone()
        storages = [self._storage(tensor) for tensor in changed]
        operation = None
        if kind is _Kind.FOLLOWS:
            by_id = dict(zip(map(id, tensors), found, strict=True))
            kept = [_mapped(one, partial(_kept, by_id, place in places)) for place, one in enumerate(given)]
            operation = self._operation(func, kept, tuple(by_name), places)
        result = func(*args, **by_name)
        outputs = _tensors([result])
        for output, tensor in enumerate(outputs):
            self._found[tensor] = self._value(kind, tensor, operation, output)
        for output, (tensor, storage) in enumerate(zip(changed, storages, strict=True), start=len(outputs)):
            self._change(tensor, storage, self._value(kind, tensor, operation, output))
        return result

    def _read(self, tensor: Tensor) -> _Kind | Value:
        if isinstance(tensor, nn.Parameter):
            return _Kind.WEIGHTS
        node = tensor.grad_fn
        if node is not None and is_output(node):
            return self._computed_unseen(tensor)
        if self._changed and _is_plain(tensor):
            known = self._changed.get(tensor.untyped_storage()._cdata)
            if known is not None:
                return self._viewed(known[2], tensor) if tensor.dtype == known[1] else Value()
        found: _Kind | Value = self._found.get(tensor, _Kind.DATA)
        if node is not None and found in (_Kind.CONSTANT, _Kind.DATA):
            return self._computed_unseen(tensor)
        return found

    def _kind(
        self,
        func: Any,
        args: tuple[Any, ...],
        by_name: Mapping[str, Any],
        tensors: list[Tensor],
        found: list[_Kind | Value],
    ) -> _Kind:
        """What an operation's results are made of."""
        is_given = [isinstance(value, Value) and value.is_given for value in found]
        found = [_Kind.DATA if given else value for given, value in zip(is_given, found, strict=True)]
        values = [value for value in found if isinstance(value, Value)]
        if not values and _Kind.DATA not in found:
            if _Kind.WEIGHTS in found:
                return _Kind.WEIGHTS
            return _Kind.DATA if torch.Tag.nondeterministic_seeded in func.tags else _Kind.CONSTANT
        if func.namespace in _COMMUNICATING:
            if not values:
                return _Kind.DATA
            is_known = all(source.numbers is not None for value in values for source in history([value])[0])
            is_own = self._own_ranks.issuperset(_ranks(func, args, by_name))
            return _Kind.COMPUTED if is_known and is_own else _Kind.UNKNOWN
        if not all(map(_is_plain, tensors)):
            return _Kind.UNKNOWN
        weights = [tensor.shape for tensor, kind in zip(tensors, found, strict=True) if kind is _Kind.WEIGHTS]
        if any(shape.numel() > 1 for shape in weights):
            is_elementwise = not values and torch.Tag.pointwise in func.tags
            # Masked, scaled and noisy weights are weights.
            if is_elementwise and torch.broadcast_shapes(*(tensor.shape for tensor in tensors)) in weights:
                return _Kind.WEIGHTS
            if self._may_hold_rows(tensors, found):
                return _Kind.COMPUTED
        # A user's generator is drawn from once.
        has_generator = any(isinstance(one, torch.Generator) for one in by_name.values())
        runs_again = func.namespace in _REPLAYED and not has_generator
        if values:
            return _Kind.FOLLOWS if runs_again else _Kind.COMPUTED
        # Large tensors of a network, which count as given, would be kept.
        is_kept = any(is_given) and all(tensor.numel() <= MAX_NUMBERS for tensor in tensors)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        return _Kind.FOLLOWS if runs_again and is_kept and not is_random else _Kind.DATA

    def _may_hold_rows(self, tensors: list[Tensor], found: list[_Kind | Value]) -> bool:
        """Whether any of an operation's tensors of a batch has as many numbers as there are rows."""
        of_batch = (
            tensor for tensor, kind in zip(tensors, found, strict=True) if kind is _Kind.DATA or isinstance(kind, Value)
        )
        return any(tensor.numel() >= self.num_rows for tensor in of_batch)

    def _value(self, kind: _Kind, tensor: Tensor, operation: Operation | None, output: int) -> _Kind | Value:
        """What stands for an output of an operation on values."""
        if kind is _Kind.COMPUTED:
            if not _is_plain(tensor):
                return Value()
            return self._computed(tensor) if tensor.is_floating_point() else _Kind.DATA
        return Value(operation=operation, output=output, is_given=operation is not None and operation.is_given)

    def _computed(self, tensor: Tensor) -> _Kind | Value:
        """A new value; the oldest lose their numbers where they are too many."""
        if tensor.numel() > MAX_NUMBERS:
            return _Kind.DATA
        value = Value(tensor.detach())
        self._kept.append(ref(value))
        self._num_kept += tensor.numel()
        if self._num_kept > MAX_NUMBERS:
            kept = [one for one in (kept() for kept in self._kept) if one is not None]
            self._num_kept = 0
            for one in reversed(kept):
                self._num_kept += 0 if one.numbers is None else one.numbers.numel()
                if self._num_kept > MAX_NUMBERS:
                    one.numbers = None
            kept = [one for one in kept if one.numbers is not None]
            self._num_kept = sum(one.numbers.numel() for one in kept if one.numbers is not None)
            self._kept = [ref(one) for one in kept]
        return value

    def _computed_unseen(self, tensor: Tensor) -> _Kind | Value:
        """What stands for a tensor that no operation in sight made."""
        if tensor not in self._unseen:
            self._unseen[tensor] = self._computed(tensor) if _is_plain(tensor) else Value()
        found: _Kind | Value = self._unseen[tensor]
        return found

    def _operation(
        self, func: Any, given: list[Any], names: tuple[str, ...] = (), changed: tuple[int, ...] = ()
    ) -> Operation:
        self._num_operations += 1
        return Operation(self._num_operations, func, given, names, changed)

    def _call(self, func: Any, *given: Any) -> Value:
        """The value of an operation that no step ran."""
        operation = self._operation(func, list(given))
        return Value(operation=operation, is_given=operation.is_given)

    def _viewed(self, storage: Value, tensor: Tensor) -> Value:
        """A tensor as a part of its storage [N]."""
        return self._call(torch.ops.aten.as_strided.default, storage, *_geometry(tensor))

    def _storage(self, tensor: Tensor) -> Tensor | Value:
        """Numbers [N] of a tensor's storage."""
        if not _is_plain(tensor):
            return Value()
        storage, root = tensor.untyped_storage(), _root(tensor)
        if (known := self._changed.get(storage._cdata)) is not None:
            return known[2] if known[1] == tensor.dtype else Value()
        size = storage.nbytes() // tensor.element_size()
        if size > MAX_NUMBERS or root.dtype != tensor.dtype:
            return Value()
        numbers, value = root.as_strided((size,), (1,), 0).clone(), self._read(root)
        return self._put(numbers, value, root) if isinstance(value, Value) else numbers

    def _put(self, storage: Tensor | Value, value: Value, tensor: Tensor) -> Value:
        """A storage [N] with other numbers in a tensor's place."""
        return self._call(torch.ops.aten.as_strided_scatter.default, storage, value, *_geometry(tensor))

    def _change(self, tensor: Tensor, storage: Tensor | Value, value: _Kind | Value) -> None:
        """Notes that an operation changed a tensor."""
        if not isinstance(value, Value) or not _is_plain(tensor):
            self._found[tensor] = value
            return
        self._changed = {key: known for key, known in self._changed.items() if not known[0].expired()}
        own = tensor.untyped_storage()
        self._changed[own._cdata] = (StorageWeakRef(own), tensor.dtype, self._put(storage, value, tensor))


def _taken(known: Mapping[Any, Any], leaf: Any) -> Any:
    """An argument as an operation takes it that runs again."""
    if isinstance(leaf, Value):
        return known[leaf] if leaf.operation is None else known[leaf.operation][leaf.output]
    if isinstance(leaf, Tensor):
        return widened(leaf)
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return _WIDE.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf


def _kept(found: Mapping[int, _Kind | Value], is_changed: bool, leaf: Any) -> Any:
    """An argument as an operation keeps it; `found` of tensors by their ids."""
    value = found.get(id(leaf))
    if isinstance(value, Value):
        return value
    return leaf.clone() if is_changed else leaf


def _leaves(given: Iterable[Any]) -> Iterator[Any]:
    """Arguments or results, and in the place of a list what is in it."""
    for one in given:
        if isinstance(one, list | tuple):
            yield from _leaves(one)
        else:
            yield one


def _tensors(given: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in _leaves(given) if isinstance(leaf, Tensor)]


def _mapped(one: Any, function: Callable[[Any], Any]) -> Any:
    """An argument with a function's results in the place of what is in it."""
    if isinstance(one, list | tuple):
        return [_mapped(leaf, function) for leaf in one]
    return function(one)


@cache
def _changed_places(func: Any, num_positional: int, names: tuple[str, ...]) -> tuple[int, ...]:
    """Places among its arguments of those that an operation changes."""
    arguments = func._schema.arguments
    changing = [one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write]
    if func.namespace == "c10d" and "send" not in func.name():
        # Their schemas do not say that they change the first.
        changing = [arguments[0].name]
    given = (*(one.name for one in arguments[:num_positional]), *names)
    return tuple(place for place, name in enumerate(given) if name in changing)


def _ranks(func: Any, args: tuple[Any, ...], by_name: Mapping[str, Any]) -> list[int]:
    """Ranks of the group that a collective talks over; none where it waits for one."""
    named = {argument.name: one for argument, one in zip(func._schema.arguments, args, strict=False)} | {**by_name}
    if (group := named.get("process_group")) is not None:
        return get_process_group_ranks(ProcessGroup.unbox(group))
    name = named.get("group_name")
    return [] if name is None else get_process_group_ranks(_resolve_process_group(name))


def _geometry(tensor: Tensor) -> tuple[list[int], list[int], int]:
    return list(tensor.shape), list(tensor.stride()), int(tensor.storage_offset())


def _root(tensor: Tensor) -> Tensor:
    """The tensor that a tensor is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is torch's own, with a storage."""
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return is_strided and type(tensor) in (Tensor, nn.Parameter, nn.Buffer)

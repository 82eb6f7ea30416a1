"""A record of torch's operations on what a network's last weights computed, which runs again with other numbers.

Only what follows from that is kept: an operation that applies a weight to numbers of the batch begins anew.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_megatron.any_module.loss_count import is_output

MAX_NUMBERS = 2**20
"""Numbers of a network of which a record keeps the newest: a look takes several copies of them in double."""
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
    """A tensor that follows from what the last weights computed: an output of an operation on such tensors, or, without
    one, what they computed themselves; there its `numbers` are None where they are unknown."""

    numbers: Tensor | None = None
    operation: "Operation | None" = None
    output: int = 0


@dataclass(eq=False)
class Operation:
    """An operation on values. Its outputs are the tensors that it returns, and behind them those that it changes."""

    order: int
    func: Any
    leaves: list[Any]
    """Its arguments, with a value in the place of a tensor that follows from a network."""
    spec: Any
    changed: list[int]
    """Places of the arguments that it changes."""

    def run(self, known: Mapping[Any, Any]) -> list[Tensor]:
        """Its outputs in double precision; no argument is changed."""
        leaves = [_taken(leaf, known) for leaf in self.leaves]
        for place in self.changed:
            leaves[place] = leaves[place].clone()
        args, kwargs = tree_unflatten(leaves, self.spec)
        return [*_tensors(self.func(*args, **kwargs)), *(leaves[place] for place in self.changed)]


def history(result: Value) -> tuple[list[Value], list[Operation]]:
    """What the last weights computed that a result follows from, and the operations between, in their order."""
    sources: dict[Value, None] = {}
    operations: dict[Operation, None] = {}
    todo = [result]
    while todo:
        value = todo.pop()
        if value.operation is None:
            sources[value] = None
        elif value.operation not in operations:
            operations[value.operation] = None
            todo.extend(leaf for leaf in value.operation.leaves if isinstance(leaf, Value))
    return list(sources), sorted(operations, key=lambda operation: operation.order)


def run_again(result: Value, operations: Iterable[Operation], sources: Mapping[Value, Tensor]) -> Tensor:
    """The result for other numbers of a network, in double precision; random numbers are the same in every run.

    In host memory: an index that other numbers lead out of a table raises IndexError there, and ends a GPU's context.
    """
    known: dict[Any, Any] = dict(sources)
    with torch.no_grad(), torch.random.fork_rng([]):
        for operation in operations:
            known[operation] = operation.run(known)
    found: Tensor = _taken(result, known)
    return found


def widened(numbers: Tensor) -> Tensor:
    """A copy in host memory and double precision; integers as they are."""
    return numbers.detach().to("cpu", _WIDE.get(numbers.dtype, numbers.dtype), copy=True)


class OperationRecord(TorchDispatchMode):
    """Inside the block operations are recorded; numbers and gradients are as without it.

    `constants`: buffers, which are no part of a batch. `own_ranks`: ranks that compute the same rows; what they send
    counts as computed by the network, and what others send as unknown. Compiled code and kernels outside of torch are
    not seen: what they return counts as computed by the network.
    """

    def __init__(self, constants: Iterable[Tensor] = (), own_ranks: Collection[int] = ()) -> None:
        super().__init__()
        self._own_ranks = frozenset(own_ranks)
        self._found = WeakTensorKeyDictionary()
        self._unseen = WeakTensorKeyDictionary()
        # Storages that an operation on values changed.
        self._changed: dict[int, tuple[StorageWeakRef, torch.dtype, Value]] = {}
        self._kept: list[ref[Value]] = []
        self._num_operations = 0
        for tensor in constants:
            self._found[tensor] = _Kind.CONSTANT

    # Else torch refuses those that have others within them, such as `torch.cond`.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: compiled code stays compiled."""
        return True

    def value_of(self, tensor: Tensor) -> Value | None:
        """What a tensor follows from; None where nothing that a weight computed."""
        found = self._read(tensor)
        return found if isinstance(found, Value) else None

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if not isinstance(func, OpOverload):
            # It runs others, such as attention of a mask in Python.
            return func(*args, **given)
        leaves, spec = tree_flatten((args, given))
        found = [self._read(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
        named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | given
        kind, changed = self._kind(func, named, leaves, found), _changed_places(func, named, leaves)
        if kind in (_Kind.CONSTANT, _Kind.WEIGHTS, _Kind.DATA):
            result = func(*args, **given)
            for tensor in _tensors(result):
                self._found[tensor] = kind
            for tensor in (leaves[place] for place in changed):
                self._found[tensor] = self._found[_root(tensor)] = kind
            return result
        # All as it is before the operation changes it.
        for place in changed:
            for value in (found[place], self._read(_root(leaves[place]))):
                if isinstance(value, Value) and value.numbers is not None:
                    value.numbers = value.numbers.clone()
        storages = [self._storage(leaves[place]) for place in changed]
        operation = None
        if kind is _Kind.FOLLOWS:
            given_leaves = [
                value if isinstance(value, Value) else leaf.clone() if place in changed else leaf
                for place, (leaf, value) in enumerate(zip(leaves, found, strict=True))
            ]
            operation = self._operation(func, given_leaves, spec, changed)
        result = func(*args, **given)
        outputs = _tensors(result)
        for output, tensor in enumerate(outputs):
            self._found[tensor] = self._value(kind, tensor, operation, output)
        for output, (place, storage) in enumerate(zip(changed, storages, strict=True), start=len(outputs)):
            self._change(leaves[place], storage, self._value(kind, leaves[place], operation, output))
        return result

    def _read(self, tensor: Tensor) -> _Kind | Value:
        if isinstance(tensor, nn.Parameter):
            return _Kind.WEIGHTS
        node = tensor.grad_fn
        if node is not None and is_output(node):
            return self._computed_unseen(tensor)
        if _is_plain(tensor) and (storage := self._changed.get(tensor.untyped_storage()._cdata)) is not None:
            _, dtype, value = storage
            return self._viewed(value, tensor) if tensor.dtype == dtype else Value()
        found: _Kind | Value = self._found.get(tensor, _Kind.DATA)
        if found in (_Kind.CONSTANT, _Kind.DATA) and node is not None:
            return self._computed_unseen(tensor)
        return found

    def _kind(self, func: Any, named: dict[str, Any], leaves: list[Any], found: list[Any]) -> _Kind:
        """What an operation's results are made of."""
        values = [value for value in found if isinstance(value, Value)]
        if not values and _Kind.DATA not in found:
            if _Kind.WEIGHTS in found:
                return _Kind.WEIGHTS
            return _Kind.DATA if torch.Tag.nondeterministic_seeded in func.tags else _Kind.CONSTANT
        if func.namespace in _COMMUNICATING:
            if not values:
                return _Kind.DATA
            is_known = all(source.numbers is not None for value in values for source in history(value)[0])
            return _Kind.COMPUTED if is_known and self._own_ranks.issuperset(_ranks(named)) else _Kind.UNKNOWN
        if not all(_is_plain(leaf) for leaf in leaves if isinstance(leaf, Tensor)):
            return _Kind.UNKNOWN
        weights = [leaf.shape for leaf, kind in zip(leaves, found, strict=True) if kind is _Kind.WEIGHTS]
        if any(shape.numel() > 1 for shape in weights):
            # Masked and noisy weights are weights.
            shapes = [leaf.shape for leaf in leaves if isinstance(leaf, Tensor)]
            is_elementwise = torch.Tag.pointwise in func.tags and torch.broadcast_shapes(*shapes) in weights
            return _Kind.WEIGHTS if is_elementwise and not values else _Kind.COMPUTED
        if not values:
            return _Kind.DATA
        # A user's generator is drawn from once.
        is_pure = func.namespace in _REPLAYED and not any(isinstance(leaf, torch.Generator) for leaf in leaves)
        return _Kind.FOLLOWS if is_pure else _Kind.COMPUTED

    def _value(self, kind: _Kind, tensor: Tensor, operation: Operation | None, output: int) -> _Kind | Value:
        """What stands for an output of an operation on values."""
        if kind is _Kind.COMPUTED:
            if not _is_plain(tensor):
                return Value()
            return self._computed(tensor) if tensor.is_floating_point() else _Kind.DATA
        return Value(operation=operation, output=output)

    def _computed(self, tensor: Tensor) -> Value:
        """A new value; the oldest lose their numbers where they are too many."""
        value = Value(tensor.detach())
        kept = [one for one in (kept() for kept in self._kept) if one is not None and one.numbers is not None]
        kept.append(value)
        total = sum(one.numbers.numel() for one in kept if one.numbers is not None)
        while total > MAX_NUMBERS:
            oldest = kept.pop(0)
            total -= 0 if oldest.numbers is None else oldest.numbers.numel()
            oldest.numbers = None
        self._kept = [ref(one) for one in kept]
        return value

    def _computed_unseen(self, tensor: Tensor) -> Value:
        """The value of a tensor that no operation in sight made."""
        if tensor not in self._unseen:
            self._unseen[tensor] = self._computed(tensor) if _is_plain(tensor) else Value()
        value: Value = self._unseen[tensor]
        return value

    def _operation(self, func: Any, leaves: list[Any], spec: Any, changed: list[int]) -> Operation:
        self._num_operations += 1
        return Operation(self._num_operations, func, leaves, spec, changed)

    def _call(self, func: Any, *args: Any) -> Value:
        """The value of an operation that no step ran."""
        leaves, spec = tree_flatten((args, {}))
        return Value(operation=self._operation(func, leaves, spec, []))

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


def _taken(leaf: Any, known: Mapping[Any, Any]) -> Any:
    """An argument as an operation takes it that runs again."""
    if isinstance(leaf, Value):
        return known[leaf] if leaf.operation is None else known[leaf.operation][leaf.output]
    if isinstance(leaf, Tensor):
        return widened(leaf)
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return _WIDE.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _changed_places(func: Any, named: dict[str, Any], leaves: list[Any]) -> list[int]:
    """Places among the leaves of its arguments that an operation changes."""
    changing = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    if func.namespace == "c10d" and "send" not in func.name():
        # Their schemas do not say that they change the first.
        changing = [func._schema.arguments[0].name]
    changed = _tensors([named.get(name) for name in changing])
    return [place for place, leaf in enumerate(leaves) if any(leaf is one for one in changed)]


def _ranks(named: dict[str, Any]) -> list[int]:
    """Ranks of the group that a collective talks over; none where it waits for one."""
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

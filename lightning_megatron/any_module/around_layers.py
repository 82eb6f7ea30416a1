"""Which layers of a network read what the modules around them compute: found by a call of it without memory."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_megatron.any_module.cut_experts import expert_modules
from lightning_megatron.mesh import Mesh
from lightning_megatron.moe.grouped_shapes import of_any_dtype
from lightning_megatron.pipeline.layout import assign_alike
from lightning_megatron.sharding import sharded_parameters


def known_readers(module: nn.Module, name: str, layers: Sequence[str]) -> dict[str, frozenset[int]]:
    """`readers_of` the network `name` of a module, by its `example_input_array`, or the network's `dummy_inputs`, which
    models of transformers have; nothing where there are neither."""
    network = module.get_submodule(name)
    example, dummy = getattr(module, "example_input_array", None), getattr(network, "dummy_inputs", None)
    if isinstance(example, dict):
        return readers_of(module, name, layers, (), example)
    if example is not None:
        return readers_of(module, name, layers, example if isinstance(example, tuple) else (example,), {})
    return readers_of(network, "", layers, (), {**dummy, "use_cache": False}) if isinstance(dummy, dict) else {}


def readers_of(
    root: nn.Module, name: str, layers: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, frozenset[int]]:
    """By module around the layers: indices of the layers whose arguments its weights reach other than through layers,
    and `len(layers)` where they so reach what the call returns.

    `root(*args, **kwargs)` calls the network, its child of that name; `layers` are names within the network. Modules
    without weights, those whose weights reach nothing, and those whose weights other code reads are left out; all are
    where the call does not run on tensors without numbers.
    """
    network = root.get_submodule(name)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    around = list(_around(network, layers))
    found: dict[int, frozenset[nn.Parameter]] = {}
    # Of weights that are read past a call of their module.
    past: dict[int, frozenset[nn.Parameter]] = {}
    with ExitStack() as stack:
        # What counts memory shall not count tensors without numbers.
        stack.enter_context(_disable_current_modes())
        stack.enter_context(mode)
        stack.enter_context(of_any_dtype())
        stack.enter_context(torch.enable_grad())
        states = [*root.named_parameters(), *root.named_buffers()]
        fakes = {
            key: torch.empty(one.shape, dtype=one.dtype, requires_grad=one.is_floating_point()) for key, one in states
        }
        of_others = {id(fakes[key]): one for key, one in states}
        owners: dict[int, Any] = {}
        for module in root.modules():
            # What a forward notes for its next call is no tensor of another one.
            stack.callback(_restore, module, dict(module.__dict__), dict(module._buffers))
        for index, layer in enumerate(layers):
            module = network.get_submodule(layer)
            look = partial(_look, ((found, owners), (past, of_others)), index)
            module.__dict__["forward"] = partial(_run_layer, look, module.forward)
        for _, module in around:
            own = {
                (child, key): torch.empty(weight.shape, dtype=weight.dtype, requires_grad=weight.is_floating_point())
                for child in module.modules()
                for key, weight in child._parameters.items()
                if weight is not None
            }
            owners |= {id(fake): child._parameters[key] for (child, key), fake in own.items()}
            module.__dict__["forward"] = partial(_run_on, own, module.forward)
        try:
            # An example may be on another device than what stands for the weights.
            given, named = tree_map_only(Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype), (args, dict(kwargs)))
            output = torch.func.functional_call(root, fakes, given, named)
        # Whatever the network's code makes of tensors without numbers.
        except Exception:
            return {}
        _look(((found, owners), (past, of_others)), len(layers), output)
    read_past = frozenset().union(*past.values())
    return {
        one: indices
        for one, module in around
        if read_past.isdisjoint(module.parameters())
        if (indices := frozenset(i for i, weights in found.items() if not weights.isdisjoint(module.parameters())))
    }


def removable(
    network: nn.Module, layers: Sequence[str], readers: Mapping[str, Collection[int]], cut: Collection[str]
) -> dict[str, Collection[int]]:
    """Filters `readers`: keeps modules that a stage which does not read them can do without.

    It still runs, on the meta device, to give the shapes of what it returns. So those stay that hold experts, whose
    shapes are known to the device alone, and a linear that is `cut` over tp with those beside it; unless the head alone
    reads them.
    """
    return {
        name: indices
        for name, indices in readers.items()
        if min(indices) == len(layers) or (name not in cut and _gives_shapes(network.get_submodule(name)))
    }


def absent_modules(layers: Sequence[str], readers: Mapping[str, Collection[int]], mesh: Mesh) -> tuple[str, ...]:
    """The modules of these `readers` that no stage of this rank reads."""
    stages = assign_alike(len(layers), mesh.sizes.num_stages, mesh.sizes.stage_layout)
    own = {index for stage in mesh.own_stages for index in stages[stage]}
    if mesh.own_stages[-1] == mesh.sizes.num_stages - 1:
        own.add(len(layers))
    return tuple(name for name, indices in readers.items() if own.isdisjoint(indices))


def _gives_shapes(module: nn.Module) -> bool:
    # Layers of this package talk over tp.
    return not any(True for _ in sharded_parameters(module)) and not any(True for _ in expert_modules(module))


def _around(network: nn.Module, layers: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """The largest modules of a network without a layer within them."""
    path = {""}
    for layer in layers:
        names = layer.split(".")
        path |= {".".join(names[:depth]) for depth in range(1, len(names) + 1)}
    return [
        (name, module)
        for name, module in network.named_modules()
        if name not in path and name.rpartition(".")[0] in path and name.rpartition(".")[0] not in layers
    ]


_Found = tuple[dict[int, frozenset[nn.Parameter]], Mapping[int, Any]]
"""What weights reach, by index of a layer, and the weights by the ids of tensors."""


def _look(of: Sequence[_Found], index: int, values: Any) -> None:
    for found, owners in of:
        found[index] = found.get(index, frozenset()) | _reached(values, owners)


def _run_on(weights: Mapping[tuple[nn.Module, str], Tensor], forward: Any, *args: Any, **kwargs: Any) -> Any:
    """A forward with other weights."""
    before = {place: place[0]._parameters[place[1]] for place in weights}
    for (child, key), weight in weights.items():
        child._parameters[key] = weight  # type: ignore[assignment]
    try:
        return forward(*args, **kwargs)
    finally:
        for (child, key), held in before.items():
            child._parameters[key] = held


def _run_layer(look: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    look((args, kwargs))
    try:
        output = forward(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        # Experts, whose shapes are those of their tokens.
        output = args[0]
    return tree_map_only(Tensor, Tensor.detach, output)


def _restore(module: nn.Module, attributes: dict[str, Any], buffers: dict[str, Any]) -> None:
    module.__dict__.clear()
    module.__dict__.update(attributes)
    module._buffers.clear()
    module._buffers.update(buffers)


def _reached(values: Any, owners: Mapping[int, Any]) -> frozenset[Any]:
    """The weights that tensors follow from."""
    todo = [leaf.grad_fn for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    found, seen = set(), set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None and id(leaf) in owners:
            found.add(owners[id(leaf)])
        todo.extend(source for source, _ in node.next_functions)
    return frozenset(found)

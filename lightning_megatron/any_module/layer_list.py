"""The layers of a network, found by what it holds: the one list of like children with most parameters."""

import math
from collections.abc import Sequence

from torch import nn

from lightning_megatron.sharding import shard_of


def is_list(module: nn.Module) -> bool:
    """Whether a module is a list of at least two modules."""
    return isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1


def layers_of(network: nn.Module) -> tuple[str, ...]:
    """Names of the layers, in the order of their list; none where there is no list of at least two like children."""
    lists = {name: child for name, child in network.named_modules() if is_list(child) and _are_like(child)}
    if not lists:
        return ()
    name = max(lists, key=lambda one: _num_parameters(lists[one]))
    return tuple(f"{name}.{key}" if name else key for key, _ in lists[name].named_children())


def other_lists(network: nn.Module, layers: Sequence[str]) -> dict[str, nn.Module]:
    """The outermost lists of at least two like children beside that of `layers`, by name: those of an encoder where
    the layers are the decoder's."""
    found: dict[str, nn.Module] = {}
    for name, child in network.named_modules():
        is_beside = not f"{name}.".startswith(tuple(f"{one}." for one in (*found, *layers)))
        holds_none = not any(one.startswith(f"{name}.") for one in layers)
        if name and is_beside and holds_none and is_list(child) and _are_like(child):
            found[name] = child
    return found


def _num_parameters(module: nn.Module) -> int:
    """A module has so many parameters on one device: the largest list is the same before and after ranks cut it."""
    return sum(math.prod(shard_of(parameter).global_shape) for parameter in module.parameters())


def _are_like(layers: nn.Module) -> bool:
    """Whether the children have a class in common that is not every module's."""
    # A list of lists is no list of layers: nobody calls those inside.
    if any(isinstance(one, nn.ModuleList) for one in layers.children()):
        return False
    bases = [set(type(one).__mro__) - set(nn.Module.__mro__) for one in layers.children()]
    return bool(set.intersection(*bases))

"""The layers of a network, found by what it holds: the one list of like children with most parameters."""

from torch import nn


def is_list(module: nn.Module) -> bool:
    """Whether a module is a list of at least two modules."""
    return isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1


def layers_of(network: nn.Module) -> tuple[str, ...]:
    """Names of the layers, in the order of their list; none where there is no list of at least two like children."""
    lists = {
        name: child
        for name, child in network.named_modules()
        if is_list(child) and len({type(one) for one in child.children()}) == 1
    }
    if not lists:
        return ()
    name = max(lists, key=lambda one: sum(parameter.numel() for parameter in lists[one].parameters()))
    return tuple(f"{name}.{key}" if name else key for key, _ in lists[name].named_children())

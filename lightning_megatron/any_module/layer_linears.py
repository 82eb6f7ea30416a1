"""The linears within a layer of a network that was written for one device: those that do its matrix products.

Left out are the adapters of peft, which are narrow, and what chooses experts or weighs them: a linear beside a module
of experts that is the only one of its module (a router, or the gate of a shared expert).
"""

from collections import Counter
from collections.abc import Iterator

from torch import nn

from lightning_megatron.any_module.cut_experts import expert_modules
from lightning_megatron.any_module.tensor_styles import is_adapter, parent_of
from lightning_megatron.tensor.linear import ParallelLinear
from lightning_megatron.tensor.whole_linear import WholeLinear


def linears_of(network: nn.Module, layer: str) -> Iterator[tuple[str, nn.Module]]:
    """The linears of a layer, whole or cut over tp, with their names in the network."""
    beside_experts = tuple(f"{name.rpartition('.')[0]}." for name, _ in expert_modules(network))
    named = [(f"{layer}.{name}".rstrip("."), one) for name, one in network.get_submodule(layer).named_modules()]
    linears = [(name, one) for name, one in named if _is_linear(one) and not is_adapter(name)]
    counts = Counter(parent_of(name) for name, _ in linears)
    for name, linear in linears:
        if not (name.startswith(beside_experts) and counts[parent_of(name)] == 1):
            yield name, linear


def _is_linear(module: nn.Module) -> bool:
    # Code may read the weights of a class derived from nn.Linear, and not call it.
    return type(module) is nn.Linear or isinstance(module, (ParallelLinear, WholeLinear))

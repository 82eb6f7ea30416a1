"""Tells which module of a rank computes: the one whose forward runs, or the one whose part of a backward does.

Every node of autograd's graph belongs to the innermost module whose forward made it, and so do the weight gradients
that its backward defers. A path has `*` for every number: all layers are one module.
"""

import re
import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_megatron.tensor.weight_gradients import WeightGradients

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")
_OWNER = "module"


class ModuleTurns(threading.local):
    """The modules that compute, the innermost last; each thread has its own. `changed` is called with every change."""

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self._changed = changed
        self._names: list[str] = []

    @property
    def current(self) -> str:
        """Path of the module that computes; empty outside of all modules."""
        return self._names[-1] if self._names else ""

    def follow(self, root: nn.Module, own: Callable[[str, Any], None] = lambda name, tensors: None) -> None:
        """Notes from now on whose forward runs, of the modules inside of `root`.

        `own` is called with the path of a module and with tensors of its own: those that it hands to another one, and
        those that it returns.
        """
        for name, module in root.named_modules():
            if name:
                module.__dict__["forward"] = self._noting(_INDEX.sub("*", name), module.forward, own)

    def follow_backwards(self, root: nn.Module, weight_gradients: WeightGradients) -> None:
        """Notes from now on whose forward and whose backward runs, of the modules inside of `root`."""
        self.follow(root, self._give_nodes)
        own_defer = weight_gradients.defer

        def defer(weight: Tensor, task: Callable[[], None]) -> None:
            own_defer(weight, self._in_turn(self.current, task))

        weight_gradients.__dict__["defer"] = defer

    def _noting(self, name: str, forward: Callable[..., Any], own: Callable[[str, Any], None]) -> Callable[..., Any]:
        @wraps(forward)
        def noted(*args: Any, **kwargs: Any) -> Any:
            own(self.current, (args, kwargs))
            output = self._in_turn(name, forward)(*args, **kwargs)
            own(name, output)
            return output

        return noted

    def _in_turn(self, name: str, task: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._begin(name)
            try:
                return task(*args, **kwargs)
            finally:
                self._end()

        return run

    def _begin(self, name: str, *_: Any) -> None:
        self._names.append(name)
        self._changed()

    def _end(self, *_: Any) -> None:
        self._names.pop()
        self._changed()

    def _give_nodes(self, name: str, tensors: Any) -> None:
        """Gives a module all nodes behind its tensors that nobody has."""
        nodes: list[Any] = [leaf.grad_fn for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
        while nodes:
            node = nodes.pop()
            if node is None or _OWNER in node.metadata:
                continue
            node.metadata[_OWNER] = name
            node.register_prehook(partial(self._begin, name))
            node.register_hook(self._end)
            nodes += [before for before, _ in node.next_functions]

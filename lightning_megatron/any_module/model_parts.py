"""The parts of a module's models, which run one after another, and hooks around their forwards.

Parts of a pipelined model are those of its stages. A network that is not cut has its layers for parts: what stands
around them, and weights that a layer shares with it, belong to none.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_megatron.any_module.pipelined_modules import pipelined_modules
from lightning_megatron.mesh import Axis
from lightning_megatron.optim.bucket import PartName
from lightning_megatron.pipeline.module import at_once, no_graph


class PartHooks(Protocol):
    """What parts call as they run."""

    def enter_part(self, part: PartName) -> None:
        """A part is about to run."""
        ...

    def leave_part(self, part: PartName, outputs: Sequence[Tensor]) -> None:
        """A part has run, and returned these tensors."""
        ...

    def whole_weights(self) -> AbstractContextManager[None]:
        """Inside the block all parameters are there."""
        ...

    @property
    def gathers_over(self) -> Sequence[Axis]:
        """Axes whose ranks run the same parts, equally often."""
        ...

    def begin_stage(self, reaches: bool) -> Any:
        """A stage is about to run for a microbatch of a collective call, and its input takes gradients or not."""
        ...

    def end_graph(self, graph: Any) -> None:
        """The backward of what `begin_stage` began has run."""
        ...


class ModuleParts:
    """The parts of this rank; `layers` names those of networks that are not pipelined, by attribute of the module."""

    def __init__(self, module: nn.Module, layers: Mapping[str, Sequence[str]]) -> None:
        self._models = pipelined_modules(module)
        self._layers = {
            (name, layer): module.get_submodule(f"{name}.{layer}") for name, own in layers.items() for layer in own
        }
        self.stages: list[list[PartName]] = [
            [(name, part) for part in model.parts_of(stage)]
            for name, model in self._models.items()
            for stage in model.mesh.own_stages
        ]
        """Parts of each stage of each model, in order."""
        self.stages += [[(name, layer) for layer in own] for name, own in layers.items()]
        ends = {name: model.part_names[-1] for name, model in self._models.items()}
        self.lasts: list[PartName] = [stage[-1] for stage in self.stages if stage and stage[-1][0] not in ends]
        """The last part of each model, where this rank has it."""
        self.lasts += [stage[-1] for stage in self.stages if stage and ends.get(stage[-1][0]) == stage[-1][1]]
        self.parameters: dict[PartName, list[nn.Parameter]] = {
            part: self._models[part[0]].parameters_of(part[1])
            if part[0] in self._models
            else list(self._layers[part].parameters())
            for stage in self.stages
            for part in stage
        }
        """Parameters that each part uses, in the order in which a forward runs them."""
        around = set(_around(module, [f"{name}.{layer}" for name, layer in self._layers]))
        for part in self._layers:
            self.parameters[part] = [one for one in self.parameters[part] if one not in around]

    @property
    def layers(self) -> Sequence[PartName]:
        """Parts that are layers of a network that is not cut, and may be recomputed by code of its own."""
        return list(self._layers)

    def hook(self, hooks: PartHooks) -> Callable[[], None]:
        """Has the models and their parts call the hooks. Returns what removes them."""
        for name, model in self._models.items():
            model.before_part = partial(_enter, hooks, name)
            model.after_part = partial(_leave, hooks, name)
            model.with_weights, model.gathers_over = hooks.whole_weights, hooks.gathers_over
            model.before_stage, model.after_backward = hooks.begin_stage, hooks.end_graph
        handles: list[RemovableHandle] = []
        compiled: dict[nn.Module, Callable[..., Any]] = {}
        for part, layer in self._layers.items():
            if layer._compiled_call_impl is not None:
                # Its own hooks are compiled with it.
                compiled[layer] = layer._compiled_call_impl
                layer._compiled_call_impl = _called_between(hooks, part, layer._compiled_call_impl)
                continue
            handles.append(layer.register_forward_pre_hook(_BeforeLayer(hooks, part), prepend=True))
            handles.append(layer.register_forward_hook(_AfterLayer(hooks, part)))

        def remove() -> None:
            for handle in handles:
                handle.remove()
            for layer, call in compiled.items():
                # None where the fit's own compilation has ended.
                if layer._compiled_call_impl is not None:
                    layer._compiled_call_impl = call
            for model in self._models.values():
                model.before_part, model.after_part = at_once, at_once
                model.with_weights, model.gathers_over = nullcontext, ()
                model.before_stage, model.after_backward = no_graph, no_graph

        return remove


def _called_between(hooks: PartHooks, part: PartName, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call of a layer between the hooks."""

    def called(*args: Any, **kwargs: Any) -> Any:
        hooks.enter_part(part)
        output = call(*args, **kwargs)
        hooks.leave_part(part, tensors_in(output))
        return output

    return called


class _BeforeLayer:
    """A hook before one layer; copies of the layer do nothing."""

    def __init__(self, hooks: PartHooks | None, part: PartName) -> None:
        self._hooks, self._part = hooks, part

    def __call__(self, layer: nn.Module, given: Any) -> None:
        if self._hooks is not None:
            self._hooks.enter_part(self._part)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_BeforeLayer":
        return type(self)(None, self._part)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None, self._part)


class _AfterLayer(_BeforeLayer):
    """A hook after one layer."""

    def __call__(self, layer: nn.Module, given: Any, output: Any = None) -> None:
        if self._hooks is not None:
            self._hooks.leave_part(self._part, tensors_in(output))


def _around(module: nn.Module, layers: Sequence[str]) -> Iterator[nn.Parameter]:
    """Parameters of the module that modules outside of these layers have."""
    inside = tuple(f"{layer}." for layer in layers)
    if not inside:
        return
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not name.startswith(inside):
            yield parameter


def _enter(hooks: PartHooks, model: str, part: str) -> None:
    hooks.enter_part((model, part))


def _leave(hooks: PartHooks, model: str, part: str, output: Any) -> None:
    hooks.leave_part((model, part), tensors_in(output))


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors in a tree of values."""
    leaves: Iterable[Any] = tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

"""New weights of a model of transformers, drawn by name: a rank makes what it holds, and few whole tensors at a time.

The model's own `_init_weights`, which is called with each module, says what values tensors have. It runs on the meta
device first, to learn which tensors each call looks at; those that a call has in common are a group. The calls of a
group run again, on tensors with memory, when one of its values is wanted. Each draws from a generator that is seeded by
the name of its module, so that no value depends on what else was drawn, nor on the layout.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from lightning_megatron.comm import rng
from lightning_megatron.hf.later_weights import LaterWeights, part_of


@dataclass(frozen=True, eq=False)
class _Group:
    """Names of tensors that are drawn together, and the numbers of the calls that draw them."""

    names: frozenset[str]
    calls: frozenset[int]


class NewWeights(LaterWeights):
    """The parameters and buffers that a model on the meta device begins with, each a function of `seed` and its name.

    `undrawn` are names of those that `_init_weights` does not write: their values are the constructors'.
    """

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        super().__init__(f"new {type(model).__name__}")
        self._seed = seed
        # Ranks cut the model itself.
        self._whole = whole = copy.deepcopy(model)
        # Of weights that are tied, one has the values, and calls with the modules of the others must not write them.
        self._tied = frozenset(whole.all_tied_weights_keys)
        for name in self._tied:
            owner, _, key = name.rpartition(".")
            tied: dict[str, Any] = whole.get_submodule(owner)._parameters
            tied[key] = nn.Parameter(torch.empty_like(tied[key]))
        # Where each tensor is.
        self._places: dict[str, tuple[dict[str, Any], str]] = {
            f"{name}.{key}" if name else key: (held, key)
            for name, module in whole.named_modules()
            for held in (module._parameters, module._buffers)
            for key, tensor in held.items()
            if tensor is not None
        }
        self._tensors: dict[str, Tensor] = {name: held[key] for name, (held, key) in self._places.items()}
        # By storage: code may look at a tensor by way of a view.
        self._names: dict[int, list[str]] = {}
        for name, tensor in self._tensors.items():
            self._names.setdefault(tensor.untyped_storage()._cdata, []).append(name)
        self._calls = _calls_of(whole)
        self._groups = self._groups_by_name()
        self.undrawn = sorted(self._tensors.keys() - self._groups.keys())

    @torch.no_grad()
    def _groups_by_name(self) -> dict[str, _Group]:
        groups: dict[str, _Group] = {}
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            for number, (_, module, model) in enumerate(self._calls):
                with _Touched() as touched:
                    model._init_weights(module)
                found = {name for one in touched.storages & self._names.keys() for name in self._names[one]}
                met = {groups[name] for name in found if name in groups}
                joined = _Group(
                    frozenset(found).union(*(group.names for group in met)),
                    frozenset({number}).union(*(group.calls for group in met)),
                )
                groups.update(dict.fromkeys(joined.names, joined))
        return groups

    def groups(self) -> list[frozenset[str]]:
        return [group.names for group in dict.fromkeys(self._groups.values())]

    def parts(self, group: frozenset[str], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = wanted.keys() - self._tied
        drawn = self._drawn(self._groups[next(iter(group))]) if own else {}
        found = {name: part_of(wanted[name], drawn[name]) for name in sorted(own)}
        return {name: part for name, part in found.items() if part is not None}

    def _drawn(self, group: _Group) -> dict[str, Tensor]:
        made: dict[Tensor, Tensor] = {}
        for name in group.names:
            (held, key), meta = self._places[name], self._tensors[name]
            held[key] = made[meta] = made[meta] if meta in made else _without_values(meta)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            for number in sorted(group.calls):
                name, module, model = self._calls[number]
                torch.default_generator.manual_seed(rng.key(self._seed, "new weights", name))
                with _Touched() as touched:
                    model._init_weights(module)
                assert not touched.storages & self._names.keys(), "a group has all that its calls look at"
        drawn: dict[str, Tensor] = {}
        for name in group.names:
            held, key = self._places[name]
            drawn[name], held[key] = held[key], self._tensors[name]
        return drawn


class _Touched(TorchFunctionMode):
    """Notes the storages of all tensors that code looks at."""

    # Not what is dispatched: of a tensor on the meta device torch's initialisers ask no more than whether it is one.
    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        self.storages.update(one.untyped_storage()._cdata for one in given)
        return func(*args, **(kwargs or {}))


def _calls_of(model: PreTrainedModel) -> list[tuple[str, nn.Module, Any]]:
    """Each module with its name and the model whose `_init_weights` gets it, children before their parents, which may
    write their tensors once more."""
    owners: dict[str, PreTrainedModel] = {}
    found = []
    for name, module in model.named_modules():
        owners[name] = module if isinstance(module, PreTrainedModel) else owners[name.rpartition(".")[0]]
        found.append((name, module, owners[name]))
    return found[::-1]


def _without_values(tensor: Tensor) -> Tensor:
    """A tensor like this one in host memory, of no number where there may be such."""
    made = torch.empty_like(tensor, device="cpu")
    if made.is_floating_point():
        made.fill_(torch.nan)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

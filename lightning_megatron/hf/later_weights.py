"""Weights that a model of transformers gets once ranks have cut it: a rank makes those that it holds.

Until then the model is on the meta device as far as they go. `fill_later` leaves a model so, in `configure_model`, and
`fill_left` fills it, when the strategy has cut it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.mesh import ambient_mesh
from lightning_megatron.sharding import shard_of

_LATER = "_lightning_megatron_later_weights"
_READ_IN_PARTS = "_lightning_megatron_read_in_parts"


class LaterWeights(ABC):
    """Values of parameters and buffers of a model whose type is called `kind`, some of which are made together."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._versions: dict[str, tuple[Tensor, int]] = {}

    @abstractmethod
    def groups(self) -> list[frozenset[str]]:
        """Names of the tensors that are made together."""

    @abstractmethod
    def parts(self, group: frozenset[str], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values, in host memory, of tensors on the meta device which are of one group, by name.

        They may be parts of a model's, and have a `Shard`. A tensor of another shape than the model had is left out.
        """

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        """Gives the tensors of the model that are on the meta device, whole or cut, their values.

        Raises ValueError for those that the model did not have when it was made.
        """
        wanted = {name: tensor for name, tensor in _named_tensors(model) if tensor.is_meta}
        for group in self.groups():
            if own := {name: wanted[name] for name in sorted(group & wanted.keys())}:
                for name, part in self.parts(group, own).items():
                    _give(own[name], part)
        if unknown := [name for name, tensor in wanted.items() if tensor.is_meta]:
            raise ValueError(
                f"a {self._kind} gets weights once it is cut for this rank, and {', '.join(unknown[:6])} of it came, "
                "or changed in shape, after it was made; set the sizes in the configuration, and change the model's "
                "modules on one device, or before its weights are written to the folder"
            )

    def note_versions(self, model: nn.Module) -> None:
        """Notes which tensors of the model have no values yet, as they were made."""
        self._versions = {name: (one, one._version) for name, one in _named_tensors(model) if one.is_meta}

    def require_versions(self, model: nn.Module) -> None:
        """Raises ValueError for tensors of the model that were changed since `note_versions`."""
        here = dict(_named_tensors(model))
        noted = self._versions.items()
        if changed := [name for name, (one, version) in noted if here.get(name) is one and one._version != version]:
            raise ValueError(
                f"{', '.join(changed[:6])} of a {self._kind} was changed in place before the model has weights, which "
                "it gets once it is cut for this rank; change weights in on_fit_start"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "LaterWeights":
        raise ValueError(
            f"a {self._kind} gets its weights once it is cut for this rank, and before that it has none to copy; make "
            "it in __init__, or leave out what copies it, such as a callback that averages weights"
        )


def fill_later(model: nn.Module, weights: LaterWeights) -> None:
    """Fills a model at once, or, where the mesh cuts it over tp, pp or ep, leaves that to `fill_left`."""
    sizes = ambient_mesh().sizes
    if sizes.tp * sizes.pp * sizes.ep == 1:
        weights.fill(model)
        return
    model.__dict__[_READ_IN_PARTS] = True
    if not weights.groups():
        return
    model.__dict__[_LATER] = weights
    weights.note_versions(model)


def are_read_in_parts(module: nn.Module) -> bool:
    """Whether there is a model within a module of which a rank makes, or reads from files, what it keeps alone."""
    return any(_READ_IN_PARTS in model.__dict__ for model in module.modules())


def require_unchanged(module: nn.Module) -> None:
    """Raises ValueError where code has changed weights in place within a model that has none yet: that is lost."""
    for model in module.modules():
        weights: LaterWeights | None = model.__dict__.get(_LATER)
        if weights is not None:
            weights.require_versions(model)


def forget_left(module: nn.Module) -> None:
    """Leaves the models within a module that `fill_later` left without values for good."""
    for model in module.modules():
        model.__dict__.pop(_LATER, None)


def fill_left(module: nn.Module) -> None:
    """Fills the models within a module that `fill_later` left."""
    for model in module.modules():
        weights: LaterWeights | None = model.__dict__.pop(_LATER, None)
        if weights is not None:
            weights.fill(model)


def part_of(tensor: Tensor, whole: Tensor) -> Tensor | None:
    """What `tensor` is of the whole values; None where it is not a part of such a tensor."""
    shard = shard_of(tensor)
    return shard.part_of(whole) if shard.global_shape == tuple(whole.shape) else None


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _give(tensor: Tensor, part: Tensor) -> None:
    """Gives a tensor without memory its values."""
    values: Tensor = part.detach().to(tensor.dtype).clone(memory_format=torch.contiguous_format)
    if isinstance(tensor, nn.Parameter):
        values = type(tensor)(values, requires_grad=tensor.requires_grad)
    values.__dict__.update(tensor.__dict__)
    # The tensor stays the one that others hold: what is tied stays so.
    torch.utils.swap_tensors(tensor, values)

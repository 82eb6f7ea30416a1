"""The parts of named tensors that this rank saves and loads.

Names are those of the unsplit model, the same on every mesh; a state of an optimizer is
`optimizer.{index}.{parameter name}.{state key}`. Ranks that hold the same part (replicated or tied weights,
data-parallel ranks) all name it, and it is written once.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_megatron.sharding import Box, boxes_of_range, shard_of

StatesPlace = Literal["as the part", "whole", "elsewhere"]
"""What a rank has of an optimizer's states of a parameter: those of its part; or, where the optimizer steps the unsplit
parameter at one rank, all of them there, and none on the other ranks."""

# Key of the metadata with the titles of further sets of tensors under the module's names: `{title}.{name}`.
OTHER_STATES = "other_states"
_OPTIMIZER_NAME = re.compile(r"optimizer\.(\d+)\.(?:(.*)\.)?([^.]*)", re.DOTALL)


@dataclass(frozen=True)
class Piece:
    """This rank's part of a named global tensor.

    `tensor` has exactly the sizes of `box`; it may be a view of a padded parameter, and loading writes through it.
    """

    global_shape: tuple[int, ...]
    box: Box
    tensor: Tensor

    def __post_init__(self) -> None:
        if tuple(self.tensor.shape) != tuple(self.box.sizes):
            raise ValueError(
                f"tensor of shape {tuple(self.tensor.shape)} must have the sizes of its box {tuple(self.box.sizes)}; "
                "give the part without padding (Shard.valid)"
            )
        ends = [offset + size for offset, size in zip(self.box.offsets, self.box.sizes, strict=True)]
        if any(end > length for end, length in zip(ends, self.global_shape, strict=True)):
            raise ValueError(f"{self.box} must lie within the global shape {self.global_shape}")

    @staticmethod
    def unsharded(tensor: Tensor) -> "Piece":
        """The piece of an unsharded tensor."""
        shape = tuple(tensor.shape)
        return Piece(shape, Box((0,) * len(shape), shape), tensor.detach())

    @staticmethod
    def all_like(parameter: Tensor, tensor: Tensor) -> "list[Piece]":
        """The pieces of a tensor that is sharded and padded as `parameter`: itself, or a moment of it."""
        shard, start, pieces = shard_of(parameter), 0, []
        for box in shard.boxes:
            part = tensor.detach()
            if shard.dim is not None:
                part = part.narrow(shard.dim, start, box.sizes[shard.dim])
                start += box.sizes[shard.dim]
            pieces.append(Piece(shard.global_shape, box, part))
        return pieces

    @property
    def is_empty(self) -> bool:
        """Whether this rank holds only padding of the tensor."""
        return self.tensor.numel() == 0


@dataclass(frozen=True)
class Slot:
    """The part of a parameter that an optimizer steps: elements `start` to before `end`, flattened."""

    name: str
    """Name of the parameter in the unsplit model."""
    parameter: Tensor
    """Parameter of this rank, with its `Shard`."""
    start: int
    """First element of the part."""
    end: int
    """Element after the last of the part."""
    states: StatesPlace = "as the part"
    """States of the parameter that this rank has."""

    @staticmethod
    def full(name: str, parameter: Tensor) -> "Slot":
        """The slot of this rank's full parameter."""
        return Slot(name, parameter, 0, parameter.numel())

    @property
    def is_unsharded(self) -> bool:
        """Whether states are those of the unsharded tensor: an axis of one rank cuts nothing."""
        if self.states == "whole":
            return True
        is_all_here = (self.start, self.end) == (0, self.parameter.numel())
        return is_all_here and tuple(self.parameter.shape) == shard_of(self.parameter).global_shape

    def pieces(self, tensor: Tensor) -> list[Piece]:
        """Pieces of `tensor`, which has the elements of the slot: master weights or a moment of them."""
        shard, flat, pieces = shard_of(self.parameter), tensor.detach().reshape(-1), []
        for begin, box in boxes_of_range(tuple(self.parameter.shape), self.start, self.end):
            whole = flat[begin - self.start :][: math.prod(box.sizes)].view(box.sizes)
            start = 0
            for own in shard.boxes:
                offsets, sizes, part = list(box.offsets), list(box.sizes), whole
                if (dim := shard.dim) is not None:
                    # Padding comes after the valid part, and is not saved.
                    first, end = max(start, offsets[dim]), min(start + own.sizes[dim], offsets[dim] + sizes[dim])
                    sizes[dim] = max(0, end - first)
                    part = whole.narrow(dim, first - offsets[dim] if sizes[dim] else 0, sizes[dim])
                    offsets[dim], start = first - start, start + own.sizes[dim]
                if part.numel():
                    starts = tuple(outer + inner for outer, inner in zip(own.offsets, offsets, strict=True))
                    pieces.append(Piece(shard.global_shape, Box(starts, tuple(sizes)), part))
        return pieces


Pieces = Mapping[str, Piece | Tensor | Sequence[Piece]]


def as_pieces(pieces: Pieces) -> dict[str, list[Piece]]:
    """A list of pieces for every name; a plain tensor becomes one unsharded piece."""
    found: dict[str, list[Piece]] = {}
    for name, value in pieces.items():
        if isinstance(value, Tensor):
            found[name] = [Piece.unsharded(value)]
        else:
            found[name] = [value] if isinstance(value, Piece) else list(value)
    return found


def is_optimizer_name(name: str) -> bool:
    """Whether a tensor of that name is an optimizer's state."""
    return split_optimizer_name(name) is not None


def split_optimizer_name(name: str) -> tuple[int, str, str] | None:
    """Index, parameter name and state key in the name of an optimizer's state; None for any other name."""
    found = _OPTIMIZER_NAME.fullmatch(name)
    return None if found is None else (int(found[1]), found[2] or "", found[3])


def other_state_of(name: str, titles: Iterable[str]) -> tuple[str, str]:
    """Title of the further set of tensors that the name belongs to, and the name in it; an empty title for none."""
    for title in titles:
        if name.startswith(f"{title}."):
            return title, name.removeprefix(f"{title}.")
    return "", name


def is_module_name(name: str) -> bool:
    """Whether a tensor of that name is a module's parameter or buffer."""
    return not is_optimizer_name(name)


def pieces_of_module(named: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
    """Pieces of parameters and buffers, for example of `module.state_dict(keep_vars=True)`.

    A parameter without a `Shard`, and every buffer, is unsharded on every rank.
    """
    pieces = {}
    for name, tensor in named.items():
        if is_optimizer_name(name):
            raise ValueError(f"{name!r} would be taken for an optimizer's state; rename the submodule 'optimizer'")
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name!r} is a {type(tensor).__qualname__}, not a tensor; save it with the metadata")
        pieces[name] = Piece.all_like(tensor, tensor)
    return pieces

"""Which part of which named tensor this rank saves and loads.

Names are those of the unsplit model, the same on every mesh; a state of an optimizer is
`optimizer.{index}.{parameter name}.{state key}`. Ranks that hold the same part (replicas, tied weights, data-parallel
copies) all name it, and it is written once.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from lightning_megatron.sharding import Box, shard_of

_OPTIMIZER_NAME = re.compile(r"optimizer\.\d+\.")


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
    def whole(tensor: Tensor) -> "Piece":
        """The piece of a tensor that is not cut."""
        shape = tuple(tensor.shape)
        return Piece(shape, Box((0,) * len(shape), shape), tensor.detach())

    @staticmethod
    def like(parameter: Tensor, tensor: Tensor) -> "Piece":
        """The piece of a tensor that is cut and padded as `parameter` is: itself, or a moment of it."""
        shard = shard_of(parameter)
        return Piece(shard.global_shape, shard.box, shard.valid(tensor.detach()))

    @property
    def is_empty(self) -> bool:
        """This rank holds nothing of the tensor: padding alone."""
        return self.tensor.numel() == 0


Pieces = Mapping[str, Piece | Tensor]


def as_pieces(pieces: Pieces) -> dict[str, Piece]:
    """The same with each plain tensor as a whole piece."""
    return {name: value if isinstance(value, Piece) else Piece.whole(value) for name, value in pieces.items()}


def is_optimizer_name(name: str) -> bool:
    """Whether the name is that of an optimizer's state."""
    return _OPTIMIZER_NAME.match(name) is not None


def is_module_name(name: str) -> bool:
    """Whether the name is that of a module's parameter or buffer."""
    return not is_optimizer_name(name)


def pieces_of_module(named: Mapping[str, Tensor]) -> dict[str, Piece]:
    """The pieces of parameters and buffers, for example of `module.state_dict(keep_vars=True)`.

    A parameter without a `Shard`, and every buffer, is whole on every rank.
    """
    pieces = {}
    for name, tensor in named.items():
        if is_optimizer_name(name):
            raise ValueError(f"{name!r} would be taken for an optimizer's state; rename the submodule 'optimizer'")
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name!r} is a {type(tensor).__qualname__}, not a tensor; save it with the metadata")
        pieces[name] = Piece.like(tensor, tensor)
    return pieces

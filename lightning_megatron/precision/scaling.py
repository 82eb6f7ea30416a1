"""Scaling of a tensor before its cast to float8: by its own amax, by its amaxes in earlier steps, or block by block.

    current   amax of the tensor at hand        a collective per cast where ranks hold parts of one tensor
    delayed   amaxes of the last steps          the scale is known beforehand; one collective per step for all tensors
    mxfp8     amaxes of blocks of the tensor    no collective; a tensor and its transpose are cast each by itself

Note: the same scale all step long. Delayed scales change in `AmaxHistory.end_step` alone, and within a step the amax
recorded is the largest seen. So a recomputed forward casts by the same scales and records nothing new,
and microbatches count as one tensor. Source: Micikevicius et al., arXiv 2209.05433, section 4.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.mesh import Axis
from lightning_megatron.precision.cast import TILE, Operand, amax_of, cast, largest, scale_of
from lightning_megatron.precision.fp8 import Fp8Config
from lightning_megatron.precision.mx import BLOCK, cast_blocks

Agree = Callable[[Tensor], Tensor]
"""All-reduce (maximum) of amaxes over the ranks that hold shards of the same tensors."""


class Scaling(Protocol):
    """The cast of one tensor of one layer."""

    dtype: torch.dtype
    """The float8 format."""

    def cast(self, x_TC: Tensor, *, is_training: bool) -> Operand:
        """The tensor as it is sent and saved; its amax counts for later scales only in training."""
        ...

    def rows(self, x_TC: Operand) -> Operand:
        """The float8 operand [T, C] of a GEMM whose inner dim is C."""
        ...

    def columns(self, x_TC: Operand) -> Operand:
        """The float8 operand [C, T] of a GEMM whose inner dim is T, which is padded with zeros to full tiles."""
        ...


class TensorScaling:
    """One scale for a tensor: its transpose is the same bytes in another order."""

    def __init__(self, dtype: torch.dtype, margin: int, agree: Agree) -> None:
        self.dtype, self._margin, self._agree = dtype, margin, agree

    def rows(self, x_TC: Operand) -> Operand:
        return x_TC

    def columns(self, x_TC: Operand) -> Operand:
        # The byte 0 is zero in float8.
        return x_TC._replace(values=_padded(x_TC.values, TILE).t().contiguous())


class CurrentScaling(TensorScaling):
    """Scales a tensor by its own amax."""

    def cast(self, x: Tensor, *, is_training: bool) -> Operand:
        scale = self.scale_of(self._agree(amax_of(x)))
        return Operand(cast(x, scale, self.dtype), scale.reciprocal())

    def scale_of(self, amaxes: Tensor) -> Tensor:
        """The scales of tensors with these amaxes, float32 of their shape."""
        return scale_of(amaxes, largest(self.dtype), self._margin)


class WeightCast(NamedTuple):
    """The cast of a weight before ranks gather it."""

    scaling: CurrentScaling
    axis: Axis
    """Axis whose ranks have parts of the weight, and one scale."""
    num_tensors: int
    """Tensors along the first dim of the weight that have a scale each, such as the matrices of experts."""


class AmaxHistory:
    """Amaxes, over the last steps, of all tensors of a rank that are cast to float8, and the scales that follow.

    A tensor's index in `names` and `dtypes` is its slot.
    """

    def __init__(
        self, names: Sequence[str], dtypes: Sequence[torch.dtype], config: Fp8Config, device: torch.device
    ) -> None:
        self._names, self._config = list(names), config
        count, length = len(self._names), config.amax_history_length
        self._largest = torch.tensor([largest(dtype) for dtype in dtypes], dtype=torch.float32, device=device)
        # Amaxes of earlier steps, the latest first; 0 where there is none yet.
        self._past = torch.zeros(count, length, dtype=torch.float32, device=device)
        # Amaxes of this step so far.
        self._step = torch.zeros(count, dtype=torch.float32, device=device)
        self._scales = torch.ones_like(self._step)
        # Whether a scale follows from earlier steps; kept on the host, so that casts do not wait for the device.
        self._is_known = [False] * count
        self._recorded: set[int] = set()

    def is_known(self, slot: int) -> bool:
        """Whether the slot's tensor was seen in an earlier step."""
        return self._is_known[slot]

    def scale(self, slot: int) -> Tensor:
        """The scale of a known tensor in this step, float32 []."""
        return self._scales[slot]

    def record(self, slot: int, amax: Tensor) -> None:
        """Records an amax of this step."""
        torch.maximum(self._step[slot], amax, out=self._step[slot])
        self._recorded.add(slot)

    @torch.no_grad()
    def end_step(self, agree: Agree) -> None:
        """Moves this step's amaxes, reduced by `agree`, into the history, and computes new scales.

        A tensor that was not cast, or held only zeros or a non-finite number, keeps its history.
        """
        step = agree(self._step.nan_to_num(nan=torch.inf, posinf=torch.inf))
        is_new = (step > 0) & step.isfinite()
        moved = torch.cat((step.unsqueeze(1), self._past[:, :-1]), dim=1)
        self._past = torch.where(is_new.unsqueeze(1), moved, self._past)
        self._step.zero_()
        unknown = [slot for slot in self._recorded if not self._is_known[slot]]
        self._recorded.clear()
        self._follow(look=bool(unknown))

    def state_dict(self) -> dict[str, Tensor]:
        """The past amaxes of every tensor by its name, latest first."""
        return dict(zip(self._names, self._past.cpu().clone(), strict=True))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores the amaxes of the tensors of this rank; a longer history loses its end."""
        for slot, name in enumerate(self._names):
            if name in state:
                past = state[name][: self._past.shape[1]]
                self._past[slot, : len(past)] = past.to(self._past.device)
        self._follow(look=True)

    def _follow(self, *, look: bool) -> None:
        """Computes the scales; `look` reads on the host which are known, which waits for the device."""
        amax = self._past[:, 0] if self._config.amax_from == "most_recent" else self._past.amax(dim=1)
        self._scales = scale_of(amax, self._largest, self._config.margin)
        if look:
            self._is_known = (amax > 0).tolist()


class DelayedScaling(TensorScaling):
    """Scales a tensor by its amaxes of earlier steps, and in the first by its own."""

    def __init__(self, dtype: torch.dtype, margin: int, agree: Agree, history: AmaxHistory, slot: int) -> None:
        super().__init__(dtype, margin, agree)
        self._history, self._slot = history, slot

    def cast(self, x: Tensor, *, is_training: bool) -> Operand:
        amax = amax_of(x)
        if self._history.is_known(self._slot):
            scale = self._history.scale(self._slot)
        else:
            scale = scale_of(self._agree(amax), largest(self.dtype), self._margin)
        if is_training:
            self._history.record(self._slot, amax)
        # The cast saturates infinities; the factor makes the result NaN, so that the overflow is seen.
        return Operand(cast(x, scale, self.dtype), scale.reciprocal() + 0.0 * amax)


class BlockScaling:
    """Scales each block of 32 numbers along the inner dim by itself, once for each GEMM.

    What is sent and saved is the tensor itself: a cast along the other dim needs the numbers and not their rounding,
    and both casts together are as many bytes as 16 bits.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def cast(self, x_TC: Tensor, *, is_training: bool) -> Operand:
        return Operand(x_TC, None)

    def rows(self, x_TC: Operand) -> Operand:
        return cast_blocks(x_TC.values, self.dtype)

    def columns(self, x_TC: Operand) -> Operand:
        return cast_blocks(_padded(x_TC.values, BLOCK).t(), self.dtype)


def _padded(x_TC: Tensor, tile: int) -> Tensor:
    missing = -len(x_TC) % tile
    return F.pad(x_TC, (0, 0, 0, missing)) if missing else x_TC

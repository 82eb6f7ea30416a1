"""By what a tensor is scaled before its cast to float8: its own amax, or those of the steps before.

    current   amax of the tensor at hand        a collective per cast where ranks hold parts of one tensor
    delayed   amaxes of the last steps          the scale is known beforehand; one collective per step for all tensors

Note: the same scale all step long. Delayed scales change in `AmaxHistory.end_step` alone, and within a step the amax
recorded is the largest seen. So a forward that is run again for backward casts by the same scales and records nothing
new, and microbatches count as one tensor. Source: Micikevicius et al., arXiv 2209.05433, section 4.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_megatron.precision.cast import Operand, amax_of, cast, largest, scale_of
from lightning_megatron.precision.fp8 import Fp8Config

Agree = Callable[[Tensor], Tensor]
"""The largest of each number over the ranks that hold parts of the same tensors; collective over them."""


class Scaling(Protocol):
    """How one tensor of one layer is cast."""

    dtype: torch.dtype
    """The float8 format."""

    def cast(self, x: Tensor, *, is_training: bool) -> Operand:
        """The tensor in float8; only in training does what it holds count for later scales."""
        ...


class CurrentScaling:
    """Scales a tensor by its own amax."""

    def __init__(self, dtype: torch.dtype, margin: int, agree: Agree) -> None:
        self.dtype, self._margin, self._agree = dtype, margin, agree

    def cast(self, x: Tensor, *, is_training: bool) -> Operand:
        scale = scale_of(self._agree(amax_of(x)), largest(self.dtype), self._margin)
        return Operand(cast(x, scale, self.dtype), scale.reciprocal())


class AmaxHistory:
    """The amaxes of all tensors of a rank that are cast to float8, over the last steps, and the scales that follow.

    `names` and `dtypes` are those of the tensors; a tensor's place among them is its slot.
    """

    def __init__(
        self, names: Sequence[str], dtypes: Sequence[torch.dtype], config: Fp8Config, device: torch.device
    ) -> None:
        self._names, self._config = list(names), config
        count, length = len(self._names), config.amax_history_length
        self._largest = torch.tensor([largest(dtype) for dtype in dtypes], dtype=torch.float32, device=device)
        # Amaxes of earlier steps, the latest first; 0: none yet.
        self._past = torch.zeros(count, length, dtype=torch.float32, device=device)
        # Of this step so far.
        self._step = torch.zeros(count, dtype=torch.float32, device=device)
        self._scales = torch.ones_like(self._step)
        # Whether a scale follows from earlier steps; told to the host once, so that casts do not wait for the device.
        self._is_known = [False] * count
        self._recorded: set[int] = set()

    def is_known(self, slot: int) -> bool:
        """Whether the slot's tensor was seen in an earlier step."""
        return self._is_known[slot]

    def scale(self, slot: int) -> Tensor:
        """The scale of a known tensor in this step, float32 []."""
        return self._scales[slot]

    def record(self, slot: int, amax: Tensor) -> None:
        """Notes an amax of this step."""
        torch.maximum(self._step[slot], amax, out=self._step[slot])
        self._recorded.add(slot)

    @torch.no_grad()
    def end_step(self, agree: Agree) -> None:
        """Lets this step's amaxes, agreed over the ranks, count for the scales from now on.

        A tensor that was not seen, or held zeros or a number that is not finite, keeps its history.
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
        """Takes over the past of the tensors that are here; a longer past loses its end."""
        for slot, name in enumerate(self._names):
            if name in state:
                past = state[name][: self._past.shape[1]]
                self._past[slot, : len(past)] = past.to(self._past.device)
        self._follow(look=True)

    def _follow(self, *, look: bool) -> None:
        """Computes the scales; `look`s on the host which are known, which waits for the device."""
        amax = self._past[:, 0] if self._config.amax_from == "most_recent" else self._past.amax(dim=1)
        self._scales = scale_of(amax, self._largest, self._config.margin)
        if look:
            self._is_known = (amax > 0).tolist()


class DelayedScaling:
    """Scales a tensor by its amaxes of earlier steps, and in the first by its own."""

    def __init__(self, dtype: torch.dtype, margin: int, agree: Agree, history: AmaxHistory, slot: int) -> None:
        self.dtype, self._margin, self._agree = dtype, margin, agree
        self._history, self._slot = history, slot

    def cast(self, x: Tensor, *, is_training: bool) -> Operand:
        amax = amax_of(x)
        if self._history.is_known(self._slot):
            scale = self._history.scale(self._slot)
        else:
            scale = scale_of(self._agree(amax), largest(self.dtype), self._margin)
        if is_training:
            self._history.record(self._slot, amax)
        # The cast makes large numbers of infinities; NaN must come out, or nobody would see the overflow.
        return Operand(cast(x, scale, self.dtype), scale.reciprocal() + 0.0 * amax)

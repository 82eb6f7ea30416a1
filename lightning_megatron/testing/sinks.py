"""The two sinks of a recorder: the reference keeps what one device did, and a comparison looks at a rank beside it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_megatron.optim.reductions import fingerprint
from lightning_megatron.sharding import Box
from lightning_megatron.testing.quantities import BATCH, CLIPPED, GRADIENT, Deviation, apart, scale_of
from lightning_megatron.testing.recorder import Parts

Key = tuple[str, int]
"""Quantity and step."""


@dataclass
class Reference:
    """What one device did, by quantity and step."""

    numbers: dict[Key, dict[str, float]] = field(default_factory=dict)
    tensors: dict[Key, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def held(self) -> list[tuple[str, int, str]]:
        """Quantity, step and name of all that ranks must have; a gradient of zeros may be none."""
        found = [(*key, name) for key, values in self.numbers.items() for name in values]
        for (quantity, step), tensors in self.tensors.items():
            is_gradient = quantity in (GRADIENT, CLIPPED)
            found += [(quantity, step, name) for name, one in tensors.items() if not is_gradient or one.count_nonzero()]
        return found


class ReferenceSink:
    """Keeps everything."""

    def __init__(self) -> None:
        self.reference = Reference()

    def numbers(self, quantity: str, step: int, values: Mapping[str, float]) -> None:
        self.reference.numbers.setdefault((quantity, step), {}).update(values)

    def tensors(self, quantity: str, step: int, parts: Parts) -> None:
        kept = self.reference.tensors.setdefault((quantity, step), {})
        kept |= {name: tensor for name, tensor, _ in parts}


class ComparisonSink:
    """Keeps how far a rank's values are from those of one device."""

    def __init__(self, reference: Reference, rank: int, *, dp_rank: int = 0, dp_size: int = 1) -> None:
        self._reference = reference
        self._rank = rank
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self.deviations: list[Deviation] = []

    def numbers(self, quantity: str, step: int, values: Mapping[str, float]) -> None:
        wanted = self._reference.numbers.get((quantity, step), {})
        largest = max((abs(value) for value in wanted.values() if math.isfinite(value)), default=0.0)
        for name, ours in values.items():
            theirs = wanted.get(name)
            if theirs is None:
                self._add(quantity, step, name, math.inf, ours, math.nan)
                continue
            one, other = (torch.tensor(value, dtype=torch.float64) for value in (ours, theirs))
            relative, _, _, factor = apart(one, other, min(largest, abs(theirs) or largest))
            self._add(quantity, step, name, relative, ours, theirs, factor)

    def tensors(self, quantity: str, step: int, parts: Parts) -> None:
        wanted = self._reference.tensors.get((quantity, step), {})
        largest = scale_of(wanted)
        for name, tensor, box in parts:
            if name not in wanted:
                # A gradient of zeros and none are alike; what comes of them is seen in the weights.
                if bool(tensor.count_nonzero()):
                    self._add(quantity, step, name, math.inf, math.nan, math.nan)
                continue
            full = wanted[name]
            theirs = self._own_rows(full) if quantity == BATCH else box.of(full)
            relative, our_value, their_value, factor = apart(tensor, theirs, largest)
            digest = int(fingerprint(tensor)) if tensor.numel() and not tensor.is_complex() else 0
            self._add(quantity, step, name, relative, our_value, their_value, factor, digest, box)

    def _own_rows(self, full: Tensor) -> Tensor:
        """This data-parallel rank's part of a tensor of the global batch."""
        if not full.dim() or full.shape[0] % self._dp_size:
            return full
        return full.chunk(self._dp_size)[self._dp_rank]

    def _add(
        self,
        quantity: str,
        step: int,
        name: str,
        relative: float,
        ours: float,
        theirs: float,
        factor: float | None = None,
        digest: int = 0,
        box: Box | None = None,
    ) -> None:
        self.deviations.append(
            Deviation(
                quantity=quantity,
                step=step,
                name=name,
                rank=self._rank,
                relative=relative,
                ours=ours,
                theirs=theirs,
                factor=factor,
                digest=digest,
                box=((), ()) if box is None else (box.offsets, box.sizes),
            )
        )

"""Check of the first training steps and epochs: what they log must be the same on all ranks of a model replica."""

import math
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis
from lightning_megatron.optim.replica_check import bullet_list

NUM_CHECKED = 3
"""First steps, and first epochs, of a fit that are checked."""
_TOLERANCE = 1e-4


class FirstSteps(pl.Callback):
    """Warns, once, of logged values that differ over `replica`, the ranks that train one model together.

    Such a value is one of this rank's part of the model, for instance a norm over the parameters that it holds.
    """

    def __init__(self, replica: Axis) -> None:
        self._replica = replica
        self._num_steps = self._num_epochs = 0

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._replica.size == 1 or self._num_steps >= NUM_CHECKED:
            return
        self._num_steps += 1
        results: dict[str, Any] = {} if trainer._results is None else trainer._results
        self._compare({result.meta.name: float(result.value) for result in results.values() if result.is_tensor})

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        # What the end of an epoch logs comes after the last callback's hook there.
        self._check_epoch(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._check_epoch(trainer)

    def _check_epoch(self, trainer: pl.Trainer) -> None:
        if self._replica.size > 1 and self._num_epochs < NUM_CHECKED:
            self._num_epochs += 1
            metrics = trainer.callback_metrics.items()
            # A metric may have a value for each class.
            numbers = {name: one for name, one in metrics if isinstance(one, Tensor) and one.numel() == 1}
            self._compare({name: float(one) for name, one in numbers.items()})

    def _compare(self, own: dict[str, float]) -> None:
        if lines := differing_values(collectives.gather_objects(own, self._replica), self._replica.ranks):
            # Rank 0 may log nothing that differs: its replica stands for all.
            self._num_steps = self._num_epochs = NUM_CHECKED
            rank_zero_warn(
                f"logged values differ over the ranks that train one model together:\n{bullet_list(lines)}\n"
                "In a hook a rank sees only the weights and gradients that it holds. The full model's are given by "
                "grad_norm(self), weight_norm(self), clip_grad_norm_(self, max_norm) and named_gradients(self) of "
                "lightning_megatron. Log each name on all ranks, or what monitors it waits for ever. A time, or "
                "another value that is a rank's own, may differ",
                category=UserWarning,
            )


def differing_values(by_rank: list[dict[str, float]], ranks: tuple[int, ...]) -> list[str]:
    """Values that are not the same on all ranks, or only on some, one line each."""
    lines = []
    for name in dict.fromkeys(name for values in by_rank for name in values):
        values = {rank: own[name] for rank, own in zip(ranks, by_rank, strict=True) if name in own}
        if len(values) < len(ranks) or not all_close(list(values.values())):
            told = ", ".join(f"rank {rank}: {value:.6g}" for rank, value in sorted(values.items()))
            lines.append(f"{name} ({told}{', no other' if len(values) < len(ranks) else ''})")
    return lines


def all_close(values: list[float]) -> bool:
    """Whether numbers are the same but for rounding; NaN is the same as NaN."""
    first = values[0]
    return all(
        math.isclose(one, first, rel_tol=_TOLERANCE, abs_tol=1e-12) or (math.isnan(one) and math.isnan(first))
        for one in values
    )

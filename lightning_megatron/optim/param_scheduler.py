"""`ParamScheduler`: a torch scheduler of the learning rate and of the weight decay of an optimizer's groups."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_STATE = ("base_lrs", "last_epoch", "_step_count", "_last_lr")


class ParamScheduler(LRScheduler):
    """Scheduler that gives every group its own learning rate times a curve, stepped once per optimizer step.

    `rate` gives the factor after so many steps, and `weight_decay` the weight decay of all groups that have any when
    the scheduler is made. Curves are no part of its state: a run that resumes follows those that it is given.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rate: Callable[[int], float],
        weight_decay: Callable[[int], float] | None = None,
    ) -> None:
        self._rate, self._weight_decay = rate, weight_decay
        self._decayed = [group.get("weight_decay", 0) > 0 for group in optimizer.param_groups]
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """The learning rates of this step, by group."""
        factor = self._rate(self.last_epoch)
        return [rate * factor for rate in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        """Goes on by one step."""
        super().step(epoch)
        if self._weight_decay is None:
            return
        value = self._weight_decay(self.last_epoch)
        for group, is_decayed in zip(self.optimizer.param_groups, self._decayed, strict=True):
            if is_decayed:
                group["weight_decay"] = value

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, and the rates."""
        return {name: getattr(self, name) for name in _STATE}

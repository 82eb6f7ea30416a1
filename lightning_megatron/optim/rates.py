"""Learning-rate curves as pure functions of the step."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WarmupCosine:
    """Factor on the peak learning rate: linear warm-up, then half a cosine down to `minimum`.

    Called with the number of optimizer steps done, as torch.optim.lr_scheduler.LambdaLR does. Raises ValueError where
    the steps do not fit. Source: Loshchilov and Hutter, arXiv 1608.03983, equation 5.
    """

    warmup_steps: int
    """Steps of linear warm-up until the peak."""
    total_steps: int
    """Steps until the minimum is reached, warm-up included."""
    minimum: float = 0.1
    """Fraction of the peak learning rate at the end and after."""

    def __post_init__(self) -> None:
        faults = []
        if self.warmup_steps < 0:
            faults.append(f"warmup_steps ({self.warmup_steps}) must be at least 0")
        if self.total_steps <= self.warmup_steps:
            faults.append(
                f"total_steps ({self.total_steps}) must be above warmup_steps ({self.warmup_steps}); "
                f"train longer, or warm up for at most {max(0, self.total_steps - 1)} steps"
            )
        if not 0.0 <= self.minimum <= 1.0:
            faults.append(f"minimum ({self.minimum}) must be from 0 to 1; it is a fraction of the peak rate")
        if faults:
            raise ValueError("\n".join(faults))

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            # The first step trains too, so its rate is not 0.
            return (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return self.minimum + (1.0 - self.minimum) * 0.5 * (1.0 + math.cos(math.pi * progress))

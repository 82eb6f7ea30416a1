"""Learning-rate curves and weight-decay ramps as pure functions of the step, with the values of Megatron Core.

    warm-up               initial + (1 - initial) step / warmup_steps, up to and with that step
    constant              1
    linear                minimum + (1 - minimum) (1 - r)                 r = (step - warmup) / (total - warmup)
    cosine                minimum + (1 - minimum) (1 + cos(pi r)) / 2
    inverse-square-root   max(minimum, sqrt(warmup / step))
    WSD                   1, and in its last steps minimum + (1 - minimum) f(s), s from 0 to 1:
                          linear 1 - s; cosine (1 + cos(pi s)) / 2; exponential 2 / 2^s - 1; minus_sqrt 1 - sqrt(s)

After the last step all but the constant curve stay at the minimum. Sources: Loshchilov and Hutter, arXiv 1608.03983,
equation 5 (cosine); Vaswani et al., arXiv 1706.03762, equation 3 (inverse square root); Hu et al., arXiv 2404.06395,
section 4.2, and Haegele et al., arXiv 2405.18392, section 3 (warm-up, stable, decay); the ends of each piece are those
of Megatron Core's `OptimizerParamScheduler`.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
"""The curve of a learning rate after its warm-up, by Megatron's names."""

WsdDecayStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]
"""The curve of the last steps of a WSD (warm-up, stable, decay)."""

IncrStyle = Literal["constant", "linear", "cosine"]
"""The curve of a weight decay that rises."""


@dataclass(frozen=True, kw_only=True)
class RateCurve:
    """Factor on the peak learning rate: linear warm-up, then a curve down to `minimum`.

    Called with the number of optimizer steps done, as torch.optim.lr_scheduler.LambdaLR does. Raises ValueError where
    the steps do not fit.
    """

    total_steps: int
    """Steps until the minimum is reached, warm-up included."""
    warmup_steps: int = 0
    """Steps of linear warm-up until the peak."""
    initial: float = 0.0
    """Fraction of the peak learning rate in the first step of a warm-up."""
    minimum: float = 0.1
    """Fraction of the peak learning rate at the end and after; a constant curve has none."""
    decay_style: DecayStyle = "cosine"
    """Curve after the warm-up."""
    wsd_decay_style: WsdDecayStyle = "exponential"
    """Curve of the last steps of a WSD."""
    wsd_decay_steps: int = 0
    """Number of the last steps of a WSD."""

    def __post_init__(self) -> None:
        faults = []
        if self.decay_style not in get_args(DecayStyle):
            faults.append(f"decay_style ({self.decay_style!r}) must be one of {', '.join(get_args(DecayStyle))}")
        if self.wsd_decay_style not in get_args(WsdDecayStyle):
            names = ", ".join(get_args(WsdDecayStyle))
            faults.append(f"wsd_decay_style ({self.wsd_decay_style!r}) must be one of {names}")
        if self.warmup_steps < 0:
            faults.append(f"warmup_steps ({self.warmup_steps}) must be at least 0")
        if self.total_steps <= self.warmup_steps:
            faults.append(
                f"total_steps ({self.total_steps}) must be above warmup_steps ({self.warmup_steps}); "
                f"train longer, or warm up for at most {max(0, self.total_steps - 1)} steps"
            )
        for name, value in (("initial", self.initial), ("minimum", self.minimum)):
            if not 0.0 <= value <= 1.0:
                faults.append(f"{name} ({value}) must be from 0 to 1; it is a fraction of the peak rate")
        faults += self._wsd_faults()
        if faults:
            raise ValueError("\n".join(faults))

    def _wsd_faults(self) -> list[str]:
        if self.decay_style != "WSD":
            return [f"wsd_decay_steps ({self.wsd_decay_steps}) is of decay_style WSD"] if self.wsd_decay_steps else []
        most = self.total_steps - self.warmup_steps
        if 1 <= self.wsd_decay_steps <= most:
            return []
        return [f"wsd_decay_steps ({self.wsd_decay_steps}) must be from 1 to the {most} steps after the warm-up"]

    def __call__(self, step: int) -> float:
        if self.warmup_steps and step <= self.warmup_steps:
            return self.initial + (1.0 - self.initial) * step / self.warmup_steps
        if self.decay_style == "constant":
            return 1.0
        if step > self.total_steps:
            return self.minimum
        if self.decay_style == "inverse-square-root":
            return max(self.minimum, math.sqrt(max(self.warmup_steps, 1) / max(step, 1)))
        return self.minimum + (1.0 - self.minimum) * self._left(step)

    def _left(self, step: int) -> float:
        """The part of the way from the minimum to the peak that is left."""
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        if self.decay_style == "linear":
            return 1.0 - done
        if self.decay_style == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        decayed = max(0.0, (step - self.total_steps + self.wsd_decay_steps) / self.wsd_decay_steps)
        if self.wsd_decay_style == "linear":
            return 1.0 - decayed
        if self.wsd_decay_style == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * decayed))
        if self.wsd_decay_style == "exponential":
            return 2.0 * math.pow(0.5, decayed) - 1.0
        return 1.0 - math.sqrt(decayed)


@dataclass(frozen=True, kw_only=True)
class WeightDecayRamp:
    """The weight decay after so many optimizer steps. Raises ValueError with all errors."""

    start: float
    """Weight decay of the first step."""
    end: float
    """Weight decay of the last step, and after."""
    total_steps: int
    """Steps until the end is reached."""
    style: IncrStyle = "linear"
    """Curve between them; constant: there is none."""

    def __post_init__(self) -> None:
        faults = []
        if self.style not in get_args(IncrStyle):
            faults.append(f"style ({self.style!r}) must be one of {', '.join(get_args(IncrStyle))}")
        if not 0.0 <= self.start <= self.end < math.inf:
            faults.append(f"start ({self.start}) must be at least 0 and at most end ({self.end}), which is finite")
        if self.style == "constant" and self.start != self.end:
            faults.append(f"a constant weight decay cannot start at {self.start} and end at {self.end}")
        if self.total_steps < 1:
            faults.append(f"total_steps ({self.total_steps}) must be at least 1")
        if faults:
            raise ValueError("\n".join(faults))

    def __call__(self, step: int) -> float:
        if step > self.total_steps or self.style == "constant":
            return self.end
        done = step / self.total_steps
        risen = done if self.style == "linear" else 0.5 * (math.cos(math.pi * (1.0 - done)) + 1.0)
        return self.start + risen * (self.end - self.start)

"""The dynamic loss scale of float16, as a state machine of numbers.

The loss is multiplied before backward, gradients are divided before the step. Every rank keeps its own copy; they stay
equal because each `update` gets what all ranks found together.
"""

from typing import Any

from torch import Tensor

from lightning_megatron.optim.config import LossScaleConfig


class LossScale:
    """The loss scale of the current step; `update` makes that of the next."""

    def __init__(self, config: LossScaleConfig) -> None:
        self._config = config
        self.factor = config.initial
        # Steps in a row without Inf or NaN.
        self._good_steps = 0
        # Steps with Inf or NaN until the factor shrinks.
        self._bad_steps_left = config.hysteresis
        self.usual_weight: float | None = None
        """The loss weight (number of valid targets) of the first step; while that runs, what is expected of it."""
        self._is_expected = False

    @property
    def of_sums(self) -> float:
        """Scale of a loss that is a sum: `factor`, which is meant for means, over the usual loss weight of a step."""
        return self.factor / (self.usual_weight or 1.0)

    def expect_weight(self, weight: float) -> None:
        """Takes a loss weight for the usual one until the first step tells it. Without one the first gradients would be
        those of a sum: too large for float16, so that the first step is left out."""
        self.usual_weight, self._is_expected = max(1.0, weight), True

    def learn_weight(self, weight: Tensor) -> None:
        """Remembers the loss weight [] of the first step as the usual one. Later ones are not read, so that the scale
        changes by its rule alone and no device is waited for."""
        if self.usual_weight is None or self._is_expected:
            self.usual_weight, self._is_expected = max(1.0, weight.item()), False

    def update(self, *, found_nonfinite: bool) -> None:
        """Updates the scale by whether any rank found Inf or NaN in a gradient of the step."""
        config = self._config
        if found_nonfinite:
            self._good_steps = 0
            self._bad_steps_left -= 1
            if self._bad_steps_left <= 0:
                self.factor = max(self.factor * config.backoff_factor, config.minimum)
            return
        self._good_steps += 1
        if self._good_steps >= config.window:
            self._good_steps = 0
            self._bad_steps_left = config.hysteresis
            self.factor *= config.growth_factor

    def state_dict(self) -> dict[str, float | None]:
        """The state for a checkpoint, equal on every rank."""
        return {
            "factor": self.factor,
            "good_steps": self._good_steps,
            "bad_steps_left": self._bad_steps_left,
            "usual_weight": None if self._is_expected else self.usual_weight,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state that `state_dict` made."""
        self.factor = float(state["factor"])
        self._good_steps = int(state["good_steps"])
        self._bad_steps_left = int(state["bad_steps_left"])
        self.usual_weight = state["usual_weight"]

"""The dynamic loss scale of float16: what the next step's factor is, as a state machine of numbers.

The loss is multiplied before the backward, gradients are divided before the step. Every rank keeps its own copy; they
stay equal because each `update` is told what all ranks found together.
"""

from typing import Any

from torch import Tensor

from lightning_megatron.optim.config import LossScaleConfig


class LossScale:
    """The factor of the current step; `update` makes the next one."""

    def __init__(self, config: LossScaleConfig) -> None:
        self._config = config
        self.factor = config.initial
        # In a row.
        self._good_steps = 0
        # Until the factor shrinks.
        self._bad_steps_left = config.hysteresis
        # What the mean loss of the first step divided by.
        self._usual_weight: float | None = None

    @property
    def of_sums(self) -> float:
        """By which a sum of losses is multiplied, so that its gradients are about those of a mean times `factor`.

        The factor is meant for means: it is divided by what a step's mean usually divides by.
        """
        return self.factor / (self._usual_weight or 1.0)

    def learn_weight(self, weight: Tensor) -> None:
        """Takes in what the mean loss of a step divides by, []: of the first one, so that a scale changes by its rule
        alone. No other is waited for."""
        if self._usual_weight is None:
            self._usual_weight = max(1.0, weight.item())

    def update(self, *, found_nonfinite: bool) -> None:
        """Takes in whether any gradient of the step was Inf or NaN, on any rank."""
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
        """What a checkpoint keeps of it: the same on every rank."""
        return {
            "factor": self.factor,
            "good_steps": self._good_steps,
            "bad_steps_left": self._bad_steps_left,
            "usual_weight": self._usual_weight,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state that `state_dict` made."""
        self.factor = float(state["factor"])
        self._good_steps = int(state["good_steps"])
        self._bad_steps_left = int(state["bad_steps_left"])
        self._usual_weight = state["usual_weight"]

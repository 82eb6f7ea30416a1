"""Learning-rate schedulers that count steps, held back while a step is skipped."""

from collections.abc import Iterable

from lightning.pytorch.utilities.types import LRSchedulerConfig

# No interval of Lightning's: a scheduler that has it is not stepped.
_HELD = "held"


class SkippedStepSchedulers:
    """Schedulers held for one batch, with the intervals to restore."""

    def __init__(self) -> None:
        self._held: list[tuple[LRSchedulerConfig, str]] = []

    def hold(self, configs: Iterable[LRSchedulerConfig]) -> None:
        """Has Lightning pass over those that are stepped after each step, until `let_go`."""
        for config in configs:
            if config.interval == "step":
                self._held.append((config, config.interval))
                config.interval = _HELD

    def let_go(self) -> None:
        for config, interval in self._held:
            config.interval = interval
        self._held = []

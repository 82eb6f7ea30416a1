"""CPU and wall seconds of a training step on one rank, warm-up steps left out."""

import time


class StepClock:
    """Seconds of the timed steps, each as their mean; 0 before the last of them."""

    def __init__(self, warmup_steps: int, timed_steps: int) -> None:
        self.warmup_steps, self.timed_steps = warmup_steps, timed_steps
        self.steps = 0
        self.cpu_seconds = self.wall_seconds = 0.0

    def tick(self) -> None:
        """Notes the end of a step."""
        self.steps += 1
        if self.steps == self.warmup_steps:
            self.began = time.process_time(), time.perf_counter()
        elif self.steps == self.warmup_steps + self.timed_steps:
            self.cpu_seconds = (time.process_time() - self.began[0]) / self.timed_steps
            self.wall_seconds = (time.perf_counter() - self.began[1]) / self.timed_steps

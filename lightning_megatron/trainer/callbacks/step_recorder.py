"""`StepRecorder`: a step hook that notes when things begin and end, on the device's clock where there is one."""

from time import perf_counter
from typing import Any

import torch

from lightning_megatron.metrics.step_timeline import DATA, ActivitySpan
from lightning_megatron.pipeline.step_hooks import Activity


class StepRecorder:
    """Notes what one rank does; `batch` is which of the batches of a step it is at.

    On a GPU a moment is an event in the stream of the caller: when the device comes there, and not the host, which runs
    ahead. What the host alone does, waiting for data, is on the host's clock. The device is waited for at both ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.batch = 0
        self._begun: dict[Activity, Any] = {}
        self._noted: list[tuple[Activity, int, Any, Any]] = []
        # Origin of the device's clock: an event, and the host's clock at it.
        self._origin: tuple[Any, float] | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._origin = self._moment(), perf_counter()

    def begin(self, activity: Activity) -> None:
        self._begun[activity] = self._moment()

    def end(self, activity: Activity) -> None:
        """Records the end of an activity; does nothing where it has not begun."""
        if activity in self._begun:
            self._noted.append((activity, self.batch, self._begun.pop(activity), self._moment()))

    def add_data(self, start: float, end: float) -> None:
        """Records a wait for data, by the host's clock."""
        self._noted.append((DATA, self.batch, start, end))

    def end_batch(self) -> None:
        """Begins the next batch, and forgets what has begun and not ended."""
        self._begun.clear()
        self.batch += 1

    def spans(self, ahead_seconds: float) -> tuple[ActivitySpan, ...]:
        """Recorded spans, in order of their ends, on a clock set back by its offset. Waits for the device."""
        if self._origin is not None:
            torch.cuda.synchronize(self._device)
        return tuple(
            ActivitySpan(activity, batch, self._seconds(start) - ahead_seconds, self._seconds(end) - ahead_seconds)
            for activity, batch, start, end in self._noted
        )

    def _moment(self) -> Any:
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, moment: Any) -> float:
        """A moment in seconds on the host's clock."""
        if self._origin is None or isinstance(moment, float):
            return float(moment)
        event, host = self._origin
        return host + float(event.elapsed_time(moment)) / 1e3

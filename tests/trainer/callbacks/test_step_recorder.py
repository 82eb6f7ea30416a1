"""The recorder notes what it hears, batch by batch, on one clock."""

import pytest
import torch

from lightning_megatron.metrics.step_timeline import DATA, ActivitySpan
from lightning_megatron.pipeline.schedule import Action, Kind
from lightning_megatron.trainer.callbacks import step_recorder
from lightning_megatron.trainer.callbacks.step_recorder import StepRecorder

ACTION = Action(Kind.FORWARD, 0, 1)


def test_what_begins_and_ends_is_a_span_and_what_does_not_end_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter(range(10, 99))
    monkeypatch.setattr(step_recorder, "perf_counter", lambda: float(next(moments)))
    recorder = StepRecorder(torch.device("cpu"))
    recorder.add_data(8.0, 9.0)
    recorder.begin(ACTION)
    recorder.begin("optimizer")
    recorder.end("optimizer")
    recorder.end(ACTION)
    recorder.end("never begun")
    recorder.begin("never ended")
    recorder.end_batch()
    recorder.end("never ended")
    recorder.begin(ACTION)
    recorder.end(ACTION)
    assert recorder.spans(ahead_seconds=2.0) == (
        ActivitySpan(DATA, 0, 6.0, 7.0),
        ActivitySpan("optimizer", 0, 9.0, 10.0),
        ActivitySpan(ACTION, 0, 8.0, 11.0),
        ActivitySpan(ACTION, 1, 13.0, 14.0),
    )


@pytest.mark.gpu
def test_on_a_gpu_moments_are_those_of_the_device() -> None:
    device = torch.device("cuda")
    recorder = StepRecorder(device)
    matrix = torch.randn(4096, 4096, device=device)
    recorder.begin("short")
    recorder.end("short")
    recorder.begin("long")
    for _ in range(50):
        matrix = matrix @ matrix / 64
    recorder.end("long")
    short, long = recorder.spans(ahead_seconds=0.0)
    # The host starts products in microseconds; the device needs as long as 50 x 2 x 4096^3 FLOPs take.
    assert long.seconds > 10 * short.seconds and long.seconds > 50 * 2 * 4096**3 / 5e15
    assert long.start >= short.end

"""`StepTimeline`: one training step of every rank, what it did and when, and what its schedule predicts."""

import json
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_megatron.metrics.clocks import Meeting, Offset, offset_of
from lightning_megatron.metrics.figure import matplotlib_faults, write_figure
from lightning_megatron.metrics.schedule_figure import step_row
from lightning_megatron.metrics.step_timeline import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    ActivitySpan,
    RankSpans,
    bubble,
    chrome_trace,
    predicted,
    stage_costs,
    windows,
)
from lightning_megatron.metrics.timeline_figure import Panel, timeline_figure
from lightning_megatron.pipeline.schedule import Action
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.simulate import Costs
from lightning_megatron.planner.hardware import gpu_of_device
from lightning_megatron.planner.step_time import step_time
from lightning_megatron.trainer.callbacks.over_ranks import gathered, gathered_on_first, meet
from lightning_megatron.trainer.callbacks.plan_adapter import NotPlanned, Seen, planned_run, seen_by
from lightning_megatron.trainer.callbacks.step_recorder import StepRecorder
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.trainer.strategy import MegatronStrategy

_NUM_MEETINGS = 20
# Of a larger world the trace holds data-parallel rank 0 alone.
_MOST_RANKS = 512
# Without stages, so many ranks are drawn.
_MOST_ROWS = 16

Prediction = tuple[str, list[tuple[ActivitySpan, ...]]]
"""Its name, and the computes of each pipeline rank."""


@dataclass(frozen=True, kw_only=True)
class _RankPosition:
    """Position of this rank in the picture."""

    pp_rank: int
    stages: tuple[int, ...]
    is_shown: bool
    """Whether the picture shows this rank."""
    is_traced: bool
    """Whether the trace holds this rank."""


class StepTimeline(L.Callback):
    """Writes what every rank did in one training step: `step_N.json` for chrome://tracing or ui.perfetto.dev, and
    `step_N.svg`, measured above and predicted below to one scale; it needs the extra `plot`.

    `step` is which optimizer step of this run, from 1; the first ones warm up. With `accumulate_grad_batches` it has
    several batches. Files go into `folder` ("": where the Trainer logs), and a line with the step's and the schedule's
    time is printed.

    Measured are the actions of a schedule, the messages that a rank waits for, the sums of gradients, what gathers
    parameters, the optimizer and the wait for data. Without a schedule, and under other strategies, they are forward,
    backward and optimizer: sums that overlap a backward count as that. On a GPU moments are those of the device,
    which is waited for before and after the step. Ranks' clocks are aligned by meetings; the line says how well.

    Predicted is the schedule alone (`metrics.step_timeline`): from the measured costs and, on a GPU that the planner
    knows with a model that it knows, from its own. Where forwards overlap backwards nothing is predicted.
    """

    def __init__(self, step: int = 5, folder: str = "") -> None:
        """Raises ValueError for settings that make no sense.

        Args:
            step: Number of the optimizer step of the run that is recorded; the first is 1.
            folder: Folder of the trace and the picture; empty is where the Trainer logs.
        """
        if step < 1:
            raise ValueError(f"step ({step}) of StepTimeline must be at least 1, the first step of the run")
        self.step = step
        self.folder = folder
        # Of this run.
        self._num_steps = 0
        self._steps_before = 0
        # When the last batch ended; none where something else came after it.
        self._ended_seconds: float | None = None
        # While the step runs.
        self._recorder: StepRecorder | None = None
        self._hooks: list[RemovableHandle] = []

    def faults(self, trainer: L.Trainer) -> list[str]:
        """Errors that `MegatronStrategy` reports before a run."""
        faults = [f"StepTimeline draws the step, and {fault}" for fault in matplotlib_faults()]
        if self.folder and Path(self.folder).exists() and not Path(self.folder).is_dir():
            faults.append(
                f"folder ({self.folder}) of StepTimeline is a file; give a directory, which need not be there yet"
            )
        return faults

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Other strategies than ours do not ask for errors.
        if faults := self.faults(trainer):
            raise ConfigurationError(faults)
        self._num_steps, self._recorder, self._hooks = 0, None, []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._ended_seconds = perf_counter()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._steps_before = trainer.global_step
        if self._num_steps != self.step - 1:
            return
        now = perf_counter()
        if self._recorder is None:
            self._recorder = StepRecorder(trainer.strategy.root_device)
        if self._ended_seconds is not None:
            self._recorder.add_data(self._ended_seconds, now)
        if isinstance(trainer.strategy, MegatronStrategy):
            trainer.strategy.set_step_hook(self._recorder)
        self._recorder.begin(FORWARD)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor) -> None:
        if self._recorder is not None:
            self._recorder.end(FORWARD)
            self._recorder.begin(BACKWARD)

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._recorder is not None:
            self._recorder.end(BACKWARD)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        recorder = self._recorder
        if recorder is None or isinstance(trainer.strategy, MegatronStrategy):
            # MegatronStrategy records it itself.
            return
        recorder.begin(OPTIMIZER)
        self._hooks.append(optimizer.register_step_post_hook(lambda *_: recorder.end(OPTIMIZER)))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        has_stepped = trainer.global_step > self._steps_before
        if self._recorder is not None:
            self._recorder.end_batch()
            self._stop_listening(trainer)
            if has_stepped:
                self._write(trainer, batch, self._recorder)
                self._recorder = None
        self._num_steps += has_stepped
        self._ended_seconds = perf_counter()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._ended_seconds = None

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._ended_seconds = None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._num_steps < self.step:
            rank_zero_warn(
                f"StepTimeline wrote nothing: training ended after {self._num_steps} steps, before step={self.step}"
            )

    def _stop_listening(self, trainer: L.Trainer) -> None:
        if isinstance(trainer.strategy, MegatronStrategy):
            trainer.strategy.set_step_hook(None)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # --- what was recorded ------------------------------------------------------------------------------------------

    def _write(self, trainer: L.Trainer, batch: Any, recorder: StepRecorder) -> None:
        """Every rank calls it; the first one writes."""
        offset = _offset(trainer)
        position = _rank_position(trainer)
        own = None
        if position.is_traced:
            spans = _without_doubles(recorder.spans(offset.seconds))
            own = RankSpans(trainer.global_rank, position.pp_rank, position.stages, spans, position.is_shown)
        # On every rank: the Trainer's folder is the first rank's.
        folder = Path(self.folder or trainer.log_dir or trainer.default_root_dir)
        reports = gathered_on_first((own, offset, seen_by(trainer, batch)), trainer)
        if reports is None:
            return
        ranks = [rank for rank, *_ in reports if rank is not None]
        predictions = _predictions(trainer, ranks, [seen for *_, seen in reports])
        error_seconds = max(offset.error_seconds for _, offset, _ in reports)
        panels = _panels(ranks, predictions)
        title = f"step {self.step}: {_step_seconds(ranks):.4g} s, clocks within {error_seconds * 1e3:.2g} ms"
        summary = "; ".join([title, *(panel.heading for panel in panels)])
        about = {"summary": summary, "clock_error_seconds": error_seconds}
        trace = json.dumps(chrome_trace(ranks, predictions, about))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"step_{self.step}.json").write_text(trace, encoding="utf-8")
            write_figure(timeline_figure(panels, title=title), folder / f"step_{self.step}.svg")
        except OSError as error:
            # A long run does not end for its picture, and the other ranks are on their way.
            rank_zero_warn(f"the timeline of step {self.step} cannot be written to {folder}: {error}; {summary}")
            return
        trainer.print(f"{summary}; in {folder / f'step_{self.step}.json'} and .svg")


def _offset(trainer: L.Trainer) -> Offset:
    """How far this rank's clock is ahead of the first rank's."""
    meetings: list[Meeting] = []
    for _ in range(_NUM_MEETINGS):
        before = perf_counter()
        meet(trainer)
        meetings.append((before, perf_counter()))
    return offset_of(meetings, gathered(meetings, trainer)[0])


def _rank_position(trainer: L.Trainer) -> _RankPosition:
    strategy, rank = trainer.strategy, trainer.global_rank
    is_small = trainer.world_size <= _MOST_RANKS
    if not isinstance(strategy, MegatronStrategy):
        return _RankPosition(pp_rank=0, stages=(), is_shown=rank < _MOST_ROWS, is_traced=is_small or rank < _MOST_ROWS)
    mesh = strategy.mesh
    is_first = mesh.dp.rank == mesh.cp.rank == mesh.tp.rank == 0
    is_shown = rank < _MOST_ROWS if mesh.pp.size == 1 else is_first
    return _RankPosition(
        pp_rank=mesh.pp.rank,
        stages=tuple(mesh.own_stages),
        is_shown=is_shown,
        is_traced=is_small or is_shown or mesh.dp.rank == 0,
    )


def _without_doubles(spans: tuple[ActivitySpan, ...]) -> tuple[ActivitySpan, ...]:
    """Spans without Lightning's forward and backward, where the actions of a schedule give them in detail."""
    if not any(span.is_compute for span in spans):
        return spans
    return tuple(span for span in spans if span.activity not in (FORWARD, BACKWARD))


def _predictions(trainer: L.Trainer, ranks: list[RankSpans], seen: list[Seen]) -> list[Prediction]:
    # The prediction under the shown ranks comes from their own costs.
    shown = [rank for rank in ranks if rank.is_shown]
    schedules = _schedules(trainer.strategy, shown)
    if not schedules or schedules[0].is_overlapped:
        return []
    starts = [start for start, _ in windows([rank.spans for rank in shown])]
    measured = stage_costs(shown, schedules[0].pp * schedules[0].chunks)
    found = [("predicted from measured costs", predicted(schedules, measured, starts))]
    if (planned := _planned_costs(trainer, seen)) is not None:
        found.append(("predicted by the planner", predicted(schedules, planned, starts)))
    return found


def _schedules(strategy: Any, ranks: list[RankSpans]) -> list[Schedule]:
    """Schedule of each batch of the step, of as many microbatches as it had."""
    if not isinstance(strategy, MegatronStrategy):
        return []
    last: dict[int, int] = {}
    for span in (span for rank in ranks for span in rank.spans if span.is_compute):
        assert isinstance(span.activity, Action)
        last[span.batch] = max(last.get(span.batch, 0), span.activity.microbatch)
    sizes = strategy.sizes
    return [
        strategy.pipeline.schedule_of(pp=sizes.pp, vp=sizes.vp, microbatches=microbatch + 1)
        for _, microbatch in sorted(last.items())
    ]


def _planned_costs(trainer: L.Trainer, seen: list[Seen]) -> list[Costs] | None:
    """Costs of the planner by stage; None where it does not know this device, or this run."""
    device = trainer.strategy.root_device
    gpu = gpu_of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if gpu is None:
        return None
    try:
        run = planned_run(trainer, seen)
    except NotPlanned:
        return None
    if run.balanced is not None:
        # Its microbatches differ, and so do their times.
        return None
    time, sizes = step_time(run, gpu, gpu.constants), run.sizes
    costs = []
    for stage in range(sizes.num_stages):
        rank = sizes.pp_rank_of(stage)
        backward = time.backwards[rank] / sizes.vp
        costs.append(
            Costs(
                forward=time.forwards[rank] / sizes.vp,
                backward=backward,
                backward_input=backward / 2,
                backward_weight=backward / 2,
            )
        )
    return costs


def _step_seconds(ranks: list[RankSpans]) -> float:
    spans = [span for rank in ranks for span in rank.spans]
    return max(span.end for span in spans) - min(span.start for span in spans)


def _heading(name: str, by_rank: list[tuple[ActivitySpan, ...]]) -> str:
    lasting = sum(end - start for start, end in windows(by_rank))
    return f"{name}: schedule {lasting:.4g} s, bubble {bubble(by_rank):.1%}" if lasting else name


def _panels(ranks: list[RankSpans], predictions: list[Prediction]) -> list[Panel]:
    """What the shown ranks did and, below, what each prediction says of every pipeline rank."""
    shown = sorted((rank for rank in ranks if rank.is_shown), key=lambda rank: (rank.pp_rank, rank.rank))
    stages = {rank.pp_rank: rank.stages for rank in ranks}
    blocks = [("measured", [(f"rank {rank.rank}{_stages(rank)}", rank.spans, rank.stages) for rank in shown])]
    blocks += [
        (name, [(f"pipeline rank {pp_rank}", spans, stages[pp_rank]) for pp_rank, spans in enumerate(by_rank)])
        for name, by_rank in predictions
    ]
    begin = min(span.start for _, rows in blocks for _, spans, _ in rows for span in spans)
    return [
        Panel(
            heading=_heading(name, [spans for _, spans, _ in rows]),
            rows=[step_row(label, spans, own, begin=begin) for label, spans, own in rows],
            unit="milliseconds",
            idle="nothing",
        )
        for name, rows in blocks
    ]


def _stages(rank: RankSpans) -> str:
    return f", stage {' '.join(map(str, rank.stages))}" if rank.stages else ""

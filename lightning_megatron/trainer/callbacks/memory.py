"""`MemoryMonitor`: peak memory of the ranks in each phase of training, compared with the planner's estimate."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning as L
from torch.optim import Optimizer

from lightning_megatron.planner.hardware import GIGA
from lightning_megatron.planner.measured import measured_rank
from lightning_megatron.planner.memory import WORKSPACE_BYTES
from lightning_megatron.trainer.callbacks.memory_meter import Meter, meter_of
from lightning_megatron.trainer.callbacks.over_ranks import gathered
from lightning_megatron.trainer.callbacks.plan_adapter import NotPlanned, Seen, planned_run, seen_by
from lightning_megatron.trainer.step.held_memory import gradients_of, held_bytes, storage_bytes
from lightning_megatron.trainer.strategy import MegatronStrategy

_PHASES = ("setup", "forward_backward", "optimizer", "evaluation", "checkpoint")
_BETWEEN = ""
# Kinds that are held from step to step; what else there is at the peak is the rest.
_HELD = ("weights", "gradients", "master_weights", "moments")
_REST = "activations and the rest"


@dataclass(frozen=True, kw_only=True)
class _Held:
    """Measurement of one rank."""

    pp_rank: int
    peaks: Mapping[str, int]
    """Bytes by phase."""
    reserved_bytes: int
    before_bytes: int
    """Memory of the process before there was a model."""
    kinds: Mapping[str, int]
    """Bytes of what is held from step to step; empty but for the table."""
    seen: Seen

    @property
    def peak_bytes(self) -> int:
        return max(self.peaks.values(), default=0)


class MemoryMonitor(L.Callback):
    """Logs, every `log_every_n_steps`, the most memory that any rank held in each phase since the last log; the same
    numbers on every rank, in 1e9 bytes.

        memory/setup_allocated_gb             until training starts: building the model, loading
        memory/forward_backward_allocated_gb
        memory/optimizer_allocated_gb         from the end of the backward: sums, clipping, the step
        memory/evaluation_allocated_gb
        memory/checkpoint_allocated_gb        from the start of a save to the next batch
        memory/fullest_rank                   which rank held the most
        memory/reserved_gb                    the most that an allocator took, on GPUs
        memory/planned_gb                     the planner's estimate of the fullest rank's `allocated`

    Without a GPU it is `resident` instead of `allocated`: all pages of the process, Python's and torch's too; or
    `resident_so_far`, the most since the process began, where the system does not let the peak be reset.

    After `print_after_steps` optimizer steps (0: never) it prints a table of the fullest rank, by kind, planned and
    measured, or the reason why there is no plan. Weights, gradients, master weights and moments are counted tensor by
    tensor; the rest is the difference to the peak. Without a GPU the peak does not count what the process held before
    there was a model.
    """

    def __init__(self, print_after_steps: int = 2) -> None:
        """Raises ValueError for settings that make no sense.

        Args:
            print_after_steps: Optimizer steps of the run after which the table is printed; 0 prints none.
        """
        if print_after_steps < 0:
            raise ValueError(f"print_after_steps ({print_after_steps}) of MemoryMonitor must be at least 0; 0 is never")
        self.print_after_steps = print_after_steps
        self._meter: Meter | None = None
        self._phase = _BETWEEN
        # Bytes by phase, since they were logged.
        self._peaks: dict[str, int] = {}
        self._reserved_bytes = 0
        self._before_bytes = 0
        # Counts of this run.
        self._num_steps = 0
        self._steps_before = 0
        self._gradient_bytes = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._meter = meter_of(trainer.strategy.root_device)
        self._peaks, self._num_steps, self._gradient_bytes = {}, 0, 0
        self._enter("setup")
        built = sum(storage_bytes(pl_module.parameters()).values())
        self._before_bytes = 0 if self._meter.name == "allocated" else self._meter.peak_bytes() - built

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._steps_before = trainer.global_step
        self._enter("forward_backward")

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if self._is_table_due:
            gradients = gradients_of(pl_module, trainer.optimizers)
            self._gradient_bytes = sum(storage_bytes(gradients).values())
        self._enter("optimizer")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._enter(_BETWEEN)
        if trainer.global_step == self._steps_before:
            return
        is_table_due = self._is_table_due
        self._num_steps += 1
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        # Lightning counts so for its loggers.
        is_log_due = every > 0 and (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % every == 0
        if is_table_due or is_log_due:
            ranks = gathered(self._held(trainer, batch, is_table_due=is_table_due), trainer)
            planned = _Planned(trainer, ranks)
            if is_table_due and trainer.is_global_zero:
                assert self._meter is not None
                trainer.print(_table(ranks, planned, self._meter.name))
            if is_log_due:
                self._log(pl_module, ranks, planned)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._enter("evaluation")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._enter(_BETWEEN)

    on_train_start = on_validation_end

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._enter("checkpoint")

    @property
    def _is_table_due(self) -> bool:
        """Whether the step that runs is that of the table."""
        return self._num_steps + 1 == self.print_after_steps

    def _enter(self, phase: str) -> None:
        """Ends a phase and begins another one; nothing outside of a fit."""
        if self._meter is None:
            return
        if self._phase != _BETWEEN:
            self._peaks[self._phase] = max(self._peaks.get(self._phase, 0), self._meter.peak_bytes())
        self._reserved_bytes = max(self._reserved_bytes, self._meter.reserved_bytes())
        self._phase = phase
        self._meter.reset()

    def _held(self, trainer: L.Trainer, batch: Any, *, is_table_due: bool) -> _Held:
        strategy = trainer.strategy
        return _Held(
            pp_rank=strategy.mesh.pp.rank if isinstance(strategy, MegatronStrategy) else 0,
            peaks=dict(self._peaks),
            reserved_bytes=self._reserved_bytes,
            before_bytes=self._before_bytes,
            kinds=held_bytes(trainer.lightning_module, trainer.optimizers, self._gradient_bytes)
            if is_table_due
            else {},
            seen=seen_by(trainer, batch),
        )

    def _log(self, module: L.LightningModule, ranks: list[_Held], planned: "_Planned") -> None:
        assert self._meter is not None
        numbers = {
            f"memory/{phase}_{self._meter.name}_gb": max(rank.peaks.get(phase, 0) for rank in ranks) / GIGA
            for phase in _PHASES
            if any(phase in rank.peaks for rank in ranks)
        }
        numbers["memory/fullest_rank"] = float(_fullest(ranks))
        if self._meter.name == "allocated":
            numbers["memory/reserved_gb"] = max(rank.reserved_bytes for rank in ranks) / GIGA
        if planned.kinds:
            numbers["memory/planned_gb"] = sum(planned.kinds.values()) / GIGA
        module.log_dict(numbers)
        self._peaks, self._reserved_bytes = {}, 0


class _Planned:
    """Memory plan of the fullest rank and its batch, bytes by kind, or the reason why there is none."""

    def __init__(self, trainer: L.Trainer, ranks: list[_Held]) -> None:
        self.kinds: dict[str, float] = {}
        # Outside of the allocator, on a GPU.
        self.overhead_bytes = 0.0
        self.why_not = ""
        try:
            run = planned_run(trainer, [rank.seen for rank in ranks], rank=_fullest(ranks))
        except NotPlanned as error:
            self.why_not = str(error)
            return
        memory = measured_rank(run, ranks[_fullest(ranks)].pp_rank)
        self.kinds = {kind: memory.by_kind()[kind] for kind in _HELD}
        self.kinds[_REST] = memory.activations + memory.buffers
        if trainer.strategy.root_device.type == "cuda":
            self.overhead_bytes = memory.overhead
        else:
            # The workspace is that of a GPU's libraries, and the host is the device.
            self.kinds[_REST] += memory.host - WORKSPACE_BYTES


def _fullest(ranks: list[_Held]) -> int:
    return max(range(len(ranks)), key=lambda rank: ranks[rank].peak_bytes)


def _table(ranks: list[_Held], planned: _Planned, meter: str) -> str:
    number = _fullest(ranks)
    rank = ranks[number]
    peak = max(rank.peaks.get(phase, 0) for phase in ("forward_backward", "optimizer")) - rank.before_bytes
    measured = {**rank.kinds, _REST: peak - sum(rank.kinds.values())}
    plan, found = dict(planned.kinds), dict(measured)
    plan["sum"], found["sum"] = sum(plan.values()), peak
    if meter == "allocated":
        plan["reserved beyond"], found["reserved beyond"] = planned.overhead_bytes, rank.reserved_bytes - peak
    lines = [f"Memory of rank {number} of {len(ranks)} at the peak of a step, GB ({meter}):"]
    lines.append(f"{'':<26}{'plan':>10}{'measured':>10}")
    for kind, value in found.items():
        plan_text = f"{plan[kind] / GIGA:10.4g}" if planned.kinds else f"{'-':>10}"
        lines.append(f"{kind.replace('_', ' '):<26}{plan_text}{value / GIGA:10.4g}")
    if planned.why_not:
        lines.append(f"no plan: {planned.why_not}")
    phases = [
        f"{phase.replace('_', ' and ')} {rank.peaks[phase] / GIGA:.4g}" for phase in _PHASES if phase in rank.peaks
    ]
    return "\n".join([*lines, f"by phase, {meter}: {', '.join(phases)}"])

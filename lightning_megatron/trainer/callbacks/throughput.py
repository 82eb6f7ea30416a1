"""Tokens and FLOPs per second of training, of the whole global batch, in the progress bar and the logger."""

from time import get_clock_info, perf_counter
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch

from lightning_megatron.mesh import Sizes
from lightning_megatron.metrics.throughput import Speed, peak_flops
from lightning_megatron.trainer.callbacks.over_ranks import gathered
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.trainer.strategy import MegatronStrategy
from lightning_megatron.transformer.recompute import RecomputeConfig

_KEEPS_ALL = RecomputeConfig()


@runtime_checkable
class MeasuredModule(Protocol):
    """A module that says how many tokens a training step on a batch trains on."""

    def batch_tokens(self, batch: Any) -> int: ...


@runtime_checkable
class CountingModule(Protocol):
    """A module that says how much work a training step on a batch is."""

    def batch_flops(self, batch: Any) -> float: ...


@runtime_checkable
class RecomputingModule(Protocol):
    """A module that says how much of that work a backward recomputes."""

    def batch_recomputed_flops(self, batch: Any, recompute: RecomputeConfig, sizes: Sizes) -> float: ...


class ThroughputMonitor(L.Callback):
    """Logs how fast training is, over the last few batches; the same on every rank.

        tokens/s         of all data-parallel ranks together; model-parallel ranks work on the same tokens
        TFLOP/s/device   model FLOPs, in the mean over devices, where the module has `batch_flops`
        MFU, HFU         then shares of the devices' peak, where known, by the conventions of `metrics.throughput`;
                         HFU where the module has `batch_recomputed_flops`, as those of `lightning_modules`
        data_wait_s      seconds a batch, from the end of the batch before to its start, of the rank that waited the
                         longest: the loader, the way to the device, loggers

    Data loading counts; validation, saving, and the first batch of a run (which allocates and warms up) do not.
    """

    def __init__(self, every_n_batches: int = 10, device_peak_flops: float = 0.0) -> None:
        """Raises ValueError for settings that make no sense.

        Args:
            every_n_batches: Batches between two logs, over which throughput is the mean.
            device_peak_flops: Peak of one device in FLOP/s at the precision of the run; 0 looks it up by the device's
                name.
        """
        if every_n_batches < 1:
            raise ValueError(f"every_n_batches ({every_n_batches}) must be at least 1")
        if device_peak_flops < 0:
            raise ValueError(f"device_peak_flops ({device_peak_flops}) must be at least 0; 0 looks it up")
        self.every_n_batches = every_n_batches
        self.device_peak_flops = device_peak_flops
        self._peak_flops = 0.0
        self._recompute = _KEEPS_ALL
        self._sizes = Sizes()
        self._is_warm = False
        # When the clock started; none while it stands still.
        self._started_seconds: float | None = None
        # When the last batch ended; none where something else came after it.
        self._ended_seconds: float | None = None
        self._begin_span()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not isinstance(pl_module, MeasuredModule):
            raise ConfigurationError(
                f"ThroughputMonitor cannot measure {type(pl_module).__name__}; give it the method "
                "batch_tokens(batch), and for its FLOPs batch_flops(batch), or leave the callback out"
            )
        device, strategy = trainer.strategy.root_device, trainer.strategy
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self._peak_flops = self.device_peak_flops or peak_flops(name, str(trainer.precision))
        if isinstance(strategy, MegatronStrategy):
            self._recompute, self._sizes = strategy.recompute, strategy.sizes
        self._is_warm, self._started_seconds, self._ended_seconds = False, None, None
        self._begin_span()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._is_warm and self._started_seconds is None:
            self._started_seconds = _now(trainer)
        elif self._ended_seconds is not None:
            self._waits.append(perf_counter() - self._ended_seconds)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._started_seconds is None:
            self._is_warm = True
            return
        self._count(pl_module, batch)
        if self._num_batches == self.every_n_batches:
            for name, value in self._measured(trainer).items():
                pl_module.log(name, value, prog_bar=name not in ("HFU", "data_wait_s"))
            self._begin_span()
            self._started_seconds = perf_counter()
        self._ended_seconds = perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop_clock(trainer)

    on_validation_start = on_train_epoch_end

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._stop_clock(trainer)

    def _begin_span(self) -> None:
        self._seconds = 0.0
        self._num_batches = 0
        self._num_tokens = 0
        self._num_flops = 0.0
        self._num_recomputed_flops = 0.0
        self._waits: list[float] = []

    def _count(self, module: L.LightningModule, batch: Any) -> None:
        assert isinstance(module, MeasuredModule)
        self._num_batches += 1
        self._num_tokens += module.batch_tokens(batch)
        if isinstance(module, CountingModule):
            self._num_flops += module.batch_flops(batch)
        if self._peak_flops and isinstance(module, RecomputingModule):
            self._num_recomputed_flops += module.batch_recomputed_flops(batch, self._recompute, self._sizes)

    def _measured(self, trainer: L.Trainer) -> dict[str, float]:
        """The numbers of the span that ends."""
        self._stop_clock(trainer)
        # Clocks and batches differ between ranks; what is logged must not. That of a virtual machine may stand still.
        seconds = max(trainer.strategy.broadcast(self._seconds), get_clock_info("perf_counter").resolution)
        own = torch.tensor(
            [self._num_tokens, self._num_flops, self._num_recomputed_flops],
            dtype=torch.float64,
            device=trainer.strategy.root_device,
        )
        num_tokens, num_flops, num_recomputed = trainer.strategy.reduce(own, reduce_op="sum").tolist()
        speed = Speed(round(num_tokens), num_flops, seconds, trainer.world_size, num_recomputed)
        numbers = {"tokens/s": float(round(speed.tokens_per_second))}
        if isinstance(trainer.lightning_module, CountingModule):
            numbers["TFLOP/s/device"] = speed.tflops_per_device
            if self._peak_flops:
                numbers["MFU"] = speed.mfu(self._peak_flops)
            if self._peak_flops and isinstance(trainer.lightning_module, RecomputingModule):
                numbers["HFU"] = speed.hfu(self._peak_flops)
        if waits := self._waits:
            numbers["data_wait_s"] = max(gathered(sum(waits) / len(waits), trainer))
        return numbers

    def _stop_clock(self, trainer: L.Trainer) -> None:
        """Adds up the seconds so far; the next batch restarts the clock."""
        if self._started_seconds is not None:
            self._seconds += _now(trainer) - self._started_seconds
            self._started_seconds = None
        self._ended_seconds = None


def _now(trainer: L.Trainer) -> float:
    """The time when the device is done: kernels run asynchronously."""
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize(trainer.strategy.root_device)
    return perf_counter()

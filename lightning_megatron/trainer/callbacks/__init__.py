"""Callbacks that know the mesh: they are right on any layout, and under other strategies too."""

from lightning_megatron.trainer.callbacks.experts import ExpertMonitor
from lightning_megatron.trainer.callbacks.memory import MemoryMonitor
from lightning_megatron.trainer.callbacks.step_timeline import StepTimeline
from lightning_megatron.trainer.callbacks.throughput import ThroughputMonitor

__all__ = ["ExpertMonitor", "MemoryMonitor", "StepTimeline", "ThroughputMonitor"]

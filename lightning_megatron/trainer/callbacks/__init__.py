"""Callbacks that know the mesh: they are right on any layout, and under other strategies too."""

from lightning_megatron.trainer.callbacks.experts import ExpertMonitor
from lightning_megatron.trainer.callbacks.throughput import Throughput

__all__ = ["ExpertMonitor", "Throughput"]

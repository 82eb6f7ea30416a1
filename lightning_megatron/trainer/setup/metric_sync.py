"""Metrics and batch norms of the user's module communicate over data-parallel ranks only."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_megatron.mesh import Axis


def sync_batch_norms_over(module: nn.Module, dp: Axis) -> None:
    """Lets synchronised batch norms reduce over dp only: stages run different numbers of them."""
    for norm in (child for child in module.modules() if isinstance(child, nn.SyncBatchNorm)):
        norm.process_group = dp.group


def sync_metrics_over(module: nn.Module, dp: Axis) -> list[Metric]:
    """Lets torchmetrics sync over dp only: model-parallel ranks count the same samples.

    Returns the metrics that it changed; those whose user chose a group or a function stay as they are.
    """
    changed = []
    for metric in (child for child in module.modules() if isinstance(child, Metric)):
        if metric.process_group is None and metric.dist_sync_fn is None:
            metric.dist_sync_fn = partial(_gather_over, dp)
            if dp.size == 1 and metric.distributed_available_fn is jit_distributed_available:
                # Even a sync of one turns list states into tensors, which `compute` does not see on one device.
                metric.distributed_available_fn = _is_never_distributed
            changed.append(metric)
    return changed


def is_synced_over(metric: Metric) -> bool:
    """Whether a metric synchronizes as `sync_metrics_over` has it do, and not as its user does."""
    return isinstance(metric.dist_sync_fn, partial) and metric.dist_sync_fn.func is _gather_over


def restore_metrics(metrics: list[Metric]) -> None:
    """Undoes `sync_metrics_over`, so that the next Trainer finds the metrics as the user made them."""
    for metric in metrics:
        metric.dist_sync_fn = None
        if metric.distributed_available_fn is _is_never_distributed:
            metric.distributed_available_fn = jit_distributed_available


def _is_never_distributed() -> bool:
    return False


def _gather_over(dp: Axis, result: Tensor, group: Any = None) -> list[Tensor]:
    return [result] if dp.size == 1 else gather_all_tensors(result, dp.group)

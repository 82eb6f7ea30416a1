"""Tasks of lm-eval, run by itself on a folder that transformers loads: the door to `lm_eval`."""

import argparse
from typing import Any

from lightning_megatron.cli.usage import UsageError


def task_results(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The metrics of each task, by lm-eval's names. Raises UsageError where it is not installed, or knows none."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UsageError(
            [f"--tasks ({options.tasks}) need the package 'lm_eval' ({error}): pip install 'lm-eval[hf]'"]
        ) from error
    names = [name.strip() for name in options.tasks.split(",") if name.strip()]
    manager = TaskManager(include_path=options.task_path)
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise UsageError([f"--tasks: lm-eval has no {', '.join(unknown)}; lm-eval ls tasks lists them"])
    found = simple_evaluate(
        model="hf",
        model_args={"pretrained": options.model, "device": _device_of(options.accelerator)},
        tasks=names,
        num_fewshot=options.num_fewshot,
        batch_size=options.batch_size,
        limit=options.limit,
        task_manager=manager,
    )
    return {task: _numbers(metrics) for task, metrics in found["results"].items()}


def _device_of(accelerator: str) -> str:
    import torch

    return "cpu" if accelerator == "cpu" or not torch.cuda.is_available() else "cuda"


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The numbers among the metrics, whose names end in that of a filter; beside them stand words and counts."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in metrics.items()
        if "," in name and isinstance(value, int | float)
    }

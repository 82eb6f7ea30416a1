"""Cost model of documents under dynamic context parallelism, from planned instead of measured times.

It comes before the balancing of a batch: packs of documents are timed on every group size, as the strategy times a
layer before its first step, and the balancer's formula is fitted to them.
"""

from collections.abc import Iterator

from lightning_megatron.context.balance import CostModel, Measurement, fit
from lightning_megatron.planner.balanced_runs import of_documents
from lightning_megatron.planner.constants import Constants
from lightning_megatron.planner.hardware import Gpu
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.step_time import step_time

# Packs fill these shares of a rank's tokens, with these numbers of documents.
_FILLS = (0.25, 0.5, 1.0)
_NUM_DOCUMENTS = (1, 4)


def planned_cost(run: Run, max_tokens_per_rank: int, gpu: Gpu, constants: Constants) -> CostModel:
    """Cost model of a microbatch on the slowest pipeline rank, for the run's group sizes."""
    measurements = []
    for size, lengths in _packs(run.sizes.context_groups, max_tokens_per_rank):
        time = step_time(of_documents(run, lengths, size), gpu, constants)
        seconds = max(map(sum, zip(time.forwards, time.backwards, strict=True)))
        measurements.append(Measurement(sum(lengths), sum(length**2 for length in lengths), size, seconds))
    return fit(measurements, ranks_per_node=max(gpu.gpus_per_node // run.sizes.tp, 1))


def _packs(sizes: tuple[int, ...], most_tokens: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Group sizes and the lengths of the documents that each group runs."""
    for size in sizes:
        for fill in _FILLS:
            for number in _NUM_DOCUMENTS:
                yield size, (max(int(fill * most_tokens) * size // number, 1),) * number

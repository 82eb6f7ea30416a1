"""The work of an optimizer's step that is expected of a run before any rank is measured."""

from functools import lru_cache

import torch
from torch.optim import Optimizer

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.planner.dry_rank import build_model, in_prefix
from lightning_megatron.planner.memory_tracker import MemoryTracker
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.step_work import PLAIN_ADAMW, StepWork, states_of, step_work

_META = torch.device("meta")


def expected_step(run: Run) -> StepWork:
    """The work of a step of the run's optimizer on one rank that has all of the model in float32."""
    if run.make_optimizer == PLAIN_ADAMW:
        return StepWork()
    return _measured(
        Run(
            model=run.model,
            # No batch runs: runs that differ in their documents alone share what is measured.
            lengths=SequenceLengths(sequence=1),
            sizes=Sizes(),
            global_batch_size=1,
            precision="32-true",
            trained=run.trained,
            make_optimizer=run.make_optimizer,
        )
    )


@lru_cache(maxsize=16)
def _measured(run: Run) -> StepWork:
    with MemoryTracker(_META) as tracker:
        own = in_prefix(build_model(run, Mesh.single(), _META))
        return step_of(run.make_optimizer(own), tracker)


def step_of(optimizer: Optimizer, tracker: MemoryTracker) -> StepWork:
    """The work of the first step of an optimizer that has whole weights, tracked."""
    stepped = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    for one in stepped:
        one.grad = torch.empty_like(one)
    tracker.take_flops()
    optimizer.step()
    return step_work(states_of(optimizer), sum(one.numel() for one in stepped), tracker.take_flops().total())

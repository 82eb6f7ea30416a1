"""A training step of a model under a schedule, on ranks that are threads."""

from typing import Any

import torch
from torch import Tensor

from lightning_megatron.comm.p2p import Mailbox, build_lanes
from lightning_megatron.mesh import Mesh
from lightning_megatron.pipeline.lower import hops
from lightning_megatron.pipeline.module import PipelineModule
from lightning_megatron.pipeline.plans import training_plan
from lightning_megatron.pipeline.runtime import Runtime
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.scheduled import ScheduledCall
from lightning_megatron.tensor.weight_gradients import WeightGradients, share
from tests.harness.threads import new_group


def mailbox_of(mesh: Mesh) -> Mailbox:
    """This thread's mailbox, with lanes between all neighbouring stages."""
    ranks = tuple(mesh.sizes.pp_rank_of(stage) for stage in range(mesh.sizes.num_stages))
    return Mailbox(mesh.pp, build_lanes(mesh.pp, hops(ranks), new_group, new_group), torch.device("cpu"))


def run_step(
    model: PipelineModule, schedule: Schedule, batch: dict[str, Any], total: Tensor, mailbox: Mailbox
) -> float:
    """What this rank adds to the loss of a batch whose targets weigh `total`, in microbatches of two rows; gradients
    are left at the parameters."""
    gradients = WeightGradients()
    share(model, gradients)
    losses: list[float] = []

    def enter(microbatch: int) -> Tensor:
        rows = slice(2 * microbatch, 2 * microbatch + 2)
        loss = model(**{name: value[rows] for name, value in batch.items()})
        assert model.loss_weight is not None
        losses.append((loss * model.loss_weight / total).item())
        return loss * model.loss_weight / total  # type: ignore[no-any-return]

    starts = [2 * m for m in range(schedule.microbatches)]
    call = ScheduledCall([model], model.mesh, enter, lambda loss: loss.backward(), starts, gradients.opened)
    model.driver = call
    Runtime(model.mesh.pp, mailbox).run(training_plan(schedule), call)
    return sum(losses)


def summed(by_stage: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Gradients of the unsplit model from those of its stages: what several hold is tied, and each adds its part."""
    found: dict[str, Tensor] = {}
    for grads in by_stage:
        for name, grad in grads.items():
            found[name] = found[name] + grad if name in found else grad
    return found

"""Any module under any schedule: losses, gradients, metrics and weights of one device, and names of its own choice.

Each schedule runs one of the modules, and each module runs under one of the schedules; all meet under `pytest --whole`.
"""

import os
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from lightning_megatron.mesh import StageLayout
from lightning_megatron.pipeline.module import Part, PipelineModule
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import WHOLE
from tests.trainer import modules
from tests.trainer.fits import Case, Trace, difference
from tests.trainer.layouts import PLAIN, Layout

LAYOUTS = {
    "vp2 pp2": Layout(world=2, pp=2, vp=2, microbatches=4),
    "vp3 pp2": Layout(world=2, pp=2, vp=3, microbatches=2),
    "vp2 pp2 dp2": Layout(world=4, pp=2, vp=2, microbatches=2),
    "zb_h1": Layout(world=2, pp=2, schedule="zb_h1", microbatches=4),
    "zb_v": Layout(world=2, pp=2, vp=2, schedule="zb_v", microbatches=4),
    "dualpipe_v": Layout(world=2, pp=2, vp=2, schedule="dualpipe_v", microbatches=4),
    "gpipe vp2": Layout(world=2, pp=2, vp=2, schedule="gpipe", microbatches=4),
    "an empty stage": Layout(world=2, pp=2, vp=2, microbatches=4, stages=StageLayout(text="t*3||t*3|t")),
    "counts": Layout(world=2, pp=2, microbatches=4, stages=StageLayout(num_layers_in_first_stage=5)),
}


class SeenEarly(modules.Small):
    """Logs and measures before the model call, which a rank with several stages comes to several times."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torchmetrics.SumMetric()
        self.mean = torchmetrics.MeanMetric()
        self.seen = torchmetrics.CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, classes, _ = batch
        self.rows.update(torch.tensor(float(len(inputs))))
        self.seen.update(classes.float())
        self.log("early_rows", float(len(inputs)), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("rows", self.rows, on_step=False, on_epoch=True)
        losses = nn.functional.cross_entropy(self.logits(inputs), classes, reduction="none")
        self.mean.update(losses)
        self.seen.update(classes.float() + 0.5)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("train_loss", losses.mean(), on_step=True, on_epoch=True)
        return losses.mean()

    def on_train_epoch_end(self) -> None:
        # The order of a list differs with the dp ranks; what is in it does not.
        seen = self.seen.compute()
        self.log("seen", seen.double().square().sum() + 1000.0 * len(seen), sync_dist=True)
        self.seen.reset()


class TenLines(PipelineModule):
    """A user's model of named parts, between which a dict travels."""

    def __init__(self) -> None:
        super().__init__([Part(name=f"blocks.{i}", build=lambda: nn.Linear(8, 8)) for i in range(7)])

    def prepare(self, hidden: Tensor) -> tuple[Any, None]:
        return {"hidden": hidden, "first": hidden}, None

    def run_part(self, name: str, hidden: Any, context: None) -> Any:
        state = torch.tanh(self.get_submodule(name)(hidden["hidden"]) + hidden["first"])
        return state if name == self.part_names[-1] else {**hidden, "hidden": state}


class Named(modules.Small):
    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "net"):
            self.net = TenLines()
            with torch.no_grad():
                for name, parameter in self.net.named_parameters():
                    generator = torch.Generator().manual_seed(sum(map(ord, name)))
                    parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.3)


# Two batches of 8, and one of 3 that is smaller than 4 microbatches, and cut unevenly into 2.
NUM_ROWS = 19
CASES = {
    "plain layers around": Case(module=modules.Small, num_rows=NUM_ROWS),
    "a pipeline of the user's": Case(module=modules.OwnPipeline, num_rows=NUM_ROWS),
    "a shared embedding": Case(module=modules.Embedded, num_rows=NUM_ROWS),
    "weighted": Case(module=modules.Weighted, num_rows=NUM_ROWS),
    "measured": Case(module=modules.Measured, num_rows=NUM_ROWS),
    "seen early": Case(module=SeenEarly, num_rows=NUM_ROWS),
    "a dict between parts": Case(module=Named, num_rows=NUM_ROWS),
    "accumulated and clipped": Case(
        module=modules.Small, num_rows=NUM_ROWS, trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    ),
}


def cases_of(name: str) -> list[str]:
    """What runs under this schedule: everything, or in a sample the case at its place in the list."""
    if WHOLE in os.environ:
        return list(CASES)
    return [list(CASES)[list(LAYOUTS).index(name) % len(CASES)]]


def traces(layout: Layout, cases: list[str]) -> dict[str, Trace]:
    return {name: CASES[name].run(layout) for name in cases}


@pytest.fixture(scope="module")
def wanted() -> dict[str, Trace]:
    [found] = run_on_ranks(1, traces, PLAIN, list(CASES), init=False)
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_every_schedule_trains_every_module_as_one_device_does(name: str, wanted: dict[str, Trace]) -> None:
    layout, cases = LAYOUTS[name], cases_of(name)
    held: set[str] = set()
    for rank, found in enumerate(run_on_ranks(layout.world, traces, layout, cases, init=False, timeout=120)):
        for case, trace in found.items():
            # Metrics count in float32; all else is in float64.
            tolerance = 1e-5 if case in ("measured", "seen early") else 1e-10
            assert difference(trace, wanted[case]) < tolerance, (rank, case)
            held |= {f"{case}: {weight}" for weight in trace.weights}
    assert held == {f"{case}: {weight}" for case in cases for weight in wanted[case].weights}

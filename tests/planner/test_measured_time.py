"""A step that is timed by what dry runs counted takes about as long as by the formulas of the package's models."""

from dataclasses import replace
from functools import cache

import pytest

from lightning_megatron.mesh import Sizes
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.planner.constants import Constants, fitted
from lightning_megatron.planner.hardware import gpu_of
from lightning_megatron.planner.measured import Measured, measured
from lightning_megatron.planner.measured_time import measured_time
from lightning_megatron.planner.presets import PRESETS
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.step_time import StepTime, step_time
from lightning_megatron.precision.fp8 import Fp8Config
from lightning_megatron.transformer.recompute import RecomputeConfig

H100 = gpu_of("h100")
LLAMA, MIXTRAL = PRESETS["llama3_8b"], PRESETS["mixtral_8x7b"]
RUN = Run(
    model=replace(LLAMA.model, num_layers=4, vocab_size=32000),
    lengths=replace(LLAMA.lengths, sequence=4096),
    sizes=Sizes(world=8),
    global_batch_size=32,
    optimizer=OptimizerConfig(kind="distributed", overlap_grad_reduce=True, overlap_param_gather=True),
)


@cache
def measured_once(run: Run) -> Measured:
    return measured(run)


def time_of(run: Run, constants: Constants | None = None) -> StepTime:
    return measured_time(run, measured_once(run).ranks, H100, fitted() if constants is None else constants)


def on(run: Run = RUN, **sizes: int) -> Run:
    return replace(run, sizes=Sizes(world=8, sequence_parallel=sizes.get("tp", 1) > 1, **sizes))


@pytest.mark.parametrize(
    "run",
    [
        on(),
        on(tp=2),
        on(tp=8),
        on(pp=2),
        on(tp=2, pp=4),
        on(replace(RUN, recompute=RecomputeConfig(granularity="full"))),
        on(replace(RUN, model=replace(MIXTRAL.model, num_layers=2)), ep=8),
    ],
    ids=["alone", "tp2", "tp8", "pp2", "tp2 pp4", "recomputed", "experts"],
)
def test_what_is_measured_takes_about_as_long_as_by_formulas(run: Run) -> None:
    found, formulas = time_of(run), step_time(run, H100, fitted())
    assert found.total == pytest.approx(formulas.total, rel=0.1)
    assert found.compute == pytest.approx(formulas.compute, rel=0.15)
    assert found.bubble == pytest.approx(formulas.bubble, rel=0.1, abs=1e-9)
    assert found.optimizer == formulas.optimizer
    for axis in ("tp", "pp", "ep", "routing"):
        # Formulas know no messages of the loss.
        assert found.exposed.get(axis, 0) == pytest.approx(formulas.exposed.get(axis, 0), rel=0.25), axis


def test_more_work_takes_more_time() -> None:
    base = time_of(RUN)
    longer = replace(RUN, lengths=replace(RUN.lengths, sequence=8192))
    again = replace(RUN, recompute=RecomputeConfig(granularity="full"))
    for run in (longer, again):
        assert time_of(run).backwards[0] > base.backwards[0]
    # Recomputation is no forward's.
    assert time_of(again).forwards == base.forwards and time_of(longer).forwards > base.forwards
    fp8 = replace(RUN, fp8=Fp8Config())
    assert measured_once(fp8).ranks[0].passes[0].counts["fp8 products"] > 0
    slow = replace(fitted(), hopper_fp8_share=0.1)
    assert time_of(fp8, slow).compute > time_of(fp8).compute and time_of(RUN, slow) == base


def test_messages_wait_by_their_axis_and_the_backward_hides_those_of_tp() -> None:
    assert set(time_of(RUN).exposed) == {"dp"} and set(time_of(on(tp=2, pp=2)).exposed) == {"tp", "pp", "dp"}
    all_shown = replace(fitted(), exposed_tensor=1.0)
    hidden, shown = (time_of(on(tp=2), constants) for constants in (fitted(), all_shown))
    assert hidden.exposed["tp"] < 0.7 * shown.exposed["tp"] and hidden.forwards == shown.forwards


def test_the_host_launches_no_faster_than_it_can() -> None:
    slow = replace(fitted(), layer_seconds=1.0)
    found = time_of(on(pp=2), slow)
    assert found.forwards == pytest.approx((2, 2), rel=1e-2) and found.backwards == pytest.approx((2, 2), rel=1e-2)

"""Constants are found again from steps that were timed with them."""

import math
from dataclasses import asdict, replace

import pytest

from lightning_megatron.mesh import Sizes
from lightning_megatron.planner.calibration import MeasuredStep, calibrated, parts_of
from lightning_megatron.planner.constants import Constants, fitted
from lightning_megatron.planner.hardware import gpu_of
from lightning_megatron.planner.presets import PRESETS
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.step_time import step_time

H100 = gpu_of("h100")
TRUE = replace(fitted(), hopper_share=0.7, link_share=0.5, network_share=0.4, unfused_traffic=2.6, step_seconds=0.09)


def run_of(micro_batch_size: int = 1, *, preset: str = "llama3_8b", samples: int = 64, **sizes: int) -> Run:
    known = PRESETS[preset]
    own = Sizes(**{"world": 16, "sequence_parallel": sizes.get("tp", 1) > 1} | sizes)
    return Run(
        model=known.model,
        lengths=known.lengths,
        sizes=own,
        global_batch_size=samples,
        micro_batch_size=micro_batch_size,
    )


def measured(run: Run) -> MeasuredStep:
    def predict(constants: Constants) -> object:
        return parts_of(step_time(run, H100, constants), run)

    return MeasuredStep(name="", measured=predict(TRUE), predict=predict)  # type: ignore[arg-type]


# Of a small model elementwise kernels take more of the step, and of a small batch what is done once a step.
LAYOUTS = (
    run_of(tp=8),
    run_of(tp=2, pp=4),
    run_of(2, tp=4, cp=2),
    run_of(world=64, pp=2),
    run_of(8, preset="gpt2_124m", world=8),
    run_of(preset="gpt2_124m", world=8, samples=8),
)


def test_constants_of_a_synthetic_cluster_are_fitted_back() -> None:
    found = calibrated(fitted(), [measured(run) for run in LAYOUTS])
    within = {"hopper_share": 0.02, "link_share": 0.02, "network_share": 0.05, "step_seconds": 0.02}
    # Elementwise kernels are a tenth of these steps, which are fitted to within 1%.
    for name, share in (within | {"unfused_traffic": 0.15}).items():
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=share), name
    # Constants of other GPUs are told of by no step.
    assert found.ampere_share == fitted().ampere_share and found.hopper_fp8_share == fitted().hopper_fp8_share
    # A layout that was not measured is planned as it would be.
    other = run_of(2, tp=4, pp=2)
    seconds = [step_time(other, H100, constants).total for constants in (TRUE, found, fitted())]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.01) and seconds[2] < 0.9 * seconds[0]


def test_one_step_moves_what_it_hangs_on_and_little_else() -> None:
    found = calibrated(fitted(), [measured(LAYOUTS[0])])
    moved = {name: abs(math.log(getattr(found, name) / getattr(fitted(), name))) for name in ("hop_seconds", "edge")}
    assert moved["hop_seconds"] < 1e-9 and moved["edge"] < 0.3
    step = measured(LAYOUTS[0])
    assert step.predict(found).listed() == pytest.approx(step.measured.listed(), rel=0.02)


def test_steps_that_fit_change_nothing() -> None:
    step = measured(LAYOUTS[1])
    assert asdict(calibrated(TRUE, [step])) == pytest.approx(asdict(TRUE))

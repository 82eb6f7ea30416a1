"""The range of a predicted time, and the constants that it hangs on."""

from dataclasses import replace

import pytest

from lightning_megatron.mesh import Sizes
from lightning_megatron.models import GPTConfig
from lightning_megatron.planner.constants import Constants, fitted
from lightning_megatron.planner.estimate import Estimate, estimate
from lightning_megatron.planner.hardware import gpu_of
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.planner.report import estimate_text
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.time_range import ALL_FAMILIES, largest_effects, ratios_like

MODEL = GPTConfig(num_layers=2, hidden_size=1024, num_attention_heads=8, vocab_size=1024, max_sequence_length=512)


def estimate_on(gpu: str) -> Estimate:
    run = Run(model=MODEL, lengths=SequenceLengths(sequence=512), sizes=Sizes(world=2, tp=2), global_batch_size=4)
    return estimate(run, gpu_of(gpu))


@pytest.mark.parametrize(("family", "precision"), [("hopper", "16 bits"), ("hopper", "FP8"), ("ampere", "16 bits")])
def test_rows_of_the_same_gpus_serve_where_there_are_enough(family: str, precision: str) -> None:
    found = ratios_like(family, precision, has_experts=False)
    assert (found.family, found.precision, found.has_experts) == (family, precision, False)
    assert found.num_rows >= 10 and 0.5 < found.low < 1 < found.high < 2


@pytest.mark.parametrize(("family", "precision"), [("volta", "16 bits"), ("unheard of", "FP8"), ("hopper", "float32")])
def test_rows_of_all_gpus_serve_otherwise(family: str, precision: str) -> None:
    for has_experts in (False, True):
        found = ratios_like(family, precision, has_experts=has_experts)
        assert (found.family, found.has_experts) == (ALL_FAMILIES, has_experts)
        assert f"{found.num_rows} published runs" in found.of and ALL_FAMILIES in found.of


def test_the_largest_effects_are_those_of_the_terms_that_a_time_has() -> None:
    found = largest_effects(lambda c: 8 * c.traffic + 2 * c.step_seconds / 0.03 + c.edge / 200, Constants(traffic=1.0))
    assert [effect.constant for effect in found] == ["traffic", "step_seconds", "edge"]
    assert [effect.ratio for effect in found] == pytest.approx([1 + 0.8 / 11, 1 + 0.2 / 11, 1 + 0.1 / 11])


def test_a_report_gives_the_range_of_the_time_and_what_it_hangs_on() -> None:
    found = estimate_on("h100")
    lines = {line[:12].strip(): line[13:] for line in estimate_text(found).splitlines()}
    low, high = (ratio * found.step_seconds for ratio in (found.ratios.low, found.ratios.high))
    assert lines["how sure"].startswith(f"{low:.4g} to {high:.4g} s: four of five of {found.ratios.of}")
    name, constants = found.effects[0].constant, fitted()
    raised = replace(constants, **{name: 1.1 * getattr(constants, name)})
    assert estimate(found.run, found.gpu, raised).step_seconds / found.step_seconds == found.effects[0].ratio
    assert lines["hangs on"].startswith(f"{name} {found.effects[0].ratio - 1:+.1%}, ")

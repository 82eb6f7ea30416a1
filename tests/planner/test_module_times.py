"""A step's time by module: all of it, and each part with the module whose code takes it."""

import re
from typing import Any

import pytest

from lightning_megatron import MoEConfig, RouterConfig
from lightning_megatron.mesh import Sizes
from lightning_megatron.models import GPTConfig
from lightning_megatron.planner.dry_run import DryRuns, global_rank
from lightning_megatron.planner.estimate import estimate
from lightning_megatron.planner.hardware import gpu_of
from lightning_megatron.planner.measured import measured_modules
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.planner.module_times import ModuleTime, module_lines, module_times
from lightning_megatron.planner.run import Run
from lightning_megatron.transformer.recompute import RecomputeConfig

SHAPE: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "vocab_size": 1024, "max_sequence_length": 128}
GPT = GPTConfig(num_layers=10, **SHAPE)
EXPERTS = GPTConfig(num_layers=4, moe=MoEConfig(router=RouterConfig(num_experts=4, top_k=2)), **SHAPE)
STAGES = Sizes(world=4, tp=2, pp=2, sequence_parallel=True)


def run_of(model: GPTConfig = GPT, sizes: Sizes = STAGES, **changes: Any) -> Run:
    return Run(model=model, lengths=SequenceLengths(sequence=128), sizes=sizes, global_batch_size=8, **changes)


RUNS = {
    "stages": run_of(),
    "split backwards": run_of(schedule_name="zb_h1"),
    "recomputed": run_of(recompute=RecomputeConfig(granularity="full")),
    "one call": run_of(is_collective=True),
    "accumulated": run_of(num_accumulated=2),
    "experts": run_of(EXPERTS, Sizes(world=8, ep=2, pp=2)),
    "overlapped": run_of(EXPERTS, Sizes(world=8, ep=2, pp=2), is_overlapped=True),
}


def times_of(run: Run) -> dict[str, ModuleTime]:
    found = estimate(run, gpu_of("h100"))
    times = module_times(found, measured_modules(run, found.time.slowest))
    of_modules = {axis for one in times for axis in one.exposed_seconds}
    rest = sum(seconds for axis, seconds in found.time.exposed.items() if axis not in of_modules)
    rest += found.time.bubble + found.time.optimizer + found.time.other
    assert sum(one.seconds for one in times) + rest == pytest.approx(found.step_seconds, rel=1e-9)
    assert [one.seconds for one in times] == sorted((one.seconds for one in times), reverse=True)
    # The text is the same, to its digits.
    shown = re.findall(r" ([\d.e-]+) +[\d.]+%", "\n".join(module_lines(found, times)))
    assert sum(map(float, shown)) == pytest.approx(found.step_seconds, rel=1e-2)
    return {one.module: one for one in times}


@pytest.mark.parametrize("name", RUNS)
def test_modules_and_what_is_none_s_add_up_to_the_step(name: str) -> None:
    run = RUNS[name]
    modules = measured_modules(run, 0)
    rank = DryRuns(run).of(global_rank(run, 0, 0))
    for index, expected in enumerate(rank.passes):
        found: dict[str, float] = {}
        for passes in modules.values():
            for kind, flops in passes[index].flops.items():
                found[kind] = found.get(kind, 0.0) + flops
        assert found == expected.flops
    times = times_of(run)
    # All that multiplies has a name, whenever that comes.
    assert sum(one.flops for one in times.values()) > 0 and times[""].flops == 0
    assert times[""].seconds < 0.1 * sum(one.seconds for one in times.values())


@pytest.mark.parametrize(("name", "backward"), [("stages", 2), ("split backwards", 2), ("recomputed", 3)])
def test_products_are_those_of_the_linear_that_makes_them(name: str, backward: int) -> None:
    times = times_of(RUNS[name])
    # Of a forward's products, in five layers and eight microbatches.
    flops = 5 * 8 * 2 * 128 * 256 * (4 * 256 / 2)
    for linear in ("up", "down"):
        one = times[f"model.layers.*.mlp.{linear}"]
        assert one.flops == flops * (1 + backward)
        assert one.backward_seconds > 1.4 * one.forward_seconds
        assert one.exposed_seconds["tp"] > 0
    # Scores are no linear's, and a backward of theirs counts twice.
    of_scores = 5 * 8 * 4 * (128**2 / 2) * 128
    assert times["model.layers.*.attention"].flops == of_scores * (1 + backward)


def test_accumulated_steps_do_the_work_of_each() -> None:
    once, twice = times_of(RUNS["stages"]), times_of(RUNS["accumulated"])
    assert {name: 2 * one.flops for name, one in once.items()} == {name: one.flops for name, one in twice.items()}


def test_a_mask_of_dropout_is_one_kernel() -> None:
    times = times_of(run_of(GPTConfig(num_layers=10, ffn_dropout=0.1, **SHAPE)))
    dropout = times["model.layers.*.mlp.dropout"]
    assert 0 < dropout.forward_seconds < 2 * dropout.backward_seconds


def test_messages_of_experts_are_their_layer_s() -> None:
    times = times_of(RUNS["experts"])
    sending = {name for name, one in times.items() if one.exposed_seconds.get("ep", 0)}
    routing = {name for name, one in times.items() if one.exposed_seconds.get("routing", 0)}
    assert sending == {"model.layers.*.moe"} and routing == {"model.layers.*.moe.experts"}

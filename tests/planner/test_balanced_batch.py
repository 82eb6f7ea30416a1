"""Dynamic context parallelism: the planner against dry runs, against runs that are cut evenly, and by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_megatron import ContextConfig, CostModel, DynamicContextConfig
from lightning_megatron.context.balance import RankGroup, StepPlan
from lightning_megatron.mesh import Sizes
from lightning_megatron.models import GPTConfig
from lightning_megatron.planner.balanced_batch import BalancedBatch, LogNormal, balanced, drawn
from lightning_megatron.planner.balanced_cost import planned_cost
from lightning_megatron.planner.balanced_runs import fullest_line, of_documents
from lightning_megatron.planner.constants import fitted
from lightning_megatron.planner.dry_run import DryRuns, dry_run, global_rank, shown_ranks
from lightning_megatron.planner.estimate import estimate
from lightning_megatron.planner.flops import MODEL, step_flops
from lightning_megatron.planner.hardware import gpu_of
from lightning_megatron.planner.measured import measured
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.planner.run import Run, faults_of
from lightning_megatron.planner.step_time import step_time
from lightning_megatron.rules.cross_config import with_context_groups
from lightning_megatron.transformer import cost
from lightning_megatron.transformer.recompute import RecomputeConfig
from tests.harness.sample import every_nth
from tests.planner.test_dry_run import DISTRIBUTED, GPT, LLAMA, MIXTRAL

H100 = gpu_of("h100")
SHORT, GATED, EXPERTS = (replace(model, num_layers=2) for model in (GPT, LLAMA, MIXTRAL))
# Sending is so dear that short documents stay whole, and long ones go over two ranks and four.
COST = CostModel(seconds_per_token=1.0, seconds_per_square=1e-4, seconds_per_sent_token=0.2, latency_seconds=20.0)


def run_of(
    model: GPTConfig,
    sizes: Sizes,
    *,
    cap: int = 1024,
    num_tokens: int = 8192,
    lengths: tuple[int, ...] = (),
    context: ContextConfig | None = None,
    multiple: int = 1,
    group: int = 0,
    **changes: Any,
) -> Run:
    """A run of documents of these lengths, or of such as are drawn."""
    config = DynamicContextConfig(max_tokens_per_rank=cap, min_group_size=group or 1, max_group_size=group, cost=COST)
    context = ContextConfig() if context is None else context
    sizes = with_context_groups(sizes, config, context)
    longest = cap * sizes.dp * sizes.cp
    lengths = lengths or drawn(LogNormal(median=700, sigma=1.2), num_tokens, longest=longest)
    run = Run(
        model=replace(model, max_sequence_length=longest),
        lengths=SequenceLengths(sequence=longest, are_packed=True),
        sizes=sizes,
        global_batch_size=sizes.dp,
        context=context,
        balanced=balanced(lengths, sizes, config, COST, multiple),
        **changes,
    )
    assert faults_of(run) == []
    return run


RUNS = {
    "no pipeline": run_of(GATED, Sizes(world=4)),
    "a pipeline": run_of(GATED, Sizes(world=8, pp=2, cp=2), optimizer=DISTRIBUTED),
    "tp and sp": run_of(SHORT, Sizes(world=16, tp=2, pp=2, sequence_parallel=True), optimizer=DISTRIBUTED),
    "interleaved": run_of(replace(SHORT, num_layers=4), Sizes(world=4, pp=2, vp=2), multiple=2),
    "zb-h1": run_of(SHORT, Sizes(world=4, pp=2), schedule_name="zb_h1"),
    "gpipe": run_of(SHORT, Sizes(world=4, pp=2), schedule_name="gpipe"),
    "heads for tokens": run_of(GATED, Sizes(world=4), context=ContextConfig(comm_type="all_to_all")),
    "float32": run_of(GATED, Sizes(world=2), precision="32-true"),
    "experts": run_of(EXPERTS, Sizes(world=4, ep=2), optimizer=DISTRIBUTED, cap=2048),
    "again": run_of(GATED, Sizes(world=4, pp=2), recompute=RecomputeConfig(granularity="full"), optimizer=DISTRIBUTED),
    "forwards beside backwards": run_of(
        EXPERTS, Sizes(world=8, ep=2, pp=2), optimizer=DISTRIBUTED, cap=2048, multiple=2, is_overlapped=True
    ),
    "accumulated": run_of(GATED, Sizes(world=4, pp=2), num_accumulated=3, optimizer=DISTRIBUTED),
}


def test_the_code_on_real_tensors_holds_and_multiplies_as_much() -> None:
    model = GPTConfig(num_layers=2, hidden_size=256, num_attention_heads=4, vocab_size=256)
    run = run_of(model, Sizes(), num_tokens=3000, precision="32-true")
    dry, real = dry_run(run, 0), dry_run(run, 0, device=torch.device("cpu"))
    assert dry.peak_bytes == pytest.approx(real.peak_bytes, rel=0.02)
    assert dry.flops == real.flops and dry.num_run == run.num_microbatches > 2


def test_a_rank_without_documents_runs_dry() -> None:
    run = run_of(SHORT, Sizes(world=4, cp=2), lengths=(300,), group=1)
    assert run.balanced is not None
    idle = [line for line, groups in run.balanced.lines.items() if not any(group.documents for group in groups)]
    busy = [line for line in run.balanced.lines if line not in idle]
    assert idle and busy
    peaks = {line: dry_run(run, global_rank(run, 0, line)).peak_bytes for line in (idle[0], busy[0])}
    assert 0 < peaks[idle[0]] < peaks[busy[0]]


def test_overlap_holds_more_and_takes_less() -> None:
    sizes = Sizes(world=8, ep=2, pp=2)
    beside = run_of(EXPERTS, sizes, cap=2048, num_tokens=30000, multiple=2, is_overlapped=True, optimizer=DISTRIBUTED)
    plain = replace(beside, is_overlapped=False)
    own, other = (estimate(run, H100) for run in (beside, plain))
    assert own.step_seconds < other.step_seconds and own.time.exposed["ep"] < other.time.exposed["ep"]
    assert own.time.compute == other.time.compute
    rank = global_rank(beside, 0, fullest_line(beside, 0))
    assert dry_run(beside, rank).peak_bytes > dry_run(plain, rank).peak_bytes


def test_messages_are_those_of_each_group() -> None:
    slots = ((RankGroup(0, 1, (0,)), RankGroup(1, 1, (1,))), (RankGroup(0, 2, (2,)),))
    run = run_of(replace(SHORT, num_layers=4), Sizes(world=4, pp=2))
    step = BalancedBatch(lengths=(600, 400, 1000), plan=StepPlan(2, slots, 0.0, 0.0))
    found = dry_run(replace(run, balanced=step), global_rank(run, 0, 1))
    # Hidden states in 16 bits: of a document, and of half of another.
    assert found.messages["pp", "send"].number == 2
    assert found.messages["pp", "send"].tensor_bytes == (400 + 500) * 1024 * 2
    # Keys and values of 500 tokens to the neighbour in either direction, and their gradients in float32.
    assert found.messages["dp+cp", "send"].tensor_bytes == 2 * 500 * 1024 * 2 * (2 + 2 + 4)
    # Gradients on their way back.
    assert (
        dry_run(replace(run, balanced=step), global_rank(run, 1, 1)).messages["pp", "send"]
        == (found.messages["pp", "send"])
    )


def test_groups_have_axes_of_their_own() -> None:
    slots = ((RankGroup(0, 2, (0,)), RankGroup(2, 2, (1,))),)
    step = BalancedBatch(lengths=(600, 400), plan=StepPlan(4, slots, 0.0, 0.0))
    run = replace(run_of(SHORT, Sizes(world=4)), balanced=step)
    sent = [dry_run(run, rank).messages["context2", "send"].tensor_bytes for rank in (1, 2)]
    assert sent[0] == 1.5 * sent[1] > 0


def test_documents_of_several_widths_are_among_the_runs() -> None:
    for name, run in RUNS.items():
        assert run.balanced is not None
        sizes = {group.size for slot in run.balanced.plan.slots for group in slot}
        assert len(sizes) > 1 or name == "float32", name
        assert len(run.balanced.lines) > 1


@pytest.mark.parametrize("name", every_nth(RUNS, 3))
def test_the_ranks_that_are_shown_are_the_fullest(name: str) -> None:
    run, runs = RUNS[name], DryRuns(RUNS[name])
    for index in range(run.sizes.pp):
        peaks = [runs.of(global_rank(run, index, line)).peak_bytes for line in range(run.sizes.dp * run.sizes.cp)]
        shown = peaks[fullest_line(run, index)]
        # Attention over a ring holds some bytes of a token more.
        assert shown > 0.97 * max(peaks) and max(peaks) > min(peaks)
    assert shown_ranks(run)[0] == global_rank(run, 0, fullest_line(run, 0))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("sizes", "changes"),
    every_nth(
        [
            (Sizes(world=4, pp=2, cp=2), {"schedule_name": "zb_h1"}),
            (Sizes(world=8, pp=4, cp=2), {"optimizer": DISTRIBUTED}),
            (Sizes(world=8, cp=2), {}),
            (Sizes(world=8, pp=2, vp=2, cp=2), {"num_accumulated": 2}),
        ],
        2,
    ),
)
def test_equal_documents_on_equal_groups_are_a_run_that_is_cut_evenly(sizes: Sizes, changes: dict[str, Any]) -> None:
    num_microbatches, multiple = 8, 2 if sizes.vp > 1 else 1
    lengths = (2048,) * (num_microbatches * sizes.dp)
    run = run_of(LLAMA, sizes, lengths=lengths, group=2, multiple=multiple, **changes)
    even = replace(
        run,
        balanced=None,
        sizes=sizes,
        lengths=SequenceLengths(sequence=2048, are_packed=True),
        global_batch_size=num_microbatches * sizes.dp,
    )
    assert run.num_microbatches == even.num_microbatches == num_microbatches
    for found, wanted in zip(measured(run).memory, measured(even).memory, strict=True):
        assert found.total == pytest.approx(wanted.total, rel=1e-3)
    assert step_flops(run) == step_flops(even) and run.num_tokens == even.num_tokens
    found, wanted = estimate(run, H100), estimate(even, H100)
    assert found.step_seconds == pytest.approx(wanted.step_seconds, rel=1e-12)
    assert found.time.exposed == pytest.approx(wanted.time.exposed) and found.time.exposed["cp"] > 0
    assert found.time.bubble == pytest.approx(wanted.time.bubble)


def test_flops_are_those_of_each_document_by_itself() -> None:
    run = RUNS["no pipeline"]
    assert run.balanced is not None
    lengths = run.balanced.lengths
    wanted = sum(cost.training_flops(GATED, batch=1, sequence=length) for length in lengths)
    assert step_flops(run, MODEL) == wanted
    assert wanted < 0.95 * cost.training_flops(GATED, batch=1, sequence=sum(lengths))


def test_a_window_reaches_no_further_than_its_document() -> None:
    model = replace(LLAMA, sliding_window=512)
    run = run_of(model, Sizes(world=2), lengths=(300, 512, 1500))
    assert step_flops(run) == sum(cost.training_flops(model, batch=1, sequence=length) for length in (300, 512, 1500))


def test_a_step_takes_the_longest_path_through_its_groups() -> None:
    slots = (
        (RankGroup(0, 1, (1,)), RankGroup(1, 1, (0,)), RankGroup(2, 2, (2,))),
        (RankGroup(0, 2, (3,)), RankGroup(2, 1, (4,)), RankGroup(3, 1, ())),
    )
    lengths = (8192, 2048, 4096, 4800, 800)
    run = replace(
        run_of(LLAMA, Sizes(world=4), cap=16384),
        balanced=BalancedBatch(lengths=lengths, plan=StepPlan(4, slots, 0.0, 0.0)),
    )

    def seconds(*documents: int, size: int) -> float:
        time = step_time(of_documents(run, documents, size), H100, fitted())
        return time.forwards[0] + time.backwards[0]

    time = estimate(run, H100).time
    dp_ranks = step_time(of_documents(run, (8192,), 1), H100, fitted()).exposed["dp"]
    played = time.compute + sum(time.exposed.values()) - dp_ranks + time.bubble
    wanted = seconds(8192, size=1) + seconds(4800, size=2)
    assert played == pytest.approx(wanted)
    assert wanted > 1.2 * (seconds(2048, size=1) + seconds(4800, size=2)) > 0


def test_planned_costs_are_near_planned_times() -> None:
    run = run_of(replace(LLAMA, num_layers=32, hidden_size=4096, num_attention_heads=32), Sizes(world=4), cap=8192)
    own = planned_cost(run, 8192, H100, fitted())
    for lengths, size in (((6000,), 1), ((1000,) * 5, 1), ((3000, 9000), 2), ((30000,), 4)):
        time = step_time(of_documents(run, lengths, size), H100, fitted())
        expected = time.forwards[0] + time.backwards[0]
        shown = own.seconds(sum(lengths), sum(length**2 for length in lengths), size)
        assert shown == pytest.approx(expected, rel=0.1)


def test_documents_are_drawn_until_a_batch_is_full() -> None:
    known = drawn([5, 70], 1000, longest=64)
    assert sum(known) == 1000 and set(known[:-1]) == {5, 64} and known[-1] <= 64
    assert drawn([5, 70], 1000, longest=64) == known != drawn([5, 70], 1000, longest=64, seed=1)
    normal = sorted(drawn(LogNormal(median=700, sigma=1.0), 2_000_000, longest=100_000))
    assert normal[len(normal) // 2] == pytest.approx(700, rel=0.1)
    # One standard deviation above the median.
    assert normal[int(0.841 * len(normal))] == pytest.approx(700 * 2.718, rel=0.1)
    with pytest.raises(ValueError, match=r"median \(0\) must be.*\n.*sigma \(-1\) must be"):
        LogNormal(median=0, sigma=-1)

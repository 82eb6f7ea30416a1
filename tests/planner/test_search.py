"""A search finds the layouts that fit, fastest first, and says why others do not."""

from dataclasses import replace
from functools import cache

from lightning_megatron.context.config import ContextConfig
from lightning_megatron.mesh import Sizes, StageLayout
from lightning_megatron.planner.constants import fitted
from lightning_megatron.planner.hardware import GIGA, gpu_of
from lightning_megatron.planner.measured import Measured, measured
from lightning_megatron.planner.memory import Memory, memory_of
from lightning_megatron.planner.presets import PRESETS
from lightning_megatron.planner.run import Run, faults_of
from lightning_megatron.planner.search import Found, candidates, fewest_gpus, search
from lightning_megatron.planner.step_time import step_time

H100 = gpu_of("h100")


def run_of(name: str, world: int, **changes: object) -> Run:
    preset = PRESETS[name]
    fields = {
        "model": preset.model,
        "lengths": preset.lengths,
        "sizes": Sizes(world=world),
        "global_batch_size": preset.global_batch_size,
    }
    return Run(**(fields | changes))  # type: ignore[arg-type]


MEMORY = 40 * GIGA


@cache
def found_where_memory_is_scarce() -> Found:
    """Of a model for which some layouts fit as they are, some recompute whole layers, and some need too much."""
    return search(run_of("llama3_8b", 8, global_batch_size=64), H100, memory_bytes=MEMORY, num_confirmed=3)


def test_what_is_shown_comes_fastest_first_and_fits_as_measured() -> None:
    found = found_where_memory_is_scarce()
    seconds = [one.estimate.step_seconds for one in found.confirmed]
    assert len(seconds) == 3 and seconds == sorted(seconds)
    for one in found.confirmed:
        assert faults_of(one.estimate.run) == []
        assert one.estimate.memory == measured(one.estimate.run).memory and one.estimate.peak_bytes <= MEMORY
        assert all(f"{seconds_of(run):.4g}" == f"{one.estimate.step_seconds:.4g}" for run in one.alike)
    slower = [seconds_of(run) for run in found.others]
    assert len(slower) > 5 and slower == sorted(slower) and slower[0] >= seconds[-1]
    assert found.num_fitting == 3 + len(slower) + sum(len(one.alike) for one in found.confirmed)


def seconds_of(run: Run) -> float:
    return step_time(run, H100, fitted()).total


def test_layouts_that_need_too_much_say_what_they_need() -> None:
    found = found_where_memory_is_scarce()
    lacking = [one for one in found.rejected if one.needed_bytes]
    assert lacking and all(one.needed_bytes > MEMORY and "of 40.0 GB" in one.why for one in lacking)
    assert "not enough memory" in found.reasons()


def test_full_recomputation_is_chosen_only_where_nothing_else_fits() -> None:
    found = found_where_memory_is_scarce()
    fitting = [*(one.estimate.run for one in found.confirmed), *found.others]
    recomputed = [run for run in fitting if run.recompute.granularity == "full"]
    assert 0 < len(recomputed) < len(fitting)
    for run in recomputed:
        bare = replace(run, recompute=type(run.recompute)())
        # Hopeless by the closed form, or measured.
        closed = max(memory.total for memory in memory_of(bare))
        assert closed > 1.05 * MEMORY or max(memory.total for memory in measured(bare).memory) > MEMORY


def test_experts_are_spread_by_divisors_of_their_number() -> None:
    sizes = {run.sizes.ep for run in candidates(run_of("mixtral_8x7b", 64), H100)}
    assert sizes == {1, 2, 4, 8}


def test_experts_are_unsharded_or_cut_over_as_many_ranks_as_the_rest() -> None:
    runs = list(candidates(run_of("mixtral_8x7b", 64), H100))
    assert all(run.sizes.etp in (1, run.sizes.tp) for run in runs)
    assert {run.sizes.etp for run in runs} == {1, 2, 4, 8}
    assert {run.sizes.etp for run in candidates(run_of("llama3_8b", 64), H100)} == {1}


def test_a_search_takes_nothing_from_sizes_that_it_changes() -> None:
    own = Sizes(world=64, pp=4, cp=2, cp_ulysses=2, stage_layout=StageLayout(text="Et*20|t*20|t*20|t*20L"))
    context = ContextConfig(comm_type="hierarchical", ulysses_size=2)
    found = list(candidates(run_of("llama3_70b", 64, sizes=own, context=context), H100))
    assert {run.sizes.pp for run in found} > {1, 2, 4, 8}
    for run in found:
        assert not run.sizes.faults(), run.sizes
        kept = (run.sizes.pp, run.sizes.vp) == (4, 1)
        assert (run.sizes.stage_layout == own.stage_layout) == kept
        assert (run.sizes.cp_ulysses, run.context.comm_type) == (
            (2, "hierarchical") if run.sizes.cp % 2 == 0 else (1, "ring")
        )


def test_layers_that_stages_do_not_divide_are_spread_by_cost_and_the_fullest_rank_counts() -> None:
    found = search(run_of("llama3_8b", 12, global_batch_size=24), H100, memory_bytes=30 * GIGA)
    uneven = [run for run in found.others if 32 % run.sizes.num_stages]
    assert uneven and all(run.sizes.stage_layout.balance == "cost" for run in uneven)
    for run in uneven:
        assert max(memory.total for memory in memory_of(run)) <= 30 * GIGA
    even = [run for run in found.others if 32 % run.sizes.num_stages == 0]
    assert all(run.sizes.stage_layout == StageLayout() for run in even)


def test_the_nearest_are_those_that_lack_the_least_of_different_cuts() -> None:
    found = found_where_memory_is_scarce()
    nearest = found.nearest(3)
    cuts = [(one.run.sizes.tp, one.run.sizes.pp, one.run.sizes.cp) for one in nearest]
    needed = [one.needed_bytes for one in nearest]
    assert len(set(cuts)) == 3 and needed == sorted(needed)
    assert needed[0] == min(one.needed_bytes for one in found.rejected if one.needed_bytes)


def test_long_sequences_are_cut_and_short_ones_are_not() -> None:
    long = run_of("llama3_8b", 16)
    assert {run.sizes.cp for run in candidates(long, H100)} == {1, 2}
    assert {run.sizes.cp for run in candidates(run_of("bert_large", 16), H100)} == {1}


def test_where_nothing_fits_more_gpus_may_do() -> None:
    # Few GPUs have few layouts.
    memory_bytes = 50 * GIGA
    run = run_of("llama3_8b", 1)
    assert not search(run, H100, memory_bytes=memory_bytes).confirmed
    more = fewest_gpus(run, H100, memory_bytes=memory_bytes)
    half = run_of("llama3_8b", more // 2)
    assert not search(half, H100, memory_bytes=memory_bytes).confirmed
    assert more > 2 and search(run_of("llama3_8b", more), H100, memory_bytes=memory_bytes).confirmed


def in_closed_form(run: Run) -> Measured:
    """The closed form in place of a measurement, which takes seconds a layout."""
    return Measured(memory=memory_of(run), flops=None)


def half_of_the_closed_form(run: Run) -> Measured:
    """A measurement in which the closed form is far too high."""
    return Measured(memory=tuple(Memory(weights=memory.total / 2) for memory in memory_of(run)), flops=None)


def test_where_nothing_fits_in_closed_form_the_nearest_layout_is_measured() -> None:
    run = run_of("gpt2_124m", 2)
    by_form = search(run, H100, memory_bytes=2 * GIGA, measure=half_of_the_closed_form)
    assert [one.estimate.peak_bytes for one in by_form.confirmed] and len(by_form.rejected) > 3
    assert by_form.confirmed[0].estimate.run not in [one.run for one in by_form.rejected]
    assert not search(run, H100, memory_bytes=1 * GIGA, measure=half_of_the_closed_form).confirmed


def test_what_did_not_fit_tells_of_layouts_with_other_chunks() -> None:
    tried: list[Run] = []

    def needed_bytes(run: Run) -> float:
        return 1.3 * max(memory.total for memory in memory_of(run))

    def measure(run: Run) -> Measured:
        tried.append(run)
        return Measured(memory=(Memory(weights=needed_bytes(run)),) * run.sizes.pp, flops=None)

    def without_chunks(run: Run) -> tuple[object, ...]:
        return replace(run.sizes, vp=1, stage_layout=StageLayout()), run.micro_batch_size, run.recompute

    run, most = run_of("llama3_8b", 8), 80 * GIGA
    search(run, H100, memory_bytes=most, num_confirmed=5, measure=measure)
    missed = [without_chunks(one) for one in tried if needed_bytes(one) > 1.02 * most]
    assert len(missed) == len(set(missed)) > 1
    assert sum(without_chunks(one) in missed for one in candidates(run, H100)) > 2 * len(missed)


def test_layouts_that_the_closed_form_takes_for_smaller_are_no_last_word_on_more_gpus() -> None:
    measured_runs: list[Run] = []

    def needs_stages(run: Run) -> Measured:
        measured_runs.append(run)
        needed = memory_of(run)[0].total if run.sizes.pp > 1 else H100.memory_bytes + 1
        return Measured(memory=(Memory(weights=needed),), flops=None)

    assert fewest_gpus(run_of("gpt2_124m", 1), H100, memory_bytes=H100.memory_bytes, measure=needs_stages) == 2
    assert measured_runs[0].sizes.pp == 1 and measured_runs[-1].sizes.pp == 2


def test_a_memory_that_no_number_of_gpus_mends_is_reported_as_such() -> None:
    little, much = 1.2 * GIGA, H100.memory_bytes
    assert fewest_gpus(run_of("gpt3_175b", 8), H100, memory_bytes=little, measure=in_closed_form) == 0
    assert fewest_gpus(run_of("gpt_1t", 8), H100, memory_bytes=much, measure=in_closed_form) == 512


def test_a_layout_with_faults_lists_all_of_them() -> None:
    run = run_of("gpt3_175b", 35, sizes=Sizes(world=35, tp=5, pp=7), micro_batch_size=7)
    shown = "\n".join(faults_of(run))
    assert "num_attention_heads (96)" in shown and "global_batch_size (1536)" in shown and "use 1533 or 1540" in shown


def test_layouts_that_rules_refuse_are_reported_with_the_rule() -> None:
    found = search(run_of("gpt2_124m", 8), H100, memory_bytes=H100.memory_bytes)
    assert all(12 % run.sizes.tp == 0 for run in found.others)
    assert any("num_attention_heads (12)" in one.why for one in found.rejected)

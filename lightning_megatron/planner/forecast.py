"""What a search expects of a layout before it measures it.

Of the package's models closed forms tell it. Of any other model a layout is measured without recomputation and with one
chunk a rank, with one and with two samples a microbatch: what its ranks hold, multiply and send is a line in the number
of samples, and chunks share what a rank saves of a microbatch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from lightning_megatron.planner.constants import Constants
from lightning_megatron.planner.hardware import Gpu
from lightning_megatron.planner.measured import Measure, Measured
from lightning_megatron.planner.measured_time import measured_time
from lightning_megatron.planner.memory import Memory, rank_memory, with_overhead
from lightning_megatron.planner.pipeline_load import saved_by_chunk
from lightning_megatron.planner.run import Run, RunSettings, UnmeasuredError
from lightning_megatron.planner.step_time import step_time
from lightning_megatron.planner.step_trace import Work
from lightning_megatron.transformer.recompute import RecomputeConfig


class Forecast(Protocol):
    """Expects memory and time of runs without errors. Raises UnmeasuredError as `Measure` does."""

    def memory(self, run: Any) -> Mapping[int, Memory]:
        """Memory of pipeline ranks, the fullest among them."""
        ...

    def seconds(self, run: Any) -> float:
        """Seconds of a step."""
        ...


class ClosedForm:
    """Expects of runs of the package's models what closed forms tell."""

    def __init__(self, gpu: Gpu, constants: Constants) -> None:
        self._gpu, self._constants = gpu, constants

    def memory(self, run: Run) -> Mapping[int, Memory]:
        """Memory of the first of each set of ranks with equal stages: it saves the most microbatches."""
        ranks = reversed(range(run.sizes.pp))
        first = {tuple(map(id, run.stages[rank])): rank for rank in ranks}
        return {rank: rank_memory(run, rank) for rank in sorted(first.values())}

    def seconds(self, run: Run) -> float:
        """Seconds of a step."""
        return step_time(run, self._gpu, self._constants).total


class FewSamples:
    """Expects of runs of any model what was measured of runs with few samples a microbatch.

    Under full recomputation nothing is expected of activations: memory is the least that it can be.
    """

    def __init__(self, measure: Measure, gpu: Gpu, constants: Constants) -> None:
        self._measure, self._gpu, self._constants = measure, gpu, constants
        self._known: dict[RunSettings, Measured | UnmeasuredError] = {}

    def memory(self, run: RunSettings) -> Mapping[int, Memory]:
        """Memory of every pipeline rank."""
        is_full = run.recompute.granularity == "full"
        found = {}
        for rank in range(run.sizes.pp):
            num_saved, each = sum(saved_by_chunk(run.schedule, rank)) / run.sizes.vp, Memory()
            for share, few in self._few(run):
                memory = self._measured(few).memory[rank]
                # A rank saves fewer microbatches where there are fewer.
                saved = memory.activations * num_saved / sum(saved_by_chunk(few.schedule, rank))
                each += replace(memory, activations=0.0 if is_full else saved).times(share)
            found[rank] = with_overhead(replace(each, buffers=0.0) if is_full else each)
        return found

    def seconds(self, run: RunSettings) -> float:
        """Seconds of a step."""
        shares = [(share, self._measured(few).ranks) for share, few in self._few(run)]
        ranks = []
        for index, one in enumerate(shares[0][1]):
            forward, backward = (
                _sum_of_works((share, of_few[index].passes[way]) for share, of_few in shares) for way in (0, 1)
            )
            if run.recompute.granularity == "full":
                backward.add(forward)
            for work in (forward, backward):
                if sent := work.messages.get(("pp", "send")):
                    work.messages["pp", "send"] = sent * run.sizes.vp
            ranks.append(replace(one, passes=(forward, backward)))
        return measured_time(run, ranks, self._gpu, self._constants).total

    def _few(self, run: RunSettings) -> list[tuple[int, RunSettings]]:
        """The runs that are measured, and how often each counts."""
        number = run.micro_batch_size
        plain = replace(run, sizes=replace(run.sizes, vp=1), recompute=RecomputeConfig())
        one, two = (replace(plain, micro_batch_size=few) for few in (1, 2))
        return [(1, one)] if number == 1 else [(2 - number, one), (number - 1, two)]

    def _measured(self, run: RunSettings) -> Measured:
        if run not in self._known:
            try:
                self._known[run] = self._measure(run)
            except UnmeasuredError as error:
                self._known[run] = error
        found = self._known[run]
        if isinstance(found, UnmeasuredError):
            raise found
        return found


def _sum_of_works(works: Iterable[tuple[int, Work]]) -> Work:
    total = Work()
    for times, work in works:
        total.add(work, times)
    return total

"""Seconds of a step under dynamic context parallelism, whose microbatches differ.

    step = (batches x the longest path through the groups + the bubble of microbatches like the longest
            + exposed messages of gradients and weights + optimizer) x (1 + straggling log2 of the GPUs) + the rest

A group begins when the last of its ranks has ended its previous microbatch; ranks that share no group do not wait for
each other. Each microbatch is timed as in a step of many equal ones (`step_time`), by its slowest pipeline rank.
"""

from lightning_megatron.context.balance import RankGroup
from lightning_megatron.planner.balanced_runs import of_group
from lightning_megatron.planner.constants import Constants
from lightning_megatron.planner.hardware import Gpu
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.step_time import StepTime, step_time


def balanced_time(run: Run, gpu: Gpu, constants: Constants) -> StepTime:
    """Time of a step of a balanced batch; compute and exposed communication are the busiest rank's."""
    assert run.balanced is not None
    step = run.balanced
    times = _times(run, gpu, constants)
    count = run.num_accumulated * run.num_microbatches
    # What overlap hides is no part of it.
    seconds = {group: _between_stages(time) / count for group, time in times.items()}
    clocks = [0.0] * step.plan.num_ranks
    for slot in step.plan.slots:
        for group in slot:
            end = max(clocks[rank] for rank in group.ranks) + seconds[group]
            clocks[group.first : group.first + group.size] = [end] * group.size
    own = max(step.lines.values(), key=lambda groups: sum(map(seconds.__getitem__, groups)))
    longest = times[max(seconds, key=seconds.__getitem__)]
    # Each group's time is that of as many microbatches as a rank has.
    compute = sum(times[group].compute for group in own) / len(own)
    exposed: dict[str, float] = {}
    for group in own:
        for axis, waited in times[group].exposed.items():
            exposed[axis] = exposed.get(axis, 0.0) + waited / len(own)
    # Gradients are reduced and weights gathered once a step.
    exposed["dp"] = longest.exposed["dp"]
    pipeline = run.num_accumulated * max(clocks) + longest.bubble
    busy = pipeline + exposed["dp"] + longest.optimizer
    straggling = busy * constants.straggling * (run.sizes.world.bit_length() - 1)
    return StepTime(
        compute=compute,
        exposed=exposed,
        bubble=pipeline - run.num_accumulated * sum(seconds[group] for group in own),
        optimizer=longest.optimizer,
        other=constants.step_seconds + straggling,
        passes=longest.passes,
        slowest=longest.slowest,
    )


def _between_stages(time: StepTime) -> float:
    """Seconds of a step's forwards and backwards on its slowest pipeline rank."""
    return time.compute + sum(seconds for axis, seconds in time.exposed.items() if axis != "dp")


def _times(run: Run, gpu: Gpu, constants: Constants) -> dict[RankGroup, StepTime]:
    """Time of a step for each group, in which all microbatches are like the group's."""
    assert run.balanced is not None
    known: dict[tuple[int, tuple[int, ...]], StepTime] = {}
    times = {}
    for group in {group for slot in run.balanced.plan.slots for group in slot}:
        kind = group.size, tuple(sorted(run.balanced.lengths_of(group)))
        if kind not in known:
            known[kind] = step_time(of_group(run, group), gpu, constants)
        times[group] = known[kind]
    return times

"""A step's time by module: what kernels and messages of each were measured to do, at the rates of the time model.

Where formulas time a layer (`step_time`), the modules share its time as their kernels do.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_megatron.planner.estimate import Estimate
from lightning_megatron.planner.hardware import TERA
from lightning_megatron.planner.measured_time import timed
from lightning_megatron.planner.report import exposed_text
from lightning_megatron.planner.step_trace import Passes

# Modules of a rank in a text.
_MOST_MODULES = 20


@dataclass(frozen=True, kw_only=True)
class ModuleTime:
    """What one module does in a step of the slowest pipeline rank."""

    module: str
    """Path of the module, with `*` for every number; empty for what is done outside of all."""
    flops: float
    """FLOPs as the package's own code executes them."""
    forward_seconds: float
    """Compute of its forwards."""
    backward_seconds: float
    """Compute of its backwards, and of what they recompute."""
    exposed_seconds: Mapping[str, float]
    """Exposed messages by axis, and the routing of experts."""

    @property
    def seconds(self) -> float:
        """Seconds that its compute and its exposed messages take."""
        return self.forward_seconds + self.backward_seconds + sum(self.exposed_seconds.values())


def module_times(found: Estimate, modules: Mapping[str, Passes]) -> list[ModuleTime]:
    """The modules of the slowest pipeline rank, those that take the longest first; all compute of the step is theirs.

    `modules` are what they do in a forward and in a backward of one microbatch.
    """
    run, time = found.run, found.time
    passes = {name: timed(run, own, found.gpu, found.constants) for name, own in modules.items()}
    of_modules: dict[str, float] = {}
    for one in (one for pair in passes.values() for one in pair):
        for axis, seconds in one.exposed.items():
            of_modules[axis] = of_modules.get(axis, 0.0) + seconds
    share = time.compute / sum(one.compute for pair in passes.values() for one in pair)
    exposed = {axis: time.exposed.get(axis, 0.0) / seconds for axis, seconds in of_modules.items() if seconds}
    count = run.num_accumulated * run.schedule.microbatches
    times = [
        ModuleTime(
            module=name,
            flops=count * sum(sum(work.flops.values()) for work in modules[name]),
            forward_seconds=share * forward.compute,
            backward_seconds=share * backward.compute,
            exposed_seconds={
                axis: scale * (forward.exposed.get(axis, 0.0) + backward.exposed.get(axis, 0.0))
                for axis, scale in exposed.items()
                if axis in forward.exposed or axis in backward.exposed
            },
        )
        for name, (forward, backward) in passes.items()
    ]
    return sorted(times, key=lambda one: one.seconds, reverse=True)


def module_lines(found: Estimate, times: Sequence[ModuleTime]) -> list[str]:
    """The modules that take time, and what of the step belongs to none, as text; JSON has all modules."""
    times = [one for one in times if one.seconds]
    names = [one.module or "outside of all modules" for one in times[:_MOST_MODULES]]
    width = max(map(len, [*names, "outside of all modules"]))
    lines = [f"the step on rank {found.time.slowest} of the pipeline, by module:"]
    lines.append(f"  {'':<{width}} {'s':>9} {'share':>6} {'forward':>9} {'backward':>9} {'exposed':>9} {'TFLOP':>9}")

    def line(name: str, seconds: float, more: str = "") -> str:
        return f"  {name:<{width}} {seconds:9.4g} {seconds / found.step_seconds:6.1%}{more}"

    for name, one in zip(names, times[:_MOST_MODULES], strict=True):
        exposed = sum(one.exposed_seconds.values())
        parts = (one.forward_seconds, one.backward_seconds, exposed, one.flops / TERA)
        lines.append(line(name, one.seconds, "".join(f" {part:9.4g}" for part in parts)))
    if rest := times[_MOST_MODULES:]:
        lines.append(line(f"{len(rest)} more modules", sum(one.seconds for one in rest)))
    return lines + [line(name, seconds) for name, seconds in _of_none(found, times)]


def module_records(times: Sequence[ModuleTime]) -> list[dict[str, Any]]:
    """The modules as JSON."""
    return [asdict(one) for one in times]


def _of_none(found: Estimate, times: Sequence[ModuleTime]) -> Iterator[tuple[str, float]]:
    """The parts of the step's time that belong to no module."""
    time, of_modules = found.time, {axis for one in times for axis in one.exposed_seconds}
    yield from ((exposed_text(axis), time.exposed[axis]) for axis in sorted(time.exposed.keys() - of_modules))
    yield from (("bubble", time.bubble), ("optimizer", time.optimizer), ("other", time.other))

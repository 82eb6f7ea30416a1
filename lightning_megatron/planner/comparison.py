"""Estimates of several runs beside each other, as text: one column for each run, one row for each number."""

from collections.abc import Callable, Sequence
from functools import partial

from lightning_megatron.planner.estimate import Estimate
from lightning_megatron.planner.hardware import GIGA, TERA
from lightning_megatron.planner.memory import Memory
from lightning_megatron.planner.report import exposed_text, layout_text


def comparison_text(names: Sequence[str], found: Sequence[Estimate]) -> str:
    """A table of estimates, one column each under its name; the last column has the last one over the first."""
    axes = sorted({axis for one in found for axis, seconds in one.time.exposed.items() if seconds > 0})
    kinds = [kind for kind in found[0].memory[0].by_kind() if any(_fullest(one).by_kind()[kind] for one in found)]
    lines = [
        _texts("run", names),
        _texts("layout", [layout_text(one.run) for one in found]),
        _numbers("GPUs", found, lambda one: one.run.sizes.world, "{:,}"),
        _numbers("billion parameters", found, lambda one: one.size.parameters / GIGA, "{:,.4g}"),
        _numbers("tokens a step", found, lambda one: one.run.num_tokens, "{:,}"),
        [],
        _numbers("step, s", found, lambda one: one.step_seconds, "{:.4g}"),
        _numbers("  compute", found, lambda one: one.time.compute, "{:.4g}"),
        *(_numbers(f"  {exposed_text(axis)}", found, partial(_exposed, axis), "{:.4g}") for axis in axes),
        _numbers("  bubble", found, lambda one: one.time.bubble, "{:.4g}"),
        _numbers("  optimizer", found, lambda one: one.time.optimizer, "{:.4g}"),
        _numbers("  other", found, lambda one: one.time.other, "{:.4g}"),
        _numbers("tokens/s", found, lambda one: one.tokens_per_second, "{:,.0f}"),
        _numbers("TFLOP/s on each GPU", found, lambda one: one.flops_per_second() / TERA, "{:,.4g}"),
        [],
        _numbers("fullest rank, GB", found, lambda one: _fullest(one).total / GIGA, "{:,.2f}"),
        *(_numbers(f"  {kind.replace('_', ' ')}", found, partial(_gb, kind), "{:,.2f}") for kind in kinds),
        _texts("fits", [_fit_text(one) for one in found]),
        _numbers("checkpoint, GB", found, lambda one: one.checkpoint_bytes / GIGA, "{:,.1f}"),
    ]
    widths = [max(len(line[column]) for line in lines if len(line) > column) for column in range(len(found) + 1)]
    return "\n".join(_aligned(line, widths) for line in lines)


def _exposed(axis: str, one: Estimate) -> float:
    return one.time.exposed.get(axis, 0.0)


def _gb(kind: str, one: Estimate) -> float:
    return _fullest(one).by_kind()[kind] / GIGA


def _fullest(one: Estimate) -> Memory:
    return max(one.memory, key=lambda rank: rank.total)


def _fit_text(one: Estimate) -> str:
    fits = "yes" if one.peak_bytes <= one.gpu.memory_bytes else "no"
    return f"{fits}, of {one.gpu.memory_gb:g} GB"


def _texts(title: str, texts: Sequence[str]) -> list[str]:
    return [title, *texts]


def _numbers(title: str, found: Sequence[Estimate], number_of: Callable[[Estimate], float], style: str) -> list[str]:
    numbers = [number_of(one) for one in found]
    ratio = [f"x {numbers[-1] / numbers[0]:.3g}"] if numbers[0] else []
    return [title, *(style.format(number) for number in numbers), *ratio]


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    cells = [f"{text:>{width}}" for text, width in zip(line[1:], widths[1:], strict=False)]
    return "  ".join([f"{line[0]:<{widths[0]}}", *cells, *line[len(widths) :]]).rstrip() if line else ""

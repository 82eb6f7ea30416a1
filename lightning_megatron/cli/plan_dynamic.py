"""A recipe with dynamic context parallelism: the documents of one of its batches, and how they are balanced."""

from dataclasses import dataclass, replace
from pathlib import Path

from lightning_megatron.context.balance import DynamicContextConfig
from lightning_megatron.models import GPTConfig
from lightning_megatron.pipeline.choice import in_groups_of
from lightning_megatron.planner.balanced import LogNormal, balanced, drawn
from lightning_megatron.planner.balanced_cost import planned_cost
from lightning_megatron.planner.constants import fitted
from lightning_megatron.planner.hardware import Gpu
from lightning_megatron.planner.rules import Facts, faults, with_context_groups
from lightning_megatron.planner.run import Run

_SHAPE = "median=TOKENS,sigma=NUMBER, or a file of lengths"


@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """The run with its balanced batch; without, where there are faults."""

    run: Run
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def with_dynamic_context(run: Run, cut: Facts, config: DynamicContextConfig, told: str | None, gpu: Gpu) -> Dynamic:
    """The recipe's run under dynamic context parallelism.

    `cut` is how the recipe cuts its batches, `told` what --document-lengths says; on the GPU documents cost what the
    recipe does not say. Raises ValueError where --document-lengths says nothing.
    """
    plain = replace(
        cut,
        model=run.model,
        sequence_length=run.texts.sequence,
        context=run.context,
        fp8=run.fp8,
        precision=run.precision,
    )
    known = faults(plain)
    if found := [fault for fault in faults(replace(plain, dynamic_context=config)) if fault not in known]:
        return Dynamic(run=run, faults=tuple(found))
    if known or not isinstance(run.model, GPTConfig):
        return Dynamic(run=run)
    rows, length = run.global_batch_size, run.texts.sequence
    lengths = (length,) * rows
    notes = [f"each row counts as one document of {length:,} tokens"]
    if told is not None:
        if not run.texts.are_packed:
            raise ValueError(
                f"--document-lengths ({told}) is for rows of packed documents, and each row of this recipe is one of "
                f"{length} tokens; leave it out"
            )
        lengths = drawn(_lengths_of(told), rows * length, longest=length)
        notes = [f"{len(lengths):,} documents, drawn by seed 0 of {told}, stand for those of every batch"]
    elif run.texts.are_packed:
        notes = [f"{notes[0]}, which takes the most; --document-lengths tells of shorter ones"]
    run, cost = replace(run, sizes=with_context_groups(run.sizes, config, run.context)), config.cost
    if cost is None:
        cost = planned_cost(run, config.max_tokens_per_rank, gpu, fitted())
        notes.append(f"documents are balanced by what they are planned to cost on {gpu.name}, which a run measures")
    step = balanced(lengths, run.sizes, config, cost, in_groups_of(run.schedule))
    return Dynamic(run=replace(run, balanced=step), notes=tuple(notes))


def _lengths_of(told: str) -> LogNormal | list[int]:
    """What --document-lengths says. Raises ValueError."""
    if Path(told).is_file():
        return _lengths_in(Path(told))
    values = dict(part.strip().partition("=")[::2] for part in told.split(","))
    try:
        numbers = {name: float(value) for name, value in values.items()}
    except ValueError:
        numbers = {}
    if set(numbers) != {"median", "sigma"}:
        raise ValueError(f"--document-lengths ({told}) must be {_SHAPE} that is there, one a line")
    try:
        return LogNormal(**numbers)
    except ValueError as error:
        raise ValueError("\n".join(f"--document-lengths: {fault}" for fault in str(error).splitlines())) from error


def _lengths_in(path: Path) -> list[int]:
    """Of a file with a number a line."""
    try:
        words = path.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--document-lengths ({path}) cannot be read as text: {error}") from error
    bad = [word for word in words if not word.isdecimal() or int(word) < 1]
    if bad or not words:
        what = f"has {bad[0]!r}" if bad else "has none"
        raise ValueError(f"--document-lengths ({path}) must have lengths of at least 1 token, one a line, and {what}")
    return [int(word) for word in words]

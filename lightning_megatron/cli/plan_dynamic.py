"""A recipe with dynamic context parallelism: the documents of one of its batches, and how they are balanced."""

from dataclasses import replace
from pathlib import Path

from lightning_megatron.cli.plan_request import PlanRequest
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.context.balance import DynamicContextConfig
from lightning_megatron.models import GPTConfig
from lightning_megatron.pipeline.registry import microbatch_multiple
from lightning_megatron.planner.balanced_batch import LogNormal, balanced, drawn, num_cut
from lightning_megatron.planner.balanced_cost import planned_cost
from lightning_megatron.planner.hardware import Gpu
from lightning_megatron.planner.run import Run
from lightning_megatron.rules.cross_config import Facts, faults, with_context_groups
from lightning_megatron.text_files import read_text

ONE_A_ROW = "each row of packed documents counts as one: attention within shorter ones takes fewer FLOPs and less time"
"""Note on a recipe that packs documents, unless their lengths are given."""
# Of a length.
_MOST_DIGITS = 12


def with_balanced_batch(request: PlanRequest[Run], option: str | None, gpu: Gpu, *, is_own: bool) -> PlanRequest[Run]:
    """The request with a balanced batch, for a recipe with dynamic context parallelism whose own layout is shown.

    `option` is the value of --document-lengths; the costs of documents are those on the GPU unless the recipe has them.
    Raises UsageError where --document-lengths is invalid, or has no effect.
    """
    config, cut = request.dynamic, request.cut
    if config is None or cut is None or not is_own:
        if option is not None:
            raise UsageError(
                [
                    f"--document-lengths ({option}) is for a recipe with dynamic_context on its own layout (--layout "
                    "recipe); leave it out"
                ]
            )
        return request
    run = request.run
    known, own = _faults(run, cut, config)
    if known or own or not isinstance(run.model, GPTConfig):
        return replace(request, run=run, faults=(*request.faults, *own))
    try:
        lengths, notes = _documents(run, option)
    except ValueError as error:
        raise UsageError(str(error).splitlines()) from error
    run, cost = replace(run, sizes=with_context_groups(run.sizes, config, run.context)), config.cost
    if cost is None:
        cost = planned_cost(run, config.max_tokens_per_rank, gpu, gpu.constants)
        notes.append(f"documents are balanced by what they are planned to cost on {gpu.name}, which a run measures")
    run = replace(run, balanced=balanced(lengths, run.sizes, config, cost, microbatch_multiple(run.schedule)))
    return replace(request, run=run, notes=(*(note for note in request.notes if note != ONE_A_ROW), *notes))


def _faults(run: Run, cut: Facts, config: DynamicContextConfig) -> tuple[list[str], list[str]]:
    """Errors of the run without dynamic context parallelism, and those that it adds."""
    plain = replace(
        cut,
        model=run.model,
        sequence_length=run.lengths.sequence,
        context=run.context,
        fp8=run.fp8,
        precision=run.precision,
    )
    known = faults(plain)
    return known, [fault for fault in faults(replace(plain, dynamic_context=config)) if fault not in known]


def _documents(run: Run, option: str | None) -> tuple[tuple[int, ...], list[str]]:
    """Lengths of the documents of a batch, and notes on them."""
    rows, length = run.global_batch_size, run.lengths.sequence
    if option is None:
        note = f"each row counts as one document of {length:,} tokens"
        more = ", which takes the most; --document-lengths tells of shorter ones" if run.lengths.are_packed else ""
        return (length,) * rows, [note + more]
    if not run.lengths.are_packed:
        raise ValueError(
            f"--document-lengths ({option}) is for rows of packed documents, and each row of this recipe is one of "
            f"{length} tokens; leave it out"
        )
    known = _lengths_of(option)
    lengths = drawn(known, rows * length, longest=length)
    notes = [f"{len(lengths):,} documents, drawn by seed 0 of {option}, stand for those of every batch"]
    if count := num_cut(known, len(lengths), longest=length):
        notes.append(f"{count:,} of them were longer than a row and are cut to its {length:,} tokens")
    return lengths, notes


def _lengths_of(option: str) -> LogNormal | list[int]:
    """Document lengths that --document-lengths gives. Raises ValueError."""
    if "=" not in option:
        return _lengths_in(Path(option))
    parts = [part.strip().partition("=")[::2] for part in option.split(",")]
    try:
        numbers = {name: float(value) for name, value in parts}
    except ValueError:
        numbers = {}
    if len(parts) != 2 or set(numbers) != {"median", "sigma"}:
        raise ValueError(
            f"--document-lengths ({option}) must be median=TOKENS,sigma=NUMBER, or a file of lengths, one a line"
        )
    try:
        return LogNormal(**numbers)
    except ValueError as error:
        raise ValueError("\n".join(f"--document-lengths: {fault}" for fault in str(error).splitlines())) from error


def _lengths_in(path: Path) -> list[int]:
    """Lengths in a file with a number a line."""
    words = read_text(path, name=f"--document-lengths ({path})").split()
    bad = [word for word in words if not word.isdecimal() or len(word) > _MOST_DIGITS or int(word) < 1]
    if bad or not words:
        what = f"has {bad[0][:40]!r}" if bad else "has none"
        raise ValueError(
            f"--document-lengths ({path}) must have lengths of at least 1 token, of at most {_MOST_DIGITS} digits, one "
            f"a line, and {what}"
        )
    return [int(word) for word in words]

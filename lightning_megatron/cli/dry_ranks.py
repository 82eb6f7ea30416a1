"""What `lightning-megatron dry-run` answers: memory, FLOPs and messages of single ranks of a run.

The package's own code builds the rank, of its models or of a model of transformers as it is, and runs its schedule on
fake tensors, which have shapes and no numbers; its allocations, FLOPs and messages are counted.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_megatron.any_module.cut_error import CutError
from lightning_megatron.cli.plan_dynamic import with_balanced_batch
from lightning_megatron.cli.plan_layout import alike_fault, explained, notes_on_layout
from lightning_megatron.cli.plan_options import OF_RECIPE
from lightning_megatron.cli.plan_request import PlanRequest, R
from lightning_megatron.cli.plan_run import asks_for_unchanged, read_run
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.planner.dry_rank import FullModel, Trained
from lightning_megatron.planner.dry_report import dry_record, dry_text
from lightning_megatron.planner.dry_run import dry_run, shown_ranks
from lightning_megatron.planner.hardware import gpu_of
from lightning_megatron.planner.held_tensors import held_tensors
from lightning_megatron.planner.run import RunSettings, UnmeasuredError
from lightning_megatron.rules.limits import limit_faults

# The GPU whose planned times balance documents where a recipe with dynamic context parallelism gives no costs.
_GPU = "h100"
# Every rank holds lists of all ranks.
_MOST_RANKS = 1_000_000


def run_dry_run(options: argparse.Namespace) -> None:
    """Prints the dry run of the ranks. Raises UsageError with all errors of the options and of the run."""
    run, trained, notes = _read(options)
    world = run.sizes.world
    if faults := limit_faults({"world size": world}, _MOST_RANKS):
        raise UsageError(faults)
    if options.rank is not None and not 0 <= options.rank < world:
        raise UsageError([f"--rank ({options.rank}) must be from 0 to world size - 1 ({world - 1})"])
    ranks = shown_ranks(run) if options.rank is None else (options.rank,)
    if options.explain and run.balanced is not None:
        raise UsageError([alike_fault("--explain")])
    try:
        with _telling(trained):
            found = [dry_run(run, rank, full_model=trained) for rank in ranks]
            held = {rank: held_tensors(run, rank, trained) for rank in ranks} if options.explain else None
    except (CutError, NotImplementedError, UnmeasuredError) as error:
        raise UsageError(str(error).splitlines()) from error
    print(json.dumps(dry_record(found, notes, held)) if options.json else dry_text(found, notes, held))


@contextmanager
def _telling(trained: Trained) -> Iterator[None]:
    """A block that tells which model does not run, where it is not the package's own."""
    if isinstance(trained, FullModel):
        yield
        return
    from lightning_megatron.cli.dry_module import quiet, telling_model

    with telling_model("does not run on tensors without numbers"), quiet():
        yield


def _read(options: argparse.Namespace) -> tuple[RunSettings, Trained, list[str]]:
    """The run, what it trains, and notes for a reader of its numbers."""
    options.num_gpus = options.world_size
    if asks_for_unchanged(options):
        # What trains takes seconds to import.
        from lightning_megatron.cli.module_run import read_module_run

        asked = read_module_run(options)
        unchanged = explained(asked.request, options)
        return unchanged, asked.module(unchanged), _notes(asked.request, options)
    is_own = options.layout in (None, OF_RECIPE)
    own = with_balanced_batch(read_run(options), options.document_lengths, gpu_of(_GPU), is_own=is_own)
    run, notes = explained(own, options), _notes(own, options)
    if run.fp8 is not None and run.fp8.engine != "torch":
        notes.append(f"fp8 engine {run.fp8.engine!r} runs dry as engine 'torch', whose layers stand for its own")
    return run, FullModel(run), notes


def _notes(request: PlanRequest[R], options: argparse.Namespace) -> list[str]:
    is_own = options.layout in (None, OF_RECIPE)
    return [*request.all_notes, *([] if is_own else notes_on_layout(request, options.layout))]

"""`lightning-megatron dry-run`: a training step of single ranks of a run, without a GPU and without the other ranks.

The package's own code builds the rank, of its models or of a model of transformers as it is, and runs its schedule on
fake tensors, which have shapes and no numbers; its allocations, FLOPs and messages are counted.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_megatron.any_module.cut_error import CutError
from lightning_megatron.cli.commands import add_command
from lightning_megatron.cli.plan_dynamic import with_balanced_batch
from lightning_megatron.cli.plan_layout import ALIKE, OF_RECIPE, explained, notes_on_layout
from lightning_megatron.cli.plan_options import add_model_options, add_run_options, require_known
from lightning_megatron.cli.plan_request import PlanRequest, R
from lightning_megatron.cli.plan_run import asks_for_unchanged, count_faults, read_run
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
_EPILOG = """\
CONFIG is what lightning-megatron plan takes: a recipe's YAML file or its name, a preset, or a Hugging Face
config.json or its folder, or owner/model on the hub. The first needs nothing more, the others a layout
and a number of ranks.
A recipe of recipes/pretrain_hf.py runs dry with the model of transformers in its model.path, of whose
folder the config.json is enough; and so does a LightningModule of yours, as in module.py:MyModule.

example:  lightning-megatron dry-run recipes/configs/gpt_1t.yaml
          lightning-megatron dry-run llama3_70b --world-size 64 --layout tp=8,pp=4 --rank 0 --json
          lightning-megatron dry-run recipes/configs/hf_toy.yaml --model Qwen3-0.6B
          lightning-megatron dry-run llama3_8b --world-size 8 --layout tp=8 --rank 0 --explain
          lightning-megatron dry-run module.py:MyModule --world-size 8 --layout pp=2 --global-batch-size 32
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command and its options."""
    parser = add_command(
        commands,
        "dry-run",
        "Runs a training step of one rank of any run, as its own code does it, on tensors that have shapes "
        "and no numbers. Tells its peak memory by kind, its FLOPs, and its messages by axis and kind.",
        run=run_dry_run,
        epilog=_EPILOG,
    )
    add_model_options(parser)
    run = parser.add_argument_group("the run")
    run.add_argument("--world-size", type=int, metavar="NUMBER", help="number of ranks (default: the recipe's)")
    run.add_argument(
        "--rank",
        type=int,
        metavar="RANK",
        help="global rank (default: of the first, the middle and the last stage)",
    )
    run.add_argument("--layout", metavar="SIZES", help="layout, as in tp=8,pp=64,mbs=1 (default: the recipe's)")
    add_run_options(run, default_recompute="the recipe's")
    parser.add_argument(
        "--explain",
        action="store_true",
        help="print activations and others at the peak of memory by the module and the line of code that made them; "
        "with --json weights, gradients and moments too",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(world_option="--world-size")


def run_dry_run(options: argparse.Namespace) -> None:
    """Prints the dry run of the ranks. Raises UsageError with all errors of the options and of the run."""
    require_known(options.config)
    run, trained, notes = _read(options)
    world = run.sizes.world
    if faults := limit_faults({"world size": world}, _MOST_RANKS):
        raise UsageError(faults)
    if options.rank is not None and not 0 <= options.rank < world:
        raise UsageError([f"--rank ({options.rank}) must be from 0 to world size - 1 ({world - 1})"])
    ranks = shown_ranks(run) if options.rank is None else (options.rank,)
    if options.explain and run.balanced is not None:
        raise UsageError([ALIKE])
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
    counts = ("world_size", "global_batch_size", "sequence_length", "decoder_sequence_length")
    if faults := count_faults(options, counts):
        raise UsageError(faults)
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

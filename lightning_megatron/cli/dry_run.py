"""`lightning-megatron dry-run`: a training step of single ranks of a run, without a GPU and without the other ranks."""

import argparse
from typing import Any

from lightning_megatron.cli.commands import add_command
from lightning_megatron.cli.plan_options import add_model_options, add_run_options, count_faults, known_faults
from lightning_megatron.cli.usage import UsageError

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
        run=_run,
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


def _run(options: argparse.Namespace) -> None:
    counts = ("world_size", "global_batch_size", "sequence_length", "decoder_sequence_length")
    if faults := known_faults(options.config) + count_faults(options, counts):
        raise UsageError(faults)
    # The planner takes seconds to import, and a name that is wrong, or a look at the help, need not wait for it.
    from lightning_megatron.cli.dry_ranks import run_dry_run

    run_dry_run(options)

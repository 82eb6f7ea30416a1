"""`lightning-megatron plan`: which layouts of a model fit on so many GPUs, how fast each is, and why others do not."""

import argparse
import math
from pathlib import Path
from typing import Any

from lightning_megatron.cli.commands import add_command
from lightning_megatron.cli.picture import add_out, out_faults
from lightning_megatron.cli.plan_options import (
    PRESETS,
    SHOWN,
    add_model_options,
    add_run_options,
    count_faults,
    gpu_of_options,
    known_faults,
)

_EPILOG = f"""\
CONFIG is a recipe's YAML file or its name, a preset ({", ".join(PRESETS)}), or a Hugging Face config.json,
of any name, or its folder, or owner/model on the Hugging Face hub.
A recipe of recipes/pretrain_hf.py is planned with the model of transformers in its model.path, of whose
folder the config.json is enough, and so is a LightningModule of yours, as in module.py:MyModule: every
layout is measured, which takes seconds each.

example:  lightning-megatron plan llama3_70b --gpu h100 --num-gpus 64
          lightning-megatron plan recipes/configs/hf_toy.yaml --model Qwen3-0.6B --gpu h100 --layout tp=2,pp=2
          lightning-megatron plan recipes/configs/gpt_1t.yaml --gpu a100-80gb --layout recipe --tokens 450e9
          lightning-megatron plan module.py:MyModule --gpu h100 --num-gpus 8 --global-batch-size 32
          lightning-megatron plan --compare recipes/configs/bert_base.yaml recipes/configs/bert_large.yaml --gpu h100
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command and its options."""
    parser = add_command(
        commands,
        "plan",
        "Predicts memory and step time of every layout of a model on so many GPUs, the fastest that fits "
        "first, without a GPU.",
        run=_run,
        epilog=_EPILOG,
    )
    add_model_options(parser)
    machine = parser.add_argument_group("the machine")
    machine.add_argument("--gpu", required=True, metavar="NAME", help="a known GPU, or a YAML file that describes one")
    machine.add_argument("--num-gpus", type=int, metavar="NUMBER", help="GPUs in all (default: those of the recipe)")
    machine.add_argument("--memory-gb", type=float, metavar="GB", help="usable memory of a GPU (default: all)")
    run = parser.add_argument_group("the run")
    add_run_options(run, default_recompute="none where that fits")
    run.add_argument("--layout", metavar="SIZES", help="explain one layout, as in tp=8,pp=64,mbs=1, or recipe")
    run.add_argument("--tokens", type=float, metavar="NUMBER", help="print the days that so many tokens take")
    output = parser.add_argument_group("the output")
    output.add_argument("--top", type=int, metavar="NUMBER", help=f"number of layouts to show (default: {SHOWN})")
    output.add_argument(
        "--compare",
        metavar="CONFIG",
        help="print CONFIG beside this one, each on its own layout or on --layout",
    )
    output.add_argument(
        "--explain",
        action="store_true",
        help="print activations and others at the peak of the fullest rank of the layout, or of the best, by the "
        "module and the line of code that made them; with --json weights, gradients and moments too",
    )
    output.add_argument(
        "--explain-time",
        action="store_true",
        help="print the step's time on the slowest rank of the layout, or of the best, by the module whose kernels and "
        "messages take it",
    )
    output.add_argument("--json", action="store_true", help="print everything as JSON")
    output.add_argument(
        "--cache", type=Path, metavar="FOLDER", help="of measurements (default: ~/.cache/lightning_megatron/plans)"
    )
    add_out(output, "the layout, or of the best")
    parser.set_defaults(world_option="--num-gpus")


def _run(options: argparse.Namespace) -> None:
    gpu = gpu_of_options(options, _faults(options))
    # The planner takes seconds to import, and a name that is wrong, or a look at the help, need not wait for it.
    from lightning_megatron.cli.planning import run_plan

    run_plan(options, gpu)


def _faults(options: argparse.Namespace) -> list[str]:
    """Errors that show without the planner."""
    names = [config for config in (options.config, options.compare) if config is not None]
    counts = ("num_gpus", "global_batch_size", "sequence_length", "decoder_sequence_length", "top")
    faults = [fault for config in names for fault in known_faults(config)] + count_faults(options, counts)
    faults += [
        f"--{name} ({value}) must be a number above 0"
        for name, value in (("tokens", options.tokens), ("memory-gb", options.memory_gb))
        if value is not None and not (math.isfinite(value) and value > 0)
    ]
    return faults + _unused(options) + out_faults(options.out)


def _unused(options: argparse.Namespace) -> list[str]:
    """Errors about options that another one leaves without effect."""
    if options.compare is not None:
        given = {
            "--top": options.top,
            "--out": options.out,
            "--explain": options.explain or None,
            "--explain-time": options.explain_time or None,
        }
        return [
            f"{name} ({value}) has no effect with --compare, which prints a table of two runs; leave one out"
            for name, value in given.items()
            if value is not None
        ]
    if options.layout is not None and options.top is not None:
        return [f"--top ({options.top}) is for a search, and --layout explains one layout; leave one out"]
    return []

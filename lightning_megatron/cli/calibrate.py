"""`lightning-megatron calibrate`: a GPU's file whose constants fit steps that were measured on the user's own cluster.

Each step is a file of the callback `StepTimeline`, beside the recipe that was trained.
"""

import argparse
from pathlib import Path
from typing import Any

from lightning_megatron.cli.commands import add_command
from lightning_megatron.cli.plan_options import OF_RECIPE, gpu_of_options

# Options of a plan that a recipe which was trained does not need.
_OF_PLAN = (
    *("model", "model_kind", "data", "precision", "global_batch_size", "sequence_length"),
    *("decoder_sequence_length", "document_lengths", "recompute", "num_gpus", "memory_gb"),
)
_EPILOG = """\
CONFIG is the recipe that was trained, on its own layout: the config.yaml that Lightning writes where it logs. TIMELINE
is the step_N.json of lightning_megatron.trainer.callbacks.StepTimeline. More pairs of both, of other models and
layouts, tell more of the constants.

example:  lightning-megatron calibrate logs/config.yaml logs/step_20.json --gpu h100 --out ours.yaml
          lightning-megatron plan llama3_70b --gpu ours.yaml --num-gpus 64
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command and its options."""
    parser = add_command(
        commands,
        "calibrate",
        "Fits the constants of the planner's time model to steps that StepTimeline measured on your GPUs, and writes "
        "them into a GPU's file, which plan takes by --gpu.",
        run=_run,
        epilog=_EPILOG,
    )
    parser.add_argument("runs", nargs="+", metavar="CONFIG TIMELINE", help="a recipe and a measured step of its run")
    parser.add_argument("--gpu", required=True, metavar="NAME", help="a known GPU, or a YAML file that describes one")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the GPU's file to write: FILE.yaml")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--cache", type=Path, metavar="FOLDER", help="of measurements (default: ~/.cache/lightning_megatron/plans)"
    )
    parser.set_defaults(**dict.fromkeys(_OF_PLAN), fp8=False, layout=OF_RECIPE, world_option="the recipe's devices")


def _run(options: argparse.Namespace) -> None:
    gpu = gpu_of_options(options, _faults(options))
    # The planner takes seconds to import, and a name that is wrong, or a look at the help, need not wait for it.
    from lightning_megatron.cli.calibration import run_calibrate

    run_calibrate(options, gpu)


def _faults(options: argparse.Namespace) -> list[str]:
    """Errors that show without the planner."""
    faults = []
    if len(options.runs) % 2:
        faults.append(f"CONFIG TIMELINE must come in pairs, and {options.runs[-1]} is alone; give its other half")
    if options.out.suffix not in (".yaml", ".yml"):
        faults.append(f"--out ({options.out}) must end in .yaml or .yml, by which --gpu knows a file; use another name")
    faults += [
        f"TIMELINE ({timeline}) does not exist; give a step_N.json that StepTimeline wrote"
        for timeline in options.runs[1::2]
        if not Path(timeline).exists()
    ]
    if any(options.out.resolve() == Path(one).resolve() for one in options.runs):
        faults.append(f"--out ({options.out}) is a file that is read, and would be lost; use another name")
    return faults

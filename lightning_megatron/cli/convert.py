"""`lightning-megatron convert`: between a folder with a Hugging Face model and a checkpoint directory.

The kind of the source decides the direction, and the target's name with --upcycle, which may keep the format.
"""

import argparse
from pathlib import Path
from typing import Any

from lightning_megatron.cli.commands import add_command
from lightning_megatron.cli.source import source_faults
from lightning_megatron.cli.usage import UsageError

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Values of `--dtype`."""
MAX_SHARD_BYTES = 5 * 2**30
"""Default of `--max-shard-bytes`: that of `hf.shards`, which a test compares with it."""
_EPILOG = """\
The checkpoint holds the weights of the submodule 'model' of a LightningModule: use it as ckpt_path of validate, test
and predict. It has no optimizer states; to start a fit, use lightning_megatron.hf.from_pretrained instead.

examples:
  lightning-megatron convert llama/ llama.ckpt
  lightning-megatron convert last.ckpt out/ --family llama --dtype bfloat16 --tokenizer-from llama/
  lightning-megatron convert llama/ experts/ --upcycle moe.yaml --tokenizer-from llama/
  lightning-megatron convert last.ckpt out/ --model-from gemma/    # trained as transformers has it
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command and its options."""
    parser = add_command(
        commands,
        "convert",
        "Converts a Hugging Face model folder into a checkpoint directory, or a checkpoint directory into such a "
        "folder. Holds one tensor in memory at a time, and of a model that was trained as transformers has it also "
        "what transformers writes in other pieces, such as experts.",
        run=_run,
        epilog=_EPILOG,
    )
    parser.add_argument("source", metavar="SOURCE", help="a folder with a config.json, or a checkpoint")
    parser.add_argument("target", metavar="TARGET", help="a path that does not exist; a checkpoint ends in .ckpt")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the written weights (default: as in SOURCE)")
    parser.add_argument("--json", action="store_true", help="print what was done as JSON")
    parser.add_argument(
        "--upcycle",
        type=Path,
        metavar="FILE",
        help="YAML or JSON file with fields of an MoEConfig: turns a dense model into a mixture of experts that "
        "starts with the same output; TARGET may have either format",
    )
    source = parser.add_argument_group("options if SOURCE is a checkpoint")
    source.add_argument(
        "--submodule", metavar="NAME", help="name of the model in the LightningModule, if it has several"
    )
    source.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML or JSON file with the model's fields, if the checkpoint lacks them",
    )
    source.add_argument(
        "--model-from",
        metavar="FOLDER",
        help="folder, or owner/model on the hub, with the config.json of a model of transformers that was trained as "
        "it is (default: the path that the checkpoint's hyper-parameters name, if it is there)",
    )
    out = parser.add_argument_group("options if TARGET is a folder")
    out.add_argument("--family", metavar="NAME", help="model_type to write, if several fit")
    out.add_argument(
        "--tokenizer-from",
        type=Path,
        metavar="FOLDER",
        help="copy the tokenizer's files from this folder (default of a model of transformers: that of --model-from)",
    )
    out.add_argument(
        "--max-shard-bytes",
        type=int,
        default=MAX_SHARD_BYTES,
        metavar="BYTES",
        help=f"largest size of a file of weights (default: {MAX_SHARD_BYTES})",
    )


def _run(options: argparse.Namespace) -> None:
    if faults := source_faults(options.source, "SOURCE"):
        raise UsageError(faults)
    # Weights are tensors: torch takes a second to import, which a look at the help need not wait for.
    from lightning_megatron.cli.conversion import run_convert

    run_convert(options)

"""Options of the commands that plan a run, and their errors, without what plans, which takes seconds to import.

The names are those of the planner, which a test compares with these.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches

from lightning_megatron.cli.shipped_recipes import shipped_recipes
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.planner.hardware import Gpu, gpu_of
from lightning_megatron.rules.limits import MOST, limit_faults, shown

PRESETS = (
    *("gpt2_124m", "gpt3_175b", "gpt_1t", "llama3_8b", "llama3_70b", "llama3_405b"),
    *("mixtral_8x7b", "mixtral_8x22b", "qwen3_30b_a3b", "bert_large", "t5_11b", "llava_7b"),
)
"""Names of the planner's presets."""
MODEL_KINDS = ("gpt", "bert", "t5", "llava")
"""Values of `--model-kind`."""
PRECISIONS = ("bf16-mixed", "bf16-true", "16-mixed", "32-true", "64-true")
"""Values of `--precision`."""
OF_RECIPE = "recipe"
"""Word for the own layout, stages or schedule of a recipe, as a value of `--layout` or in it."""
SHOWN = 10
"""Layouts that a search shows."""
# What a path, a file of a module with its class and a model of the hub have, and no name of a preset or a recipe.
_OF_NO_NAME = (os.sep, ":", ".")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `read_run` takes the model from."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        help="a recipe's YAML or name, a preset, a Hugging Face config.json, folder or name, or a module of yours as "
        "module.py:MyModule",
    )
    parser.add_argument(
        "--data",
        metavar="DATA",
        help="for a module of yours: data module, or a function that makes a loader or a list of batches, as in "
        "module.py:MyData (default: the module's own train_dataloader)",
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="for a module of yours: precision of its Trainer (default: 32-true)",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="for a recipe that starts from a folder: another folder, config.json, preset, or owner/model on the hub",
    )
    parser.add_argument(
        "--model-kind",
        choices=MODEL_KINDS,
        help="kind of model in a recipe (default: by its fields)",
    )


def add_run_options(group: "argparse._ArgumentGroup", *, default_recompute: str) -> None:
    """Adds the options that change a recipe's run, or complete a model to one."""
    group.add_argument(
        "--global-batch-size",
        type=int,
        metavar="SAMPLES",
        help="samples in a batch (default: the recipe's)",
    )
    group.add_argument(
        "--sequence-length", type=int, metavar="TOKENS", help="tokens in a sample (default: the recipe's)"
    )
    group.add_argument("--decoder-sequence-length", type=int, metavar="TOKENS", help="tokens in a T5's target")
    group.add_argument(
        "--document-lengths",
        metavar="LENGTHS",
        help="lengths of packed documents, for a recipe with dynamic_context: median=TOKENS,sigma=NUMBER, or a file of "
        "lengths, one a line",
    )
    group.add_argument("--fp8", action="store_true", help="run the layers' linears in FP8")
    group.add_argument(
        "--recompute",
        choices=("none", "selective", "full"),
        help=f"activation recomputation (default: {default_recompute})",
    )


def known_faults(config: str) -> list[str]:
    """Errors of a CONFIG that is a bare name of nothing: no file, no folder, no preset and no recipe."""
    # Also a link that leads nowhere, which has an error of its own.
    is_there = os.path.lexists(config)
    if not config.strip() or any(mark in config for mark in _OF_NO_NAME) or config in PRESETS or is_there:
        return []
    recipes = [recipe.name for recipe in shipped_recipes()]
    if config in recipes:
        return []
    nearest = get_close_matches(config, [*PRESETS, *recipes], n=2)
    hint = [f"did you mean {' or '.join(nearest)}?"] if nearest else []
    presets = f"presets are {', '.join(PRESETS)}, and lightning-megatron recipes lists the recipes"
    return [f"{config!r} is no file, folder, preset or recipe", presets, *hint]


def count_faults(options: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Errors in options that count something."""
    values = {f"--{name.replace('_', '-')}": getattr(options, name) for name in names}
    counts = {name: count for name, count in values.items() if count is not None}
    faults = [f"{name} ({shown(count)}) must be at least 1" for name, count in counts.items() if count < 1]
    return faults + limit_faults(counts, MOST)


def gpu_of_options(options: argparse.Namespace, faults: Sequence[str] = ()) -> Gpu:
    """The GPU that the options name. Raises UsageError with other `faults` of theirs and what is wrong with it."""
    try:
        gpu = gpu_of(options.gpu)
    except ValueError as error:
        raise UsageError([*faults, *str(error).splitlines()]) from error
    if faults:
        raise UsageError(faults)
    return gpu if options.memory_gb is None else replace(gpu, memory_gb=options.memory_gb)

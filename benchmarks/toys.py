"""Loss of the toy configurations against that of a model that knows token frequencies alone, in nats a target.

Of each toy the targets of its validation samples are counted, as its data module makes them: the entropy of their
frequencies is the least loss of a model that gives each target the same chances everywhere, even if these are of the
very samples that it is measured on. Next to it is the last validation of a run: the logarithm of `val_perplexity`,
which is the mean negative log-likelihood of the labels alone.

    python benchmarks/toys.py                        runs that are in runs/, as the recipes leave them
    python benchmarks/toys.py bert_toy --max-steps 50   trains a BERT so long first
"""

import argparse
import csv
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lightning_megatron.lightning_modules.text_data import TextDataModule

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
_WAYS_OUT = "train one by --max-steps, or name others by --runs"


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A toy configuration."""

    recipe: str
    data: str
    """Name of its data module, without the ending Module."""
    links: Mapping[str, str]
    """Options of the data module that the recipe takes from those of the model, by their paths there."""


TOYS = {
    "toy": Toy(recipe="pretrain_gpt.py", data="GPTData", links={"vocab_size": "vocab_size"}),
    "bert_toy": Toy(
        recipe="pretrain_bert.py",
        data="BertData",
        links={"vocab_size": "vocab_size", "sentence_order": "add_binary_head"},
    ),
    "t5_toy": Toy(recipe="pretrain_t5.py", data="T5Data", links={"vocab_size": "vocab_size"}),
    "llava_toy": Toy(
        recipe="pretrain_llava.py",
        data="LlavaData",
        links={
            "vocab_size": "vocab_size",
            "image_token": "image_token",
            "keeps_class_token": "keeps_class_token",
            "image_size": "vision.image_size",
            "patch_size": "vision.patch_size",
        },
    ),
}


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """Losses of a toy run."""

    steps: int
    num_targets: int
    entropy: float
    """Entropy of the frequencies of the targets, in nats."""
    entropy_of_all: float
    """Entropy over all that is held out, of which validation may take a part."""
    loss: float
    """Mean negative log-likelihood of a target, in nats."""
    accuracy: float


def entropy_of(counts: "NDArray[np.float64]") -> float:
    """The entropy of frequencies in nats: the least mean loss of a model that gives the same chances everywhere."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def target_counts(data: "TextDataModule", limit: int | float | None) -> "NDArray[np.float64]":
    """Counts of each token as a target in the first validation batches, weighted by `loss_mask`: [V].

    `limit` is a Trainer's `limit_val_batches`: so many batches, or a share of them.
    """
    [loader] = data.val_dataloader()
    counts = np.zeros(data.config.vocab_size)
    for batch in islice(loader, int(limit * len(loader)) if isinstance(limit, float) else limit):
        is_target = batch["labels"] >= 0
        labels, weights = batch["labels"][is_target].numpy(), batch["loss_mask"][is_target].double().numpy()
        counts += np.bincount(labels, weights, minlength=data.config.vocab_size)
    return counts


def data_of(toy: Toy, config: Mapping[str, Any], cache_directory: Path) -> "TextDataModule":
    """The data module of a configuration, as its recipe makes it."""
    from lightning_megatron import lightning_modules

    linked = {name: _at(config["model"]["config"], path) for name, path in toy.links.items()}
    given = {name: value for name, value in linked.items() if value is not None}
    options = {**config["data"], **given, "cache_directory": str(cache_directory)}
    make_data, make_config = (getattr(lightning_modules, f"{toy.data}{kind}") for kind in ("Module", "Config"))
    data: TextDataModule = make_data(make_config(**options))
    data.setup("fit")
    return data


def newest_run(folder: Path) -> Path:
    """The newest run of a folder that recipes log in. Raises ValueError without one."""
    runs = [file.parent for file in folder.glob("version_*/metrics.csv")]
    if not runs:
        raise ValueError(f"{folder} has no run; {_WAYS_OUT}")
    return max(runs, key=lambda run: int(run.name.split("_")[1]))


def last_validation(run: Path) -> dict[str, float]:
    """Steps, loss and accuracy of the last validation of a run. Raises ValueError where there was none."""
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row.get("val_perplexity")]
    if not rows:
        raise ValueError(f"{run} was never validated; {_WAYS_OUT}")
    row = rows[-1]
    return {
        # Lightning counts steps from 0.
        "steps": int(row["step"]) + 1,
        "loss": math.log(float(row["val_perplexity"])),
        "accuracy": float(row["val_accuracy"]),
    }


def train(name: str, runs: Path, max_steps: int) -> None:
    """Runs a toy's recipe up to so many steps, with one validation at their end. Raises ValueError where it fails."""
    options = {
        "trainer.max_steps": max_steps,
        "trainer.val_check_interval": max_steps,
        "trainer.logger.init_args.save_dir": runs,
        "data.cache_directory": runs / "data",
    }
    command = [sys.executable, RECIPES / TOYS[name].recipe, "fit", "--config", RECIPES / "configs" / f"{name}.yaml"]
    command += [f"--{option}={value}" for option, value in options.items()]
    if (code := subprocess.run(command, check=False).returncode) != 0:
        raise ValueError(f"{name}: {TOYS[name].recipe} ended with exit code {code}; above stands why")


def learnt(name: str, runs: Path) -> Learnt:
    """Losses of the newest run of a toy, with the targets that it was validated on. Raises ValueError where that
    run has not logged them."""
    run = newest_run(runs / name)
    validation: Any = last_validation(run)
    if not (run / "config.yaml").is_file():
        raise ValueError(f"{run} has no config.yaml, which says what it was validated on; {_WAYS_OUT}")
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    data = data_of(TOYS[name], config, runs / "data")
    counts = target_counts(data, config["trainer"].get("limit_val_batches"))
    return Learnt(
        num_targets=int(counts.sum()),
        entropy=entropy_of(counts),
        entropy_of_all=entropy_of(target_counts(data, None)),
        **validation,
    )


def table_of(found: Mapping[str, Learnt]) -> str:
    """The figures as a table."""
    lines = [
        "| configuration | steps | targets | entropy of frequencies | of all held out | loss | right |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {one.steps} | {one.num_targets:,} | {one.entropy:.3f} | {one.entropy_of_all:.3f} | {one.loss:.3f}"
        f"{'' if one.loss < one.entropy else ', not below'} | {one.accuracy:.1%} |"
        for name, one in found.items()
    ]
    return "\n".join(lines)


def _at(config: Mapping[str, Any], path: str) -> Any:
    """The value at a path like "vision.image_size"; None where there is none."""
    value: Any = config
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def main() -> None:
    from benchmarks.machine import as_line, machine

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("toys", nargs="*", metavar="TOY", help=f"of {', '.join(TOYS)} (default: all)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the recipes log (default: runs)")
    parser.add_argument("--max-steps", type=int, help="train so long first; else runs that are there are read")
    parser.add_argument("--json", type=Path, help="where to save the figures")
    arguments = parser.parse_args()
    names = arguments.toys or list(TOYS)
    if unknown := [name for name in names if name not in TOYS]:
        parser.error(f"{', '.join(unknown)}: no such toy; there are {', '.join(TOYS)}")
    if arguments.max_steps is not None and arguments.max_steps < 1:
        parser.error(f"--max-steps ({arguments.max_steps}) must be at least 1")
    try:
        if arguments.max_steps is not None:
            for name in names:
                train(name, arguments.runs, arguments.max_steps)
        found = {name: learnt(name, arguments.runs) for name in names}
    except ValueError as error:
        parser.error(str(error))
    print(f"{as_line(machine())}\n\n{table_of(found)}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({name: asdict(one) for name, one in found.items()}, indent=1))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()

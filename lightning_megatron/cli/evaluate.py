"""`lightning-megatron evaluate`: how well a model predicts a text, on any layout; and the tasks of lm-eval.

The model is a folder of transformers, such as a run exports, or a checkpoint. The text is cut into windows side by
side, so that every token but the first is predicted once; a token at the start of a window sees none before it.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from lightning_megatron.cli.commands import add_command
from lightning_megatron.cli.source import source_faults
from lightning_megatron.cli.usage import UsageError

_EPILOG = """\
MODEL is a folder with a Hugging Face model, or a checkpoint directory of a run. Perplexity is per token of its own
tokenizer; bits per byte compare models of different tokenizers.

example:  lightning-megatron evaluate tuned/ --path held_out.txt
          lightning-megatron evaluate step=200.ckpt --path held_out.txt --tokenizer tokenizer.json
          lightning-megatron evaluate Llama-3-70B/ --path held_out.jsonl --layout tp4pp2 --precision bf16-true
          lightning-megatron evaluate tuned/ --tasks hellaswag,arc_easy
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command and its options."""
    parser = add_command(
        commands,
        "evaluate",
        "Tells the perplexity of a text under a model, on one device or on a layout, and runs tasks of lm-eval where "
        "that is installed.",
        run=_run,
        epilog=_EPILOG,
    )
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder, or a checkpoint directory")
    text = parser.add_argument_group("perplexity of a text")
    text.add_argument("--path", metavar="PATH", help="file, directory or pattern of text")
    text.add_argument("--dataset", metavar="NAME", help="a data set that datasets loads, in place of --path")
    text.add_argument("--split", default="test", metavar="NAME", help="split of --dataset (default: test)")
    text.add_argument("--text-column", default="text", metavar="NAME", help="column of tables (default: text)")
    text.add_argument(
        "--tokenizer", metavar="PATH", help="tokenizer file or folder (default: that of the model's folder)"
    )
    text.add_argument(
        "--sequence-length", type=int, default=1024, metavar="TOKENS", help="tokens of a window (default: 1024)"
    )
    text.add_argument(
        "--batch-size", type=int, default=8, metavar="WINDOWS", help="windows at a time on all ranks (default: 8)"
    )
    machine = parser.add_argument_group("where it runs")
    machine.add_argument(
        "--layout", metavar="NAME", help="axes with their sizes, as in tp2 or dp2pp2 (default: one device)"
    )
    machine.add_argument("--num-nodes", type=int, default=1, metavar="NUMBER", help="machines (default: 1)")
    machine.add_argument("--accelerator", default="auto", metavar="NAME", help="cpu, gpu or auto (default: auto)")
    machine.add_argument(
        "--precision", default="32-true", metavar="NAME", help="precision of the Trainer (default: 32-true)"
    )
    tasks = parser.add_argument_group("tasks of lm-eval, on a folder and one device")
    tasks.add_argument("--tasks", metavar="NAMES", help="tasks, with commas between them")
    tasks.add_argument("--task-path", metavar="FOLDER", help="folder of further tasks, as lm-eval's include_path")
    tasks.add_argument("--num-fewshot", type=int, metavar="NUMBER", help="examples in a prompt (default: the task's)")
    tasks.add_argument("--limit", type=int, metavar="NUMBER", help="documents of a task (default: all)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def _run(options: argparse.Namespace) -> None:
    _require_sense(options)
    # What evaluates takes seconds to import.
    from lightning_megatron.cli.evaluate_tasks import task_results
    from lightning_megatron.cli.evaluate_text import text_results

    found: dict[str, Any] = {"model": options.model}
    if options.path is not None or options.dataset is not None:
        results = text_results(options)
        if results is None:
            # The first rank tells.
            return
        found |= results
    if options.tasks is not None:
        found["tasks"] = task_results(options)
    if options.json:
        print(json.dumps(found))
        return
    if "tokens" in found:
        print(
            f"{found['tokens']:,} tokens of {found['bytes']:,} bytes in windows of {options.sequence_length}\n"
            f"loss {found['loss']:.4f} nats a token, perplexity {found['perplexity']:.4g}, "
            f"{found['bits_per_byte']:.4f} bits a byte"
        )
    for task, metrics in found.get("tasks", {}).items():
        print(f"{task}: " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))


def _require_sense(options: argparse.Namespace) -> None:
    """Raises UsageError with all errors of the options that show without reading the model."""
    nowhere = source_faults(options.model, "MODEL")
    faults = nowhere + [
        f"--{name} ({value}) must be at least 1"
        for name, value in (
            ("sequence-length", options.sequence_length),
            ("batch-size", options.batch_size),
            ("num-nodes", options.num_nodes),
        )
        if value < 1
    ]
    given = [name for name in ("path", "dataset") if getattr(options, name) is not None]
    if len(given) == 2:
        faults.append("--path and --dataset are both given; one text is read")
    if not given and options.tasks is None:
        faults.append("nothing to evaluate on; give a text by --path or --dataset, or --tasks of lm-eval")
    if options.tasks is not None and options.layout is not None and not given:
        faults.append(f"--layout ({options.layout}) is for a text; tasks of lm-eval run on one device")
    if options.tasks is not None and not nowhere and not (Path(options.model) / "config.json").is_file():
        faults.append(
            f"--tasks need a folder with a Hugging Face model, and {options.model} is none; write one of a checkpoint: "
            f"lightning-megatron convert {options.model} FOLDER"
        )
    if faults:
        raise UsageError(faults)


def figures(loss: float, num_tokens: int, num_bytes: int) -> dict[str, Any]:
    """The figures of a text by the mean loss of its tokens in nats."""
    return {
        "tokens": num_tokens,
        "bytes": num_bytes,
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": loss * num_tokens / num_bytes / math.log(2),
    }

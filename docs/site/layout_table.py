"""The table of `docs/layouts.md`: the fastest layout that `lightning-megatron plan` finds for known models.

python docs/site/layout_table.py            # prints it
python docs/site/layout_table.py --write    # puts it in its place in the page
"""

import argparse
import contextlib
import io
import json
import re
from pathlib import Path

from lightning_megatron.cli.main import main

PAGE = Path(__file__).resolve().parents[1] / "layouts.md"
GPU = "h100"
RUNS = [
    ("gpt2_124m", 8),
    ("bert_large", 8),
    ("llava_7b", 8),
    ("llama3_8b", 8),
    ("llama3_8b", 64),
    ("qwen3_30b_a3b", 64),
    ("mixtral_8x7b", 64),
    ("llama3_70b", 64),
    ("llama3_70b", 512),
    ("mixtral_8x22b", 128),
    ("gpt3_175b", 1024),
    ("llama3_405b", 4096),
    ("gpt_1t", 3072),
]
HEAD = (
    "| model | parameters | GPUs | tp | pp | vp | cp | ep | dp | microbatch | recompute | GB | tokens/s a GPU | MFU |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|--:|--:|--:|\n"
)


def row(model: str, num_gpus: int) -> str:
    """One line of the table: the fastest layout of a model on that many GPUs."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(["plan", model, "--gpu", GPU, "--num-gpus", str(num_gpus), "--top", "1", "--json"])
    assert code == 0
    plan = json.loads(printed.getvalue())
    best = plan["layouts"][0]
    sizes = best["sizes"]
    memory = max(rank["total"] for rank in best["memory_bytes"]) / 1e9
    axes = " | ".join(str(sizes[axis]) for axis in ("tp", "pp", "vp", "cp", "ep", "dp"))
    speed = f"{best['tokens_per_second'] / num_gpus:,.0f} | {best['flops'][0]['share_of_peak']:.0%}"
    return (
        f"| `{model}` | {plan['parameters'] / 1e9:,.2f} billion | {num_gpus:,} | {axes} | {best['micro_batch_size']} | "
        f"{best['recompute']} | {memory:.0f} | {speed} |\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The fastest layouts of known models, by the planner.")
    parser.add_argument("--write", action="store_true", help="put the table in its place in docs/layouts.md")
    options = parser.parse_args()
    rows = ""
    for run in RUNS:
        rows += row(*run)
        print(rows.splitlines()[-1], flush=True)
    if options.write:
        text = PAGE.read_text()
        PAGE.write_text(re.sub(r"^\| model \| parameters .*?\n(?!\|)", lambda _: HEAD + rows, text, flags=re.M | re.S))

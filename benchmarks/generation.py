"""Cost of a generated token: with a key-value cache, from complete texts, and in transformers' `generate`, on CPUs.

The same random Llama in float32, the same prompts, greedy, one thread a rank. Each sample is a fresh set of processes:
a short text to warm up, then a timed one; rounds are interleaved. CPU seconds are those of one rank, as a mean over
ranks. A row counts only where its texts are those of transformers, token for token; otherwise the exit status is 1.

    python benchmarks/generation.py --rounds 3
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    Write = Callable[[Tensor, int], list[list[int]]]

SIZES: dict[str, dict[str, int]] = {
    "full": {"layers": 6, "hidden": 384, "heads": 6, "ffn": 1024, "vocabulary": 8192}
    | {"rows": 4, "prompt": 128, "new": 64},
    "smoke": {"layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "vocabulary": 64} | {"rows": 2, "prompt": 5, "new": 6},
}
YARDSTICK = "transformers"
ROWS = {YARDSTICK: 1, "ours": 1, "ours, whole texts": 1, "ours, tp 2": 2}
"""The number of ranks of each row."""


def save_model(size: dict[str, int], folder: Path) -> None:
    """The model that all rows read, as transformers writes it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=size["layers"],
        hidden_size=size["hidden"],
        intermediate_size=size["ffn"],
        num_attention_heads=size["heads"],
        vocab_size=size["vocabulary"],
        max_position_embeddings=size["prompt"] + size["new"],
        tie_word_embeddings=False,
        # Large, so that no two tokens are nearly as likely.
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def run_rank(row: str, size: dict[str, int], folder: Path) -> dict[str, Any]:
    """One sample of a row, on the rank of its environment."""
    import torch

    torch.set_num_threads(1)
    write = theirs(folder) if row == YARDSTICK else ours(folder, is_uncached="whole" in row)
    shape = (size["rows"], size["prompt"])
    prompts = torch.randint(size["vocabulary"], shape, generator=torch.Generator().manual_seed(1))
    write(prompts, 2)
    cpu_seconds, wall_seconds = time.process_time(), time.perf_counter()
    texts = write(prompts, size["new"])
    return {
        "cpu_seconds": time.process_time() - cpu_seconds,
        "wall_seconds": time.perf_counter() - wall_seconds,
        "texts": texts,
    }


def theirs(folder: Path) -> "Write":
    import torch
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(folder).eval()

    def write(prompts: "Tensor", num_new: int) -> list[list[int]]:
        texts: list[list[int]] = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=num_new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        ).tolist()
        return texts

    return write


def ours(folder: Path, *, is_uncached: bool) -> "Write":
    import torch
    import torch.distributed as dist

    from lightning_megatron import hf
    from lightning_megatron.mesh import Mesh, Sizes
    from lightning_megatron.models.generation import GPTNextLogits, generate_rows
    from lightning_megatron.models.sampling import GenerationConfig
    from lightning_megatron.transformer.decode_state import DecodeState

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world > 1 else 0
    model: Any = hf.from_pretrained(folder, Mesh.build(Sizes(world=world, tp=world), rank, dist.new_group)).eval()

    def uncached_logits(text_BL: "Tensor", lengths_B: "Tensor") -> "Tensor":
        rows_B = torch.arange(len(text_BL))
        seen_B = torch.zeros_like(lengths_B)
        all_of_it = DecodeState(lengths_B=lengths_B, seen_B=seen_B, rows_B=rows_B, cache=None)
        logits_BV: Tensor = model(text_BL[:, : int(lengths_B.max())], decode_state=all_of_it)
        return logits_BV

    def write_texts(prompts: "Tensor", num_new: int) -> list[list[int]]:
        num_rows, length = prompts.shape
        texts = generate_rows(
            uncached_logits if is_uncached else GPTNextLogits(model, num_rows),
            prompts,
            torch.full((num_rows,), length),
            GenerationConfig(max_new_tokens=num_new, temperature=0.0),
            samples_B=torch.arange(num_rows),
            sharing=(model.mesh.tp,),
        )
        return [text.tolist() for text in texts]

    return write_texts


def sample_of(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One sample from the reports of its ranks."""
    assert all(rank["texts"] == ranks[0]["texts"] for rank in ranks)
    return {
        "cpu_seconds": statistics.mean(rank["cpu_seconds"] for rank in ranks),
        "wall_seconds": max(rank["wall_seconds"] for rank in ranks),
        "texts": ranks[0]["texts"],
    }


def report(samples: dict[str, list[dict[str, Any]]], size: dict[str, int]) -> tuple[str, bool]:
    """The table, and whether all texts are those of transformers."""
    num_tokens = size["rows"] * size["new"]
    wanted = samples[YARDSTICK][0]["texts"]
    lines = [
        "| row | ranks | tokens per CPU second of a rank | tokens/s | CPU of transformers |",
        "|---|---|---|---|---|",
    ]
    medians = {row: statistics.median(one["cpu_seconds"] for one in taken) for row, taken in samples.items()}
    is_right = True
    for row, taken in samples.items():
        if any(one["texts"] != wanted for one in taken):
            is_right = False
            lines.append(f"| {row} | {ROWS[row]} | wrong: other texts than transformers | | |")
            continue
        wall_seconds = statistics.median(one["wall_seconds"] for one in taken)
        cells = (num_tokens / medians[row], num_tokens / wall_seconds)
        share = medians[row] / medians[YARDSTICK]
        lines.append(f"| {row} | {ROWS[row]} | {cells[0]:.0f} | {cells[1]:.0f} | {share:.2f} |")
    return "\n".join(lines), is_right


def compare(arguments: argparse.Namespace) -> bool:
    """Runs everything and prints the table; whether all texts are the same."""
    from benchmarks.machine import as_line, machine
    from benchmarks.ranks import run_ranks

    size, samples = SIZES[arguments.size], {row: list[dict[str, Any]]() for row in ROWS}
    facts = machine()
    with tempfile.TemporaryDirectory() as folder:
        save_model(size, Path(folder))
        for round_number in range(arguments.rounds):
            for row, world in ROWS.items():
                command = [str(Path(__file__)), "--size", arguments.size, "--run-rank", row, "--folder", folder]
                samples[row].append(sample_of(run_ranks(command, world)))
                seconds = {name: samples[row][-1][name] for name in ("cpu_seconds", "wall_seconds")}
                print(f"round {round_number + 1}: {row}: {seconds}", file=sys.stderr)
    table, is_right = report(samples, size)
    print(f"{as_line(facts)}\n{arguments.size} size: {size}; {arguments.rounds} rounds, medians\n\n{table}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": facts, "size": size, "samples": samples}, indent=1))
    return is_right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="how often each row runs, interleaved")
    parser.add_argument("--size", default="full", choices=list(SIZES))
    parser.add_argument("--json", type=Path, help="where to save every sample")
    parser.add_argument("--run-rank", choices=list(ROWS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run_rank:
        print(json.dumps(run_rank(arguments.run_rank, SIZES[arguments.size], arguments.folder)))
        return
    if arguments.rounds < 1:
        parser.error(f"--rounds ({arguments.rounds}) must be at least 1")
    sys.exit(0 if compare(arguments) else 1)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()

"""Text to tokens, tokens to batches, and the order of 10^8 samples, against what one would use instead, in one run.

Prepare: the same JSON lines by `write_tokens`, by `datasets.map` with the same tokenizer, and by the loop of Megatron's
preprocessing tool over megatron-core. Loader: the same tokens by `GPTSamples`, by rows of `datasets` cut beforehand,
and by megatron-core's `GPTDataset`, each under a torch DataLoader in one process. Index: the order of one epoch, and of
a blend of three sources. Each sample is a fresh process, rounds are interleaved, the table has medians. The CPU seconds
of a sample are those of all of its processes, imports left out.

    python benchmarks/data.py --rounds 3 --megatron-python PYTHON    # an interpreter with megatron-core and tokenizers
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import as_line, machine, version_of

VOCABULARY = 16000
BATCH, NUM_BATCHES = 8, 200


def make_corpus(folder: Path, num_bytes: int) -> None:
    """Writes source files of the standard library as JSON lines, repeated; a tokenizer; and their token files."""
    from lightning_megatron.data import load_documents, train_tokenizer
    from lightning_megatron.data.corpus_shards import DocumentForm
    from lightning_megatron.data.prepare import write_tokens

    texts = [text for text in load_documents(cache_dir=folder / "documents")["text"] if text is not None]
    tokenizer = train_tokenizer(texts[::4], VOCABULARY, folder / "tokenizer.json")
    written = 0
    with (folder / "corpus.jsonl").open("w") as file:
        for number in range(10**9):
            if written >= num_bytes:
                break
            written += file.write(json.dumps({"text": texts[number % len(texts)]}) + "\n")
    documents = load_documents(path=folder / "corpus.jsonl", cache_dir=folder / "documents")
    write_tokens(documents, tokenizer, folder / "corpus", form=DocumentForm(), num_workers=2)


def prepare_ours(folder: Path, workers: int) -> Callable[[], int]:
    from lightning_megatron.data import load_documents, load_tokenizer
    from lightning_megatron.data.corpus_shards import DocumentForm
    from lightning_megatron.data.prepare import write_tokens

    tokenizer = load_tokenizer(folder / "tokenizer.json")

    def run() -> int:
        # A fresh cache: reading the JSON lines is part of the work.
        with tempfile.TemporaryDirectory(dir=folder) as own:
            documents = load_documents(path=folder / "corpus.jsonl", cache_dir=Path(own, "cache"))
            return write_tokens(
                documents, tokenizer, Path(own, "a"), form=DocumentForm(), num_workers=workers
            ).num_tokens

    return run


def prepare_datasets(folder: Path, workers: int) -> Callable[[], int]:
    import datasets

    from lightning_megatron.data import load_tokenizer

    tokenizer = load_tokenizer(folder / "tokenizer.json")
    datasets.disable_progress_bars()

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[*ids, tokenizer.end_of_text] for ids in tokenizer.encode(rows["text"])]}

    def run() -> int:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            files = [str(folder / "corpus.jsonl")]
            rows = datasets.load_dataset("json", data_files=files, split="train", cache_dir=own)
            features = datasets.Features({"input_ids": datasets.Sequence(datasets.Value("int32"))})
            mapped = rows.map(
                encode, batched=True, remove_columns=rows.column_names, features=features, num_proc=workers
            )
            return int(sum(len(ids) for ids in mapped.with_format("numpy")["input_ids"]))

    return run


def load_ours(folder: Path, sequence: int) -> Any:
    from torch.utils.data import DataLoader

    from lightning_megatron.data import GPTSamples, collate_tokens

    samples = GPTSamples(folder / "corpus", sequence, num_samples=BATCH * (NUM_BATCHES + 2))
    return DataLoader(samples, BATCH, collate_fn=collate_tokens)


def load_datasets(folder: Path, sequence: int) -> Any:
    import datasets
    import numpy as np
    from torch.utils.data import DataLoader

    from lightning_megatron.data import MegatronCorpus

    tokens = MegatronCorpus(folder / "corpus").tokens
    folder_of_rows = folder / f"rows{sequence}"
    if not folder_of_rows.exists():
        datasets.disable_progress_bars()
        num_rows = (len(tokens) - 1) // sequence
        rows = [tokens[i * sequence : i * sequence + sequence + 1].astype(np.int32) for i in range(num_rows)]
        datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(str(folder_of_rows))
    rows = datasets.load_from_disk(str(folder_of_rows)).shuffle(seed=1)
    count = BATCH * (NUM_BATCHES + 2)
    rows = rows.select([i % len(rows) for i in range(count)]).with_format("torch")

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        ids = torch.stack([sample["input_ids"] for sample in samples]).long()
        return {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": torch.ones(len(ids), sequence)}

    return DataLoader(rows, BATCH, collate_fn=collate)


def index_ours(num_samples: int, num_documents: int, sequence: int) -> dict[str, float]:
    """CPU seconds of the order of one epoch, and of a blend: the counts and all positions in blocks."""
    import numpy as np

    from lightning_megatron.data import Blend
    from lightning_megatron.data.gpt_samples import StretchIndex

    sizes = np.full(num_documents, num_samples * sequence // num_documents, dtype=np.int64)
    sizes[0] += 1
    started = time.process_time()
    StretchIndex.of(sizes, sequence, num_samples, seed=1)
    built = time.process_time() - started
    started = time.process_time()
    blend = Blend([0.5, 0.3, 0.2])
    blend.counts(num_samples)
    for i in range(10_000):
        blend.locate(i * (num_samples // 10_000))
    return {"index": built, "blend": time.process_time() - started}


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def run_sample(what: str, who: str, folder: Path, numbers: list[int]) -> dict[str, float]:
    """One measurement in this process."""
    import torch

    torch.set_num_threads(1)
    if what == "prepare":
        run = {"lightning_megatron": prepare_ours, "datasets.map": prepare_datasets}[who](folder, *numbers)
        wall, cpu = time.perf_counter(), cpu_seconds()
        tokens = run()
        return {"tokens": tokens, "wall": time.perf_counter() - wall, "cpu": cpu_seconds() - cpu}
    if what == "load":
        loader = iter({"lightning_megatron": load_ours, "datasets rows": load_datasets}[who](folder, *numbers))
        next(loader)
        started = time.process_time()
        for _ in range(NUM_BATCHES):
            next(loader)
        return {"seconds": time.process_time() - started}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    figures = index_ours(*numbers)
    return figures | {"peak_gb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e9}


def sample(what: str, who: str, folder: Path, numbers: list[int], megatron_python: str) -> dict[str, float]:
    """One measurement in a process of its own."""
    if who == "megatron-core":
        more = [BATCH, NUM_BATCHES] if what == "load" else []
        script = str(Path(__file__).with_name("data_megatron.py"))
        command = [megatron_python, script, what, str(folder), *map(str, [*numbers, *more])]
    else:
        command = [sys.executable, __file__, "--sample", what, who, str(folder), *map(str, numbers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{what} {who} {numbers}: {figures}", file=sys.stderr)
    return figures


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows of each table."""
    make_corpus(folder, arguments.megabytes * 10**6)
    others = ["megatron-core"] if arguments.megatron_python else []
    count = arguments.index_samples
    cases: list[tuple[str, str, list[int]]] = [
        *(("prepare", who, [n]) for n in (1, 2) for who in ("lightning_megatron", "datasets.map", *others)),
        *(("load", who, [s]) for s in (1024, 4096) for who in ("lightning_megatron", "datasets rows", *others)),
        *(("index", who, [count, count // 10, 1024]) for who in ("lightning_megatron", *others)),
    ]
    figures: dict[int, list[dict[str, float]]] = {number: [] for number in range(len(cases))}
    for turn in range(arguments.rounds):
        for number, (what, who, numbers) in enumerate(cases):
            if what != "index" or turn < arguments.index_rounds:
                figures[number].append(sample(what, who, folder, numbers, arguments.megatron_python))
    rows: dict[str, list[dict[str, Any]]] = {"prepare": [], "load": [], "index": []}
    for number, (what, who, numbers) in enumerate(cases):
        medians = {name: statistics.median(one[name] for one in figures[number]) for name in figures[number][0]}
        rows[what].append({"who": who, "numbers": numbers, **medians})
    tokens = {row["tokens"] for row in rows["prepare"]}
    assert len(tokens) == 1, f"not the same tokens: {tokens}"
    return rows


def tables(rows: dict[str, list[dict[str, Any]]]) -> str:
    """The rows as Markdown."""
    lines = ["| prepare | processes | tokens/s | tokens for a CPU second |", "|---|---:|---:|---:|"]
    for row in rows["prepare"]:
        tokens = row["tokens"]
        speed = f"{tokens / row['wall']:,.0f} | {tokens / row['cpu']:,.0f}"
        lines.append(f"| {row['who']} | {row['numbers'][0]} | {speed} |")
    lines += ["", "| loader, one process | sequence | tokens for a CPU second |", "|---|---:|---:|"]
    for row in rows["load"]:
        tokens = BATCH * NUM_BATCHES * row["numbers"][0]
        lines.append(f"| {row['who']} | {row['numbers'][0]} | {tokens / row['seconds']:,.0f} |")
    lines += ["", "| order | samples | CPU s, one epoch | CPU s, blend | peak GB |", "|---|---:|---:|---:|---:|"]
    for row in rows["index"]:
        figures = f"{row['index']:.1f} | {row['blend']:.2f} | {row['peak_gb']:.1f}"
        lines.append(f"| {row['who']} | {row['numbers'][0]:,} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=12, help="of text to prepare")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--index-samples", type=int, default=10**8)
    parser.add_argument("--index-rounds", type=int, default=1)
    parser.add_argument("--megatron-python", default="", help="an interpreter with megatron-core and tokenizers")
    parser.add_argument("--json", help="a file to write the rows to")
    parser.add_argument("--sample", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sample:
        what, who, folder, *numbers = arguments.sample
        print(json.dumps(run_sample(what, who, Path(folder), [int(number) for number in numbers])))
        return
    facts = machine() | {name: version_of(name) for name in ("datasets", "tokenizers")}
    if arguments.megatron_python:
        facts["megatron-core"] = version_of("megatron-core", arguments.megatron_python)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(arguments, Path(folder))
    print(as_line(facts | {"load at the end": ", ".join(f"{load:.1f}" for load in os.getloadavg())}))
    print(f"\n{arguments.megabytes} MB of text, {arguments.rounds} rounds\n\n{tables(rows)}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"machine": facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

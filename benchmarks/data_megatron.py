"""The parts of `benchmarks/data.py` that megatron-core does, run by an interpreter that has it; knows no other file.

PyPI has no tools/preprocess_data.py: its loop is here, a pool that tokenizes JSON lines in chunks of 32 and one process
that gives the ids to megatron-core's IndexedDatasetBuilder.
"""

import json
import multiprocessing
import os
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"
warnings.simplefilter("ignore")

_engine: Any = None


def _start(tokenizer: str) -> None:
    global _engine
    import tokenizers

    _engine = tokenizers.Tokenizer.from_file(tokenizer)
    _engine.encode_special_tokens = True


def _encode(line: str) -> tuple[list[int], int]:
    text = json.loads(line)["text"]
    ids = _engine.encode(text, add_special_tokens=False).ids
    if ids:
        ids.append(_engine.token_to_id("<|endoftext|>"))
    return ids, len(text)


def prepare(folder: Path, workers: int) -> int:
    """Tokenizes `corpus.jsonl`; returns the tokens."""
    import numpy
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    prefix = folder / f"megatron{workers}"
    _start(str(folder / "tokenizer.json"))
    vocabulary = _engine.get_vocab_size(with_added_tokens=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocabulary))
    total = 0
    pool = multiprocessing.Pool(workers, _start, (str(folder / "tokenizer.json"),))
    with (folder / "corpus.jsonl").open() as file:
        for ids, _ in pool.imap(_encode, file, 32):
            builder.add_document(numpy.array(ids), [len(ids)])
            total += len(ids)
    # Not ended: the CPU seconds of a process count once it is done.
    pool.close()
    pool.join()
    builder.finalize(f"{prefix}.idx")
    return total


def load(folder: Path, sequence: int, batch: int, num_batches: int) -> float:
    """Seconds to load batches of a GPTDataset, the first left out, one process."""
    import torch
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    torch.set_num_threads(1)
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=sequence,
        split="1,0,0",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=NullTokenizer(60000),
        path_to_cache=str(folder / "cache"),
        mid_level_dataset_surplus=0.005,
    )
    indexed = IndexedDataset(str(folder / "corpus"), mmap=True)
    import numpy

    documents = numpy.arange(len(indexed), dtype=numpy.int32)
    dataset = GPTDataset(indexed, str(folder / "corpus"), documents, batch * (num_batches + 2), Split.train, config)
    loader = iter(torch.utils.data.DataLoader(dataset, batch_size=batch))
    next(loader)
    return _timed(lambda: [next(loader) for _ in range(num_batches)])


def _timed(do: Any) -> float:
    started = time.process_time()
    do()
    return time.process_time() - started


def index(num_samples: int, num_documents: int, sequence: int) -> dict[str, float]:
    """Seconds of the sample index and of the shuffle of one epoch, and of a blend of three."""
    import numpy
    from megatron.core.datasets import helpers

    sizes = numpy.full(num_documents, num_samples * sequence // num_documents, dtype=numpy.int32)
    sizes[0] += 1
    random = numpy.random.RandomState(1)
    started = time.process_time()
    documents = numpy.arange(num_documents, dtype=numpy.int32)
    random.shuffle(documents)
    helpers.build_sample_idx(sizes, documents, sequence, 1, int(sizes.sum(dtype=numpy.int64)))
    order = numpy.arange(num_samples, dtype=numpy.uint32)
    random.shuffle(order)
    built = time.process_time() - started
    started = time.process_time()
    ids, numbers = numpy.zeros(num_samples, dtype=numpy.int16), numpy.zeros(num_samples, dtype=numpy.int64)
    weights = numpy.array([0.5, 0.3, 0.2])
    helpers.build_blending_indices(ids, numbers, weights, 3, num_samples, False)
    return {"index": built, "blend": time.process_time() - started}


def main() -> None:
    what, folder, *numbers = sys.argv[1:]
    given = [int(number) for number in numbers]
    import megatron.core.datasets.gpt_dataset  # noqa: F401 (before the clock starts)

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, before = time.perf_counter(), _cpu_seconds()
    if what == "prepare":
        figures: dict[str, float] = {"tokens": prepare(Path(folder), *given)}
    elif what == "load":
        figures = {"seconds": load(Path(folder), *given)}
    else:
        figures = index(*given)
    figures["wall"] = time.perf_counter() - started
    figures["cpu"] = _cpu_seconds() - before
    figures["peak_gb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024 / 1e9
    print(json.dumps(figures))


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    main()

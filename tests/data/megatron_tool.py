"""Token files made by megatron-core, in the loop of its tools/preprocess_data.py, which PyPI does not have.

To be run where megatron-core is installed; it knows nothing of this package. Texts are numbers, the end of text is N:

    python tests/data/megatron_tool.py tests/data/megatron_core
"""

import json
import sys
from pathlib import Path

import numpy

NUMBERS = 70_000
"""Of the null tokenizer: its vocabulary takes int32."""

SMALL_NUMBERS = 500


def write(folder: Path, name: str, numbers: int, sentences: bool, append_eod: bool) -> None:
    """The token files of `documents.jsonl` in the folder."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    prefix = folder / name
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(numbers + 1))
    for line in (folder / "documents.jsonl").read_text().splitlines():
        text = json.loads(line)["text"]
        ids: list[int] = []
        lengths = []
        for sentence in text.split("\n") if sentences else [text]:
            found = [int(word) for word in sentence.split()]
            if found:
                ids.extend(found)
                lengths.append(len(found))
        if ids and append_eod:
            ids.append(numbers)
            lengths[-1] += 1
        builder.add_document(numpy.array(ids), lengths)
    builder.finalize(f"{prefix}.idx")


def write_all(folder: Path) -> None:
    """Every case that the tests compare."""
    write(folder, "wide", NUMBERS, sentences=False, append_eod=True)
    write(folder, "plain", SMALL_NUMBERS, sentences=False, append_eod=False)
    write(folder, "sentences", SMALL_NUMBERS, sentences=True, append_eod=True)


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))

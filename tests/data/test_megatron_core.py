"""What `write_tokens` writes is to the byte what megatron-core writes.

The files in `tests/data/megatron_core/` were made by megatron-core 0.16.1 from PyPI, with `tests/data/megatron_tool.py`
in an environment of its own. Where megatron-core can be imported they are made anew.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_megatron.data import MegatronCorpus, load_documents
from lightning_megatron.data.corpus_shards import DocumentForm
from lightning_megatron.data.null_tokenizer import NullTokenizer
from lightning_megatron.data.prepare import write_tokens
from tests.data.megatron_tool import NUMBERS, SMALL_NUMBERS

MADE = Path(__file__).parent / "megatron_core"
CASES = {
    "wide": (NUMBERS, DocumentForm()),
    "plain": (SMALL_NUMBERS, DocumentForm(has_ends=False)),
    "sentences": (SMALL_NUMBERS, DocumentForm(sentences=True)),
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_token_files_are_those_of_megatron_core(tmp_path: Path, name: str, num_workers: int) -> None:
    numbers, form = CASES[name]
    documents = load_documents(path=MADE / "documents.jsonl", cache_dir=tmp_path / "cache")
    prefix = tmp_path / name
    write_tokens(documents, NullTokenizer(numbers), prefix, form=form, num_workers=num_workers, shard_bytes=50)
    for end in (".bin", ".idx"):
        assert Path(f"{prefix}{end}").read_bytes() == (MADE / f"{name}{end}").read_bytes()


def test_files_of_megatron_core_are_read() -> None:
    corpus = MegatronCorpus(MADE / "sentences")
    assert corpus.num_documents == 6
    assert [corpus.sequence(i).tolist() for i in range(3)] == [[1, 2, 3], [4, 5, 500], [6, 500]]


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None,
    reason="megatron-core is not installed",
)
def test_the_files_here_are_what_the_installed_megatron_core_writes(tmp_path: Path) -> None:
    shutil.copy(MADE / "documents.jsonl", tmp_path)
    subprocess.run([sys.executable, str(Path(__file__).with_name("megatron_tool.py")), str(tmp_path)], check=True)
    for path in MADE.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()

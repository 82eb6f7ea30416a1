"""The names and numbers that options have before what takes them is imported are those of what takes them."""

import pytest

from lightning_megatron.cli import convert, plan_options, prepare_data
from lightning_megatron.cli.plan_file import KINDS
from lightning_megatron.data.document_files import MAX_DOCUMENT_BYTES
from lightning_megatron.hf.folder import DTYPES
from lightning_megatron.hf.shards import MAX_SHARD_BYTES
from lightning_megatron.planner.presets import PRESETS
from lightning_megatron.planner.run import PRECISIONS


def test_the_names_are_those_of_the_planner() -> None:
    assert tuple(PRESETS) == plan_options.PRESETS
    assert tuple(KINDS) == plan_options.MODEL_KINDS
    assert plan_options.PRECISIONS == PRECISIONS


def test_defaults_and_dtypes_are_those_of_what_writes() -> None:
    assert convert.MAX_SHARD_BYTES == MAX_SHARD_BYTES
    assert prepare_data.MAX_DOCUMENT_BYTES == MAX_DOCUMENT_BYTES
    assert {f"torch.{name}" for name in convert.DTYPES} == {str(dtype) for dtype in DTYPES.values()}


@pytest.mark.parametrize("config", ["llama3_8b", "toy", "none.yaml", "owner/model", "module.py:Mine", " "])
def test_what_may_be_a_file_a_module_or_a_name_of_the_hub_is_left_to_who_reads_it(config: str) -> None:
    assert not plan_options.known_faults(config)
    assert plan_options.known_faults("nowhere")[0] == "'nowhere' is no file, folder, preset or recipe"

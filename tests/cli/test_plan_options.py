"""The names of options that are read before the planner are its own, and one that means nothing is told without it."""

import subprocess
import sys

import pytest

from lightning_megatron.cli import plan_options
from lightning_megatron.cli.plan_file import KINDS
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.planner.presets import PRESETS
from lightning_megatron.planner.run import PRECISIONS

# A wrong name, and which of the packages that take seconds were imported until it was told.
WRONG = """
import sys
from lightning_megatron.cli.main import main
code = main(["plan", "lama3_8b", "--gpu", "h100"])
print(code, sorted({"torch", "lightning", "numpy"} & set(sys.modules)))
"""


def test_the_names_are_those_of_the_planner() -> None:
    assert tuple(PRESETS) == plan_options.PRESETS
    assert tuple(KINDS) == plan_options.MODEL_KINDS
    assert plan_options.PRECISIONS == PRECISIONS


def test_a_name_of_nothing_is_told_without_the_planner() -> None:
    ended = subprocess.run([sys.executable, "-c", WRONG], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "2 []\n", ended
    assert ended.stderr.endswith("did you mean llama3_8b or llama3_70b?\n") and ended.stderr.count("\n") == 1


def test_what_may_be_a_file_a_module_or_a_name_of_the_hub_is_left_to_who_reads_it() -> None:
    for config in ("llama3_8b", "toy", "none.yaml", "owner/model", "module.py:Mine", " "):
        plan_options.require_known(config)
    with pytest.raises(UsageError, match="'nowhere' is no file, folder, preset or recipe"):
        plan_options.require_known("nowhere")

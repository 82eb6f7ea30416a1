"""What a command imports: a look at the help or at a schedule does not wait for what trains."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_megatron

ROOT = Path(__file__).resolve().parents[2]
# Packages that take seconds to import, and that no command needs which neither trains nor reads text.
HEAVY = {"lightning", "pytorch_lightning", "torchmetrics", "transformers", "datasets", "matplotlib", "tokenizers"}
PLAN = ("plan", "gpt3_175b", "--gpu", "h100", "--num-gpus", "1024", "--layout", "tp=8,pp=8")


def modules_after(code: str, *args: str) -> set[str]:
    """The modules of a fresh process that has run some code."""
    program = f"import json, sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint(json.dumps(list(sys.modules)))"
    command = [sys.executable, "-c", program, *args]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    modules: list[str] = json.loads(ended.stdout.splitlines()[-1])
    return set(modules)


def command_modules(*args: str) -> set[str]:
    return modules_after("from lightning_megatron.cli.main import main; main(sys.argv[1:])", *args)


def test_help_imports_neither_torch_nor_any_command() -> None:
    modules = command_modules("--help")
    assert not modules & {*HEAVY, "torch", "numpy"}
    assert {name for name in modules if name.startswith("lightning_megatron.cli.")} == {
        "lightning_megatron.cli.commands",
        "lightning_megatron.cli.main",
        "lightning_megatron.cli.usage",
    }


@pytest.mark.parametrize("args", [("schedule", "--pp", "2", "--microbatches", "2"), PLAN], ids=["schedule", "plan"])
def test_a_command_that_trains_nothing_imports_no_package_that_trains(args: tuple[str, ...]) -> None:
    modules = command_modules(*args)
    assert f"lightning_megatron.cli.{args[0]}" in modules
    assert not modules & HEAVY


@pytest.mark.parametrize(
    "imports",
    ["import lightning_megatron; import lightning as L", "import lightning as L; import lightning_megatron"],
    ids=["before Lightning", "after Lightning"],
)
def test_a_trainer_knows_the_strategy_by_name_once_the_package_is_imported(imports: str) -> None:
    trainer = "L.Trainer(strategy='megatron', accelerator='cpu', devices=1, logger=False, enable_checkpointing=False)"
    claim = "assert isinstance(trainer.strategy, lightning_megatron.MegatronStrategy)"
    assert "lightning_megatron.trainer.strategy" in modules_after(f"{imports}; trainer = {trainer}; {claim}")


def test_every_exported_name_is_there_and_is_listed() -> None:
    for name in lightning_megatron.__all__:
        assert getattr(lightning_megatron, name) is not None
    assert {*lightning_megatron.__all__, "__version__"} <= set(dir(lightning_megatron))
    with pytest.raises(AttributeError, match="'lightning_megatron' has no attribute 'MegatronStrategies'"):
        _ = lightning_megatron.MegatronStrategies  # type: ignore[attr-defined]

"""What a command imports: a look at the help or at a schedule does not wait for what trains."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import lightning_megatron
from lightning_megatron.cli.commands import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
# Packages that take seconds to import, and that no command needs which neither trains nor reads text.
HEAVY = {"lightning", "pytorch_lightning", "torchmetrics", "transformers", "datasets", "matplotlib", "tokenizers"}
RECIPES = ("recipes",)
PLAN = ("plan", "gpt3_175b", "--gpu", "h100", "--num-gpus", "1024", "--layout", "tp=8,pp=8")


COMPUTES = {*HEAVY, "torch", "numpy"}
# Calls each of the commands with --help, and prints its exit code and what of the above it imported.
HELPS = f"""
import contextlib, io, json, sys
from lightning_megatron.cli.commands import COMMANDS
from lightning_megatron.cli.main import main
found = {{}}
for name in COMMANDS:
    before = set(sys.modules)
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main([name, "--help"])
        except SystemExit as ended:
            code = ended.code
    found[name] = [code, sorted((set(sys.modules) - before) & {COMPUTES})]
print(json.dumps(found))
"""
# Calls a command line after the other, and prints what became of each.
MISTAKES = f"""
import contextlib, io, json, shlex, sys
from lightning_megatron.cli.main import main
found = []
for line in json.loads(sys.argv[1]):
    before, told = set(sys.modules), io.StringIO()
    with contextlib.redirect_stderr(told):
        code = main(shlex.split(line))
    found.append([code, sorted((set(sys.modules) - before) & {COMPUTES}), told.getvalue()])
print(json.dumps(found))
"""
WRONG = (
    ("plan lama3_8b --gpu h100", "did you mean llama3_8b or llama3_70b?"),
    ("plan lama3_8b --gpu h1000 --num-gpus 0", "--num-gpus (0) must be at least 1"),
    ("dry-run lama3_8b --world-size 0", "--world-size (0) must be at least 1"),
    ("calibrate config.yaml --gpu h1000 --out ours.txt", "--out (ours.txt) must end in .yaml"),
    ("certify nowhere.py:Module", "nowhere.py is no file"),
    ("certify nowhere.yaml --data x.py:y", "names its data; nowhere.yaml cannot be read"),
    ("model-plan nowhere.py:Module --tp 70000", "nowhere.py is no file"),
    ("checkpoint inspect nowhere.ckpt", "nowhere.ckpt does not exist"),
    ("convert nowhere out", "SOURCE (nowhere) does not exist"),
    ("evaluate nowhere", "MODEL (nowhere) does not exist"),
    ("schedule --pp 0 --microbatches 2", "pp (0) must be at least 1"),
    ("train toi", "did you mean toy"),
    ("recipes copy toi .", "did you mean toy"),
    ("doctor --ping -1", "--ping (-1) must be from 0"),
    ("checkpoint prune nowhere --keep 0", "--keep (0) must be at least 1"),
    ("prepare-data --path nowhere --tokenizer null:9 --output out", "path ('nowhere') does not exist"),
)


# Runs each piece of code in a fork of a process with torch, and prints the modules of each, or how it failed.
FORKS = """
import json, os, sys, traceback
import torch
for code, *args in json.loads(sys.argv[1]):
    reader, writer = os.pipe()
    if os.fork() == 0:
        sys.argv[1:] = args
        sys.stdout = open(os.devnull, "w")
        failure = ""
        try:
            exec(code)
        except SystemExit:
            pass
        except BaseException:
            failure = traceback.format_exc()
        with open(writer, "w") as stream:
            json.dump({"failure": failure, "modules": list(sys.modules)}, stream)
        os._exit(0)
    os.close(writer)
    with open(reader) as stream:
        print(stream.read())
    os.wait()
"""
COMMAND = "from lightning_megatron.cli.main import main; main(sys.argv[1:])"
SCHEDULE = ("schedule", "--pp", "2", "--microbatches", "2")
TRAINER = (
    "trainer = L.Trainer(strategy='megatron', accelerator='cpu', devices=1, logger=False, enable_checkpointing=False)"
    "\nassert isinstance(trainer.strategy, lightning_megatron.MegatronStrategy)"
)
FIRST, SECOND = (
    "import lightning_megatron\nimport lightning as L\n",
    "import lightning as L\nimport lightning_megatron\n",
)
PACKAGE = "import lightning_megatron\n"
FILES = "import fsspec\nsystem = fsspec.filesystem('file')\n"
OURS = "assert type(fsspec.filesystem('file')).__module__ == 'lightning_megatron.local_file_system'"
# What recipes, plan, dry-run and certify import for any model.
ANY_MODEL = "import lightning_megatron.cli.recipe, lightning_megatron.cli.plan_module, lightning_megatron.testing.tiny"
DOCTOR = ("doctor", "--ping", "0")
CODES = (
    (COMMAND, *SCHEDULE),
    (COMMAND, *PLAN),
    (COMMAND, *DOCTOR),
    (COMMAND, *RECIPES),
    (FIRST + TRAINER,),
    (SECOND + TRAINER,),
    (PACKAGE,),
    (ANY_MODEL,),
    (PACKAGE + FILES + OURS,),
    (FILES + PACKAGE + OURS,),
)


def printed_by(program: str, *args: str) -> list[str]:
    """The lines of a fresh process that runs a program."""
    command = [sys.executable, "-c", program, *args]
    return subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120, check=True
    ).stdout.splitlines()


@cache
def modules_of_each() -> dict[tuple[str, ...], dict[str, Any]]:
    """What became of each of the codes."""
    lines = printed_by(FORKS, json.dumps(CODES))
    return {code: json.loads(line) for code, line in zip(CODES, lines, strict=True)}


def modules_after(*code: str) -> set[str]:
    """The modules of a process with torch that has run one of the codes."""
    found = modules_of_each()[code]
    assert not found["failure"], found["failure"]
    return set(found["modules"])


def test_no_help_of_a_command_imports_what_computes_or_trains() -> None:
    [found] = printed_by(HELPS)
    assert json.loads(found) == {name: [0, []] for name in COMMANDS}


def test_a_wrong_command_line_is_told_without_what_computes_or_trains() -> None:
    [found] = printed_by(MISTAKES, json.dumps([line for line, _ in WRONG]))
    for (line, words), (code, heavy, told) in zip(WRONG, json.loads(found), strict=True):
        # What reads text holds lengths of documents in arrays.
        allowed = {"numpy"} if line.startswith("prepare-data") else set()
        assert (code, set(heavy) - allowed) == (2, set()), (line, told)
        assert words in told and told.startswith("error: ") and told.count("\n") == 1, (line, told)


def test_help_imports_neither_torch_nor_any_command() -> None:
    program = (
        f"import json, sys\ntry:\n    {COMMAND}\nexcept SystemExit:\n    pass\nprint(json.dumps(list(sys.modules)))"
    )
    modules = set(json.loads(printed_by(program, "--help")[-1]))
    assert not modules & {*HEAVY, "torch", "numpy"}
    assert {name for name in modules if name.startswith("lightning_megatron.cli.")} == {
        "lightning_megatron.cli.commands",
        "lightning_megatron.cli.main",
        "lightning_megatron.cli.usage",
    }


@pytest.mark.parametrize("args", [SCHEDULE, PLAN, DOCTOR, RECIPES], ids=["schedule", "plan", "doctor", "recipes"])
def test_a_command_that_trains_nothing_imports_no_package_that_trains(args: tuple[str, ...]) -> None:
    modules = modules_after(COMMAND, *args)
    assert f"lightning_megatron.cli.{args[0]}" in modules
    assert not modules & HEAVY


def test_a_model_of_this_package_needs_no_transformers() -> None:
    # Lightning's own packages import transformers where it is installed; this module cannot be without it.
    modules = modules_after(ANY_MODEL)
    assert "lightning_megatron.lightning_modules.causal" in modules
    assert "lightning_megatron.hf.unchanged" not in modules


@pytest.mark.parametrize("imports", [FIRST, SECOND], ids=["before Lightning", "after Lightning"])
def test_a_trainer_knows_the_strategy_by_name_once_the_package_is_imported(imports: str) -> None:
    assert "lightning_megatron.trainer.strategy" in modules_after(imports + TRAINER)


@pytest.mark.parametrize("imports", [PACKAGE + FILES, FILES + PACKAGE], ids=["before use", "after use"])
def test_fsspec_has_the_file_system_once_the_package_is_imported(imports: str) -> None:
    assert "fsspec" not in modules_after(PACKAGE)
    # Checkpoints are imported when a directory is opened.
    assert "lightning_megatron.checkpoint" not in modules_after(imports + OURS)


def test_every_exported_name_is_there_and_is_listed() -> None:
    for name in lightning_megatron.__all__:
        assert getattr(lightning_megatron, name) is not None
    assert {*lightning_megatron.__all__, "__version__"} <= set(dir(lightning_megatron))
    with pytest.raises(AttributeError, match="'lightning_megatron' has no attribute 'MegatronStrategies'"):
        _ = lightning_megatron.MegatronStrategies  # type: ignore[attr-defined]

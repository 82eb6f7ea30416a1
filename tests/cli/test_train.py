"""`lightning-megatron train`: a recipe of the package in this process, under every launcher."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_megatron.cli.main import main
from lightning_megatron.cli.usage import mistake_of
from tests.harness.ranks import run_on_ranks
from tests.lightning_modules.corpus import write_corpus
from tests.recipes.test_pretrain_gpt import ends, surroundings

SMALL = (
    *("--trainer.max_steps", "2", "--data.path", "corpus", "--data.sequence_length=16", "--data.global_batch_size=4"),
    *("--data.cache_directory=cache", "--data.validation_fraction=0.2", "--model.config.max_sequence_length=16"),
    *("--model.config.num_layers=2", "--model.config.hidden_size=32", "--model.config.vocab_size=300"),
)
# Runs a command line in a process that does not find a package.
WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] == "jsonargparse" else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
from lightning_megatron.cli.main import main
sys.exit(main())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a command, with what it sets in the process taken back after it."""
    write_corpus(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning-megatron"])
    return tmp_path


def process(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """How a Python with these arguments ended in the folder; none of its processes may be left."""
    started = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=surroundings(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    out, err = started.communicate(timeout=300)
    assert ends(started.pid), "a process is left"
    return subprocess.CompletedProcess(started.args, started.returncode, out, err)


def steps(folder: Path) -> list[str]:
    """The steps whose loss the run of a toy has logged."""
    with (folder / "runs/toy/version_0/metrics.csv").open(newline="") as file:
        return [row["step"] for row in csv.DictReader(file) if row["train_loss"]]


@pytest.mark.slow
def test_lightning_s_launcher_starts_the_other_processes_of_a_recipe(folder: Path) -> None:
    # Under -m, where __main__ is a module whose arguments are others than the script's.
    ended = process(folder, "-m", "lightning_megatron", "train", "toy", "--trainer.devices", "2", *SMALL)
    assert ended.returncode == 0, ended.stderr
    assert "MEMBER: 1/2" in ended.stderr and "Starting with 2 processes" in ended.stderr
    assert steps(folder) == ["0", "1"]


def _train(folder: Path, *options: str) -> int:
    os.chdir(folder)
    return main(["train", "toy", *options])


@pytest.mark.slow
def test_processes_that_torchrun_started_start_no_others(folder: Path) -> None:
    assert run_on_ranks(2, _train, folder, *SMALL, init=False) == [0, 0]
    assert steps(folder) == ["0", "1"]


def test_options_are_those_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "toy", "--trainer.max_step", "2"])
    assert ended.value.code == 2
    told = "error: unrecognized arguments: --trainer.max_step 2; the nearest is --trainer.max_steps\n"
    assert capsys.readouterr().err == told


def test_while_the_script_runs_the_command_line_is_the_script_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, __main__\n"
        "from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd as command\n"
        "from pathlib import Path\n"
        "assert __name__ == '__main__'\n"
        "Path('launched.txt').write_text('\\n'.join(command()))\n"
    )
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.yaml").write_text("# Script: script.py\n# Mine. It is small.\n")
    monkeypatch.setattr("lightning_megatron.cli.shipped_recipes._folder", lambda: tmp_path)
    assert main(["train", "mine", "--trainer.devices", "2", "--help"]) == 0
    launched = (tmp_path / "launched.txt").read_text().splitlines()
    config = str(tmp_path / "configs" / "mine.yaml")
    assert launched == [sys.executable, str(script), "fit", "--config", config, "--trainer.devices", "2", "--help"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("tyo",), ("there is no recipe 'tyo'; did you mean toy?",)),
        ((), ("required: NAME; see lightning-megatron train --help",)),
        (("--trainer.max_steps", "2", "toy"), ("unrecognized arguments: --trainer.max_steps",)),
    ],
)
def test_a_mistake_is_one_line(
    args: tuple[str, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *args]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1
    assert all(word in told for word in words), told


@pytest.mark.slow
def test_a_package_that_is_not_installed_is_told_with_the_extra(folder: Path) -> None:
    ended = process(folder, "-c", WITHOUT, "train", "toy")
    told = "error: this needs the package 'jsonargparse': pip install 'lightning-megatron[data]'\n"
    assert (ended.returncode, ended.stderr) == (2, told)


def test_a_package_of_another_extra_is_told_likewise() -> None:
    absent = ModuleNotFoundError("No module named 'transformers'", name="transformers")
    assert mistake_of(absent) == "this needs the package 'transformers': pip install 'lightning-megatron[hf]'"
    for name in ("mine", "transformers.models.mine"):
        assert mistake_of(ModuleNotFoundError(f"No module named {name!r}", name=name)) == ""

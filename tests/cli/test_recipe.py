"""A mistake of the user's ends a recipe with one message that says the thing; any other fault keeps its traceback."""

import os
import select
import time
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from lightning_megatron.checkpoint import save
from lightning_megatron.cli import recipe
from lightning_megatron.cli.recipe import run_recipe
from lightning_megatron.lightning_modules import GPTDataModule, GPTModule
from lightning_megatron.mesh import Mesh
from lightning_megatron.trainer import ConfigurationError
from lightning_megatron.trainer.callbacks import ThroughputMonitor
from tests.harness.ranks import run_on_ranks
from tests.lightning_modules.corpus import write_corpus
from tests.recipes.test_pretrain_gpt import TINY

TP = "--trainer.strategy.init_args.tensor_model_parallel_size"
PP = "--trainer.strategy.init_args.pipeline_model_parallel_size"
AUTO = ("--trainer.strategy=auto", "--trainer.devices=1")
ALONE = (f"{TP}=1", "--trainer.devices=1")


class Broken(GPTModule):
    """A module with a slip of its author's."""

    def configure_model(self) -> None:
        raise ValueError("a slip")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a run, with what the command line sets in the environment taken back after it."""
    write_corpus(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "typo.yaml").write_text("model:\n  config:\n    num_layer: 3\n")
    (tmp_path / "strategy.yaml").write_text("trainer:\n  strategy: [1]\n")
    (tmp_path / "no_tables.yaml").write_text("trainer: 5\nfit:\n  model:\n    config: [1]\n")
    (tmp_path / "no_options.yaml").write_text("# trainer:\n")
    (tmp_path / "a_list.yaml").write_text("- trainer\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "garbage.ckpt").write_bytes(b"no checkpoint")
    for name in ("other.ckpt", "damaged.ckpt"):
        save(tmp_path / name, {"model.weight": torch.zeros(3)}, {"epoch": 0}, world=Mesh.single().world)
    data = tmp_path / "damaged.ckpt" / "meta.pt"
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["recipe"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    return tmp_path


def run(*options: str, module: Any = GPTModule) -> None:
    run_recipe(
        module,
        GPTDataModule,
        links={"model.config.vocab_size": "data.vocab_size"},
        callbacks={"throughput": ThroughputMonitor},
        args=["fit", "--config", "tiny.yaml", *options],
    )


STRATEGY = "--trainer.strategy.init_args"
BARE = ("logger=false", "callbacks=null", "log_every_n_steps=0")
NO_GPU = (("--trainer.accelerator=gpu",), ("trainer.accelerator ('gpu') is not on this machine; use 'cpu', or 'auto'",))
MISTAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no such path": (("--data.path=nowhere",), ("'nowhere'", "does not exist")),
    "a bare run of a configuration with logs": (
        ("--trainer.barebones=true", f"--trainer.{BARE[2]}"),
        ("trainer.barebones (true)", "add --trainer.logger false --trainer.callbacks null\n"),
    ),
    "an empty corpus": (("--data.path=empty",), ("'empty'", "no file with something in it")),
    "two sources": (("--data.dataset=name",), ("both given",)),
    "no such tokenizer": (("--data.tokenizer=none.json",), ("none.json", "does not exist")),
    "heads that tp does not divide": ((f"{TP}=3", "--trainer.devices=3"), ("num_attention_heads (4)", "(3)")),
    "fewer layers than stages": (
        (f"{TP}=1", f"{PP}=3", "--trainer.devices=3", "--data.global_batch_size=6"),
        ("layers (2)", "virtual_pipeline_model_parallel_size (3)"),
    ),
    "a world that does not divide": (("--trainer.devices=3",), ("world size (3)", "use 2 or 4 processes")),
    "a batch that does not divide": (
        ("--trainer.strategy.init_args.num_microbatches=3",),
        ("global_batch_size (4)", "use 3 or 6"),
    ),
    "sequences longer than the model's": (("--data.sequence_length=99",), ("sequence_length (99)", "(16)")),
    "an unknown precision": (("--trainer.precision=7-bit",), ("precision", "7-bit")),
    "an unknown option": (("--data.pth=x",), ("--data.pth=x; the nearest is --data.path",)),
    "a strategy that is a list": (
        ("--config=strategy.yaml",),
        ("--trainer.strategy ([1]) must be text or the class_path of a Strategy",),
    ),
    "sections that are no tables": (
        ("--config=no_tables.yaml",),
        ("trainer (5) must be a table of options, as in", "model.config ([1]) must be a table of options, as in"),
    ),
    "a file without options": (("--config=no_options.yaml",), ("--config (no_options.yaml): it has no options",)),
    "a file that is a list": (("--config=a_list.yaml",), ("(a_list.yaml): it holds ['trainer'], and must be a table",)),
    "a number of steps that is a word": (
        ("--trainer.max_epochs=many",),
        ("--trainer.max_epochs (many) must be a whole number or null",),
    ),
    "an option by a part of its name": (
        ("--trainer.max_step=3", "--data.path=nowhere"),
        ("--trainer.max_step=3; the nearest is --trainer.max_steps",),
    ),
    "an unknown option in a file": (
        ("--config=typo.yaml",),
        ("'model.config.num_layer' is not accepted; the nearest is --model.config",),
    ),
    "an unknown option of the strategy": (
        (f"{STRATEGY}.tensor_parallel_size=2",),
        (f"'tensor_parallel_size' is not accepted; the nearest is {STRATEGY}.tensor_model_parallel_size",),
    ),
    "a file of options that is not there": (
        ("--config=nothere.yaml",),
        ("--config: File does not exist", "nothere.yaml"),
    ),
    "a number that is none": (("--trainer.max_steps=abc",), ("--trainer.max_steps (abc) must be a whole number",)),
    "a size that is not one": (("--model.config.num_layers=0",), ("num_layers (0) must be at least 1",)),
    "a head size that does not come out": (("--model.config.hidden_size=33",), ("hidden_size (33)",)),
    "a rate below zero": (("--model.optimizer.lr=-1",), ("lr (-1",)),
    "an unknown schedule mode": (
        ("--trainer.strategy.init_args.pipeline.mode=gpipe",),
        ("gpipe",),
    ),
    "a bucket below one": ((f"{STRATEGY}.optimizer.bucket_size=-1",), ("cannot run:", "bucket_size (-1) must be")),
    "an unknown optimizer kind": (
        (f"{STRATEGY}.optimizer.kind=zero3",),
        (f"error: {STRATEGY}.optimizer.kind (zero3) must be one of 'replicated', 'distributed'",),
    ),
    "a class that is none": (("--trainer.callbacks+=Nope",), ("--trainer.callbacks (Nope) must be the dotted path",)),
    "an entry's value": (
        ("--trainer.callbacks.ModelCheckpoint.every_n_epochs=x",),
        ("ModelCheckpoint.every_n_epochs: every_n_epochs (x) must be a whole number or null\n",),
    ),
    "a gather without shards": ((f"{STRATEGY}.optimizer.overlap_param_gather=true",), ("needs a distributed kind",)),
    "an unknown part to recompute": ((f"{STRATEGY}.recompute.parts=[core]",), ("core", "'core_attention'")),
    "a loss scale that shrinks by growing": ((f"{STRATEGY}.loss_scale.growth_factor=0.5",), ("growth_factor (0.5)",)),
    "FP8 with sizes that tiles do not divide": (
        (f"{STRATEGY}.fp8.format=hybrid", "--trainer.precision=bf16-mixed", "--model.config.hidden_size=24"),
        ("hidden_size (24)", "16"),
    ),
    "FP8 in float64": ((f"{STRATEGY}.fp8.format=hybrid", "--trainer.precision=64-true"), ("64-true",)),
    "Transformer Engine where it is not installed": (
        ("--trainer.precision=transformer-engine",),
        ("pip install 'lightning-megatron[fp8]'", "engine 'transformer_engine'"),
    ),
    "a checkpoint that is not there": (("--ckpt_path=none/step.ckpt",), ("none/step.ckpt", "does not exist")),
    "a directory that is no checkpoint": (("--ckpt_path=empty",), ("empty", "is an empty directory")),
    "a checkpoint that is not there, plain": ((*AUTO, "--ckpt_path=none.ckpt"), ("none.ckpt",)),
    "a directory that is no checkpoint, plain": (
        (*AUTO, "--ckpt_path=empty"),
        ("empty cannot be read", "Is a directory"),
    ),
    "a damaged checkpoint, plain": ((*AUTO, "--ckpt_path=damaged.ckpt"), ("damaged.ckpt: meta.pt", "damaged")),
    "a checkpoint of another module": (
        (*ALONE, "--ckpt_path=other.ckpt"),
        ("other.ckpt does not fit", "model.weight"),
    ),
    "a damaged checkpoint": ((*ALONE, "--ckpt_path=damaged.ckpt"), ("damaged.ckpt: meta.pt", "damaged")),
    "a file that is no checkpoint": (("--ckpt_path=garbage.ckpt",), ("garbage.ckpt", "cannot be read")),
    "no such path, plain": ((*AUTO, "--data.path=nowhere"), ("'nowhere'",)),
    "a warm-up that is too long, plain": ((*AUTO, "--model.optimizer.warmup_steps=9"), ("warmup_steps (9)",)),
    **({} if torch.cuda.is_available() else {"an accelerator that is not there": NO_GPU}),
    "Trainer options that exclude each other": (
        (*AUTO, "--trainer.fast_dev_run=-1"),
        ("fast_dev_run",),
    ),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_ends_with_its_message(mistake: str, capfd: pytest.CaptureFixture[str]) -> None:
    options, shown = MISTAKES[mistake]
    with pytest.raises(SystemExit) as ended:
        run(*options)
    assert ended.value.code == 2
    printed = capfd.readouterr().err
    assert "Traceback" not in printed
    for part in shown:
        assert part in printed, printed


def test_a_mistake_in_an_option_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    for option in ("--data.pth=x", "--config=nothere.yaml", f"{STRATEGY}.tensor_parallel_size=2", "--config=typo.yaml"):
        with pytest.raises(SystemExit):
            run(option)
        printed = capfd.readouterr().err
        assert printed.startswith("error: ") and printed.count("\n") == 1, printed


def test_all_mistakes_are_reported_together(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--trainer.devices=3", "--data.path=nowhere", "--data.sequence_length=99", "--ckpt_path=none.ckpt")
    printed = capfd.readouterr().err
    for part in ("4 faults", "world size (3)", "nowhere", "sequence_length (99)", "ckpt_path (none.ckpt)"):
        assert part in printed


def test_settings_of_module_data_and_strategy_are_all_reported_though_the_first_ends_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    sizes = ("--model.config.hidden_size=33", f"{STRATEGY}.optimizer.bucket_size=0")
    with pytest.raises(SystemExit):
        run(*sizes, "--model.optimizer.lr=-1", "--data.path=nowhere", "--data.global_batch_size=0")
    printed = capfd.readouterr().err
    assert "5 faults" in printed and printed.count("\n  - ") == 5
    for part in ("hidden_size (33)", "lr (-1", "bucket_size (0)", "path ('nowhere')", "global_batch_size (0)"):
        assert part in printed
    with pytest.raises(SystemExit):
        run(*AUTO, "--model.config.hidden_size=33", "--model.optimizer.lr=-1")
    assert "2 faults" in capfd.readouterr().err


def test_a_file_that_is_no_checkpoint_is_reported_in_one_line(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "text.ckpt").write_text("# A comment.\n")
    with pytest.raises(SystemExit):
        run("--ckpt_path=text.ckpt")
    [line] = [line for line in capfd.readouterr().err.splitlines() if "text.ckpt" in line]
    assert line.endswith("ckpt_path (text.ckpt) cannot be read as a checkpoint: it is no file that torch.save wrote")


def test_a_refused_run_leaves_no_folder_of_logs(folder: Path) -> None:
    for options in (("--ckpt_path=other.ckpt",), ("--data.global_batch_size=99999",)):
        with pytest.raises(SystemExit):
            run(*ALONE, *options)
    assert not [*folder.rglob("version_*")]
    run(*ALONE, "--trainer.max_steps=1")
    [logs] = folder.rglob("version_*")
    assert logs.name == "version_0" and (logs / "config.yaml").is_file()


def test_a_directory_is_resumed_from_without_the_strategy_too(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(*ALONE, "--trainer.max_steps=2")
    assert (folder / "saved" / "step=2.ckpt").is_dir()
    run(*AUTO, "--ckpt_path=saved/step=2.ckpt", "--trainer.max_steps=4")
    # Lightning writes files.
    assert torch.load(folder / "saved" / "step=4.ckpt", weights_only=True)["global_step"] == 4


def test_only_one_process_of_a_machine_prints_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    # Else it waits for its parent, which here is pytest's, for ten seconds.
    monkeypatch.setattr(recipe, "_SECONDS_TO_REPORT", 0.1)
    with pytest.raises(SystemExit):
        run(*AUTO, "--ckpt_path=none/step.ckpt")
    assert "error" not in capfd.readouterr().err


def test_a_slip_in_the_code_keeps_its_traceback() -> None:
    with pytest.raises(ValueError, match="a slip"):
        run(*AUTO, module=Broken)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ((), TQDMProgressBar),
        (("--trainer.callbacks+=RichProgressBar",), RichProgressBar),
        (("--trainer.enable_progress_bar=false",), NoneType),
        (("--trainer.barebones=true", *(f"--trainer.{one}" for one in BARE)), NoneType),
    ],
)
def test_a_run_has_the_bar_that_is_asked_for_and_else_one_that_counts_right(
    options: tuple[str, ...], kind: type, folder: Path
) -> None:
    made = recipe.RecipeCLI(
        GPTModule,
        GPTDataModule,
        links={"model.config.vocab_size": "data.vocab_size"},
        callbacks={"throughput": ThroughputMonitor},
        args=["--config=tiny.yaml", *options],
        run=False,
    )
    assert type(made.trainer.progress_bar_callback) is kind


def test_options_can_be_printed_and_read_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("--model.optimizer.lr=0.5", "--print_config")
    assert ended.value.code == 0
    (folder / "tiny.yaml").write_text(capsys.readouterr().out)
    with pytest.raises(SystemExit):
        run("--print_config")
    assert "lr: 0.5" in capsys.readouterr().out


def second_rank(pipe: Path, writer: int) -> None:
    """Meets a mistake that the first rank reports, and prints to the pipe."""
    output = os.open(pipe, os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["LOCAL_RANK"] = "1"
    recipe._SECONDS_TO_REPORT = 600

    def mistake() -> None:
        os.write(writer, b"fails")
        raise ConfigurationError(["a mistake"])

    recipe._exit_on_mistake(mistake)


def first_rank(pipe: Path) -> tuple[int, bytes]:
    """The process that ended within a second of the mistake of the one that this one starts, 0 for none, and a word."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            second_rank(pipe, writer)
        finally:
            os._exit(1)
    word = os.read(reader, 10)
    time.sleep(1.0)
    ended, _ = os.waitpid(child, os.WNOHANG)
    return ended, word


def test_a_rank_ends_after_the_one_that_reports_the_mistake(tmp_path: Path) -> None:
    # Lightning kills the first rank when the second ends before it.
    pipe = tmp_path / "printed"
    os.mkfifo(pipe)
    printed = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert run_on_ranks(1, first_rank, pipe, init=False) == [(0, b"fails")]
    # The pipe ends with the second rank, which alone can write to it, and which says nothing.
    [ready], _, _ = select.select([printed], [], [], 20.0)
    assert os.read(ready, 1000) == b""
    os.close(printed)

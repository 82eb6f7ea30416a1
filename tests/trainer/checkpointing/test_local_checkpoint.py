"""A fit goes on from the newest checkpoint, shared or local; a local one is taken by all ranks, or by none."""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any, cast

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor

from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint import CheckpointConfig, is_checkpoint, read_meta
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.trainer.checkpointing.local_state import LocalState
from tests.harness.ranks import run_on_ranks
from tests.trainer.checkpointing.test_checkpoint_dict import Language, Texts
from tests.trainer.layouts import QUIET, Layout, make_trainer
from tests.trainer.resumed_runs import Record, difference, run

pytestmark = pytest.mark.filterwarnings(QUIET)
ONE, DP2, PP2 = Layout(), Layout(world=2), Layout(world=2, pp=2, microbatches=2)
SHARDED = Layout(world=2, optimizer=OptimizerConfig(kind="distributed"))
TP2 = Layout(world=2, tp=2)
# Two epochs of seven steps: local checkpoints of steps 5 and 10, shared ones of 6 and 12.
EVERY, PLACES = 5, frozenset({"batch 5", "batch 11"})
BEFORE, AFTER = "batch 5.ckpt", "batch 11.ckpt"


def strategy(layout: Layout, folder: Path, every: int = EVERY) -> MegatronStrategy:
    made = layout.strategy()
    assert isinstance(made, MegatronStrategy)
    made.checkpoint = CheckpointConfig(local_folder=str(folder), local_every_n_steps=every)
    return made


def fitted(layout: Layout, folder: Path, data: str, **options: Any) -> Record:
    return run(layout, data, folder, PLACES, strategy=strategy(layout, folder / "local"), **options)


def resumed(
    layout: Layout, folder: Path, data: str, name: str, every: int = EVERY, **options: Any
) -> tuple[Record, list[str]]:
    """The rest of a run, and its warnings."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        local = strategy(layout, folder / "local", every)
        record = run(layout, data, resumed_from=folder / name, seed=77, strategy=local, **options)
    return record, [str(one.message) for one in shown if "local checkpoint" in str(one.message)]


def newest_of_either(layout: Layout, folder: Path, data: str, options: dict[str, Any]) -> None:
    full = fitted(layout, folder, data, **options)
    for name, first in ((BEFORE, 10), (AFTER, 12)):
        again, shown = resumed(layout, folder, data, name, **options)
        assert min(again.batches) == first and shown == []
        assert difference(again, full) == ""


@pytest.mark.parametrize(
    ("layout", "data", "options"),
    [
        (ONE, "noisy", {}),
        (DP2, "own states", {"batch": 6, "max_steps": 14}),
        (PP2, "shuffled", {}),
        (SHARDED, "shuffled", {}),
    ],
    ids=["one", "dp2", "pp2", "dp2 distributed"],
)
def test_the_newest_of_either_is_taken_and_the_run_equals_the_unbroken_one(
    layout: Layout, data: str, options: dict[str, Any], tmp_path: Path
) -> None:
    run_on_ranks(layout.world, newest_of_either, layout, tmp_path, data, options, init=False)


class Ends(L.Callback):
    """After how many steps a run began, and what it steps and keeps when it ends."""

    first = -1

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state: dict[str, Tensor] = {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.first = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.folder / "shared.ckpt")

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        state = LocalState.of({}, module, trainer.optimizers, cast(MegatronStrategy, trainer.strategy)._master_slots)
        live = {name: tensor.detach() for name, tensor in module.state_dict().items()}
        self.state = {name: tensor.clone() for name, tensor in (live | dict(state.tensors)).items()}


def model_goes_on(layout: Layout, precision: str, folder: Path) -> None:
    found = []
    for path in (None, folder / "shared.ckpt"):
        ends = Ends(folder)
        options = {"callbacks": [ends, EMAWeightAveraging(decay=0.5)], "precision": precision, "max_steps": 7}
        trainer = make_trainer(layout, strategy=strategy(layout, folder / "local", 5), **options)
        trainer.fit(Language(), Texts(), ckpt_path=path)
        found.append(ends)
    full, again = found
    assert again.first == 5 and again.state.keys() == full.state.keys()
    assert any(name.startswith("master weights/") for name in full.state) == (precision == "bf16-mixed")
    assert [name for name, tensor in full.state.items() if not torch.equal(tensor, again.state[name])] == []


@pytest.mark.parametrize(
    ("layout", "precision"),
    [(TP2, "64-true"), (SHARDED, "bf16-mixed"), (PP2, "bf16-mixed")],
    ids=["tp2", "dp2 distributed bf16", "pp2 bf16"],
)
def test_master_weights_moments_averages_and_dropout_go_on_bit_by_bit(
    layout: Layout, precision: str, tmp_path: Path
) -> None:
    """Parts with padding; master weights that only one of the dp ranks has."""
    run_on_ranks(layout.world, model_goes_on, layout, precision, tmp_path, init=False)


def spoil(folder: Path, how: str, step: int = 8) -> None:
    """Does that to what rank 1 has of a step."""
    own = folder / "local" / "rank-1"
    path = own / f"step={step}.ckpt"
    match how:
        case "no folder":
            shutil.rmtree(own)
        case "no step":
            shutil.rmtree(path)
        case "no manifest":
            (path / "manifest.json").unlink()
        case "cut":
            os.truncate(path / "__0_0.distcp", 100)
        case "a wrong byte":
            with open(path / "__0_0.distcp", "r+b") as stream:
                stream.seek(-200, os.SEEK_END)
                byte = stream.read(1)
                stream.seek(-200, os.SEEK_END)
                stream.write(bytes([byte[0] ^ 1]))
        case "a wrong byte of the metadata":
            data = bytearray((path / "meta.pt").read_bytes())
            data[len(data) // 2] ^= 1
            (path / "meta.pt").write_bytes(data)


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Record]]:
    """A run of dp 2 with a shared checkpoint of step 3, and local ones of steps 4 and 8."""
    folder = tmp_path_factory.mktemp("run")
    return folder, run_on_ranks(2, first_run, folder, init=False)


def first_run(folder: Path) -> Record:
    return run(
        DP2, "shuffled", folder, frozenset({"batch 2"}), strategy=strategy(DP2, folder / "local", 4), max_steps=11
    )


def second_run(layout: Layout, folder: Path, options: dict[str, Any]) -> tuple[Record, list[str]]:
    return resumed(layout, folder, "shuffled", "batch 2.ckpt", max_steps=11, **options)


def go_on(layout: Layout, folder: Path, **options: Any) -> list[tuple[Record, list[str]]]:
    return run_on_ranks(layout.world, second_run, layout, folder, options, init=False)


@pytest.mark.parametrize(
    ("how", "first", "shown"),
    [
        ("nothing", 8, ""),
        ("no folder", 3, "step 8: not on rank 1\nstep 4: not on rank 1"),
        ("no step", 4, "step 8: not on rank 1"),
        ("no manifest", 4, "step 8: not on rank 1"),
        ("cut", 4, "__0_0.distcp has 100 bytes"),
        ("a wrong byte", 4, "rank 1: checkpoint"),
        ("a wrong byte of the metadata", 4, "rank 1: checkpoint"),
    ],
)
def test_what_one_rank_lacks_no_rank_takes(
    how: str, first: int, shown: str, a_run: tuple[Path, list[Record]], tmp_path: Path
) -> None:
    shutil.copytree(a_run[0], tmp_path, dirs_exist_ok=True)
    spoil(tmp_path, how)
    found = go_on(DP2, tmp_path)
    for (record, _), full in zip(found, a_run[1], strict=True):
        assert min(record.batches) == first and difference(record, full) == ""
    assert shown in "\n".join(found[0][1]) and bool(found[0][1]) == bool(shown)


@pytest.mark.parametrize(
    ("layout", "options", "shown"),
    [
        (PP2, {}, "another sizes"),
        (SHARDED, {}, "another optimizer"),
    ],
    ids=["pp2", "distributed"],
)
def test_another_layout_goes_on_from_the_shared_one(
    layout: Layout, options: dict[str, Any], shown: str, a_run: tuple[Path, list[Record]], tmp_path: Path
) -> None:
    shutil.copytree(a_run[0], tmp_path, dirs_exist_ok=True)
    [(record, lines), *_] = go_on(layout, tmp_path, **options)
    assert min(record.batches) == 3 and len(lines) == 1 and shown in lines[0]


def another_run(folder: Path) -> None:
    """The same training, begun from scratch, with a shared checkpoint of the same step; local ones are unchanged."""
    run(DP2, "shuffled", folder, frozenset({"batch 2"}), max_steps=3)


def test_a_local_one_of_another_run_is_not_taken(a_run: tuple[Path, list[Record]], tmp_path: Path) -> None:
    shutil.copytree(a_run[0], tmp_path, dirs_exist_ok=True)
    run_on_ranks(2, another_run, tmp_path, init=False)
    [(record, shown), *_] = go_on(DP2, tmp_path)
    assert min(record.batches) == 3
    assert len(shown) == 1 and shown[0].count("is of a run that does not go on from the checkpoint asked for") == 4


def step_back(folder: Path) -> tuple[list[str], Record]:
    """Goes on from the shared one without local ones, saves a shared one later, and goes on from that with them."""
    run(DP2, "shuffled", folder, frozenset({"batch 5"}), resumed_from=folder / "batch 2.ckpt", max_steps=7)
    record, shown = resumed(DP2, folder, "shuffled", "batch 5.ckpt", max_steps=11)
    return shown, record


def test_a_local_one_that_was_left_behind_is_not_taken(a_run: tuple[Path, list[Record]], tmp_path: Path) -> None:
    shutil.copytree(a_run[0], tmp_path, dirs_exist_ok=True)
    [(shown, record), *_] = run_on_ranks(2, step_back, tmp_path, init=False)
    assert min(record.batches) == 6
    assert len(shown) == 1 and shown[0].count("step=8.ckpt is of a run that does not go on") == 2


def test_parts_of_two_runs_are_not_put_together(a_run: tuple[Path, list[Record]], tmp_path: Path) -> None:
    """The same step, of a run and of the one that made it again: their numbers may differ."""
    shutil.copytree(a_run[0], tmp_path, dirs_exist_ok=True)
    shutil.move(tmp_path / "local", tmp_path / "first")
    go_on(DP2, tmp_path, every=4)
    shutil.rmtree(tmp_path / "local" / "rank-0")
    shutil.copytree(tmp_path / "first" / "rank-0", tmp_path / "local" / "rank-0")
    steps = [read_meta(tmp_path / "local" / f"rank-{rank}" / "step=8.ckpt")["global_step"] for rank in (0, 1)]
    assert steps == [8, 8]
    [(record, shown), *_] = go_on(DP2, tmp_path)
    assert min(record.batches) == 3
    # Of each of the two saves.
    assert "step 8: not on rank 0" in shown[0] and "step 8: not on rank 1" in shown[0]


def kept(folder: Path) -> list[str]:
    run(DP2, "shuffled", strategy=strategy(DP2, folder, 2), max_steps=11)
    return sorted(path.name for path in (folder / f"rank-{int(os.environ['RANK'])}").iterdir())


def test_the_newest_two_stay(tmp_path: Path) -> None:
    left = tmp_path / "rank-1" / ".unfinished" / "1" / "step=4.ckpt"
    left.mkdir(parents=True)
    assert run_on_ranks(2, kept, tmp_path, init=False) == [["step=10.ckpt", "step=8.ckpt"]] * 2
    assert all(is_checkpoint(path) for rank in (0, 1) for path in (tmp_path / f"rank-{rank}").iterdir())


def blocked(folder: Path) -> tuple[int, list[str]]:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        record = run(DP2, "shuffled", strategy=strategy(DP2, folder, 4), max_steps=11)
    return record.steps, [str(one.message) for one in shown if "local checkpoint" in str(one.message)]


def test_a_local_save_that_fails_is_a_warning_of_its_rank(tmp_path: Path) -> None:
    (tmp_path / "rank-1").write_text("in the way")
    (steps, quiet), (also, shown) = run_on_ranks(2, blocked, tmp_path, init=False)
    assert steps == also == 11 and quiet == []
    assert len(shown) == 2 and "a local checkpoint of rank 1 was not written" in shown[0]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"local_folder": "here"}, r"local_every_n_steps \(0\) must be 1 or more"),
        ({"local_folder": "here", "local_every_n_steps": -1}, r"local_every_n_steps \(-1\) must be 1 or more"),
        ({"local_every_n_steps": 5}, r"local_every_n_steps \(5\) needs local_folder"),
        ({"local_folder": "s3://x", "local_every_n_steps": 5}, "must be a folder of the machine"),
    ],
)
def test_what_does_not_go_together_is_reported(options: dict[str, Any], shown: str) -> None:
    with pytest.raises(ValueError, match=shown):
        CheckpointConfig(**options)


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match=r"(?s)save_on_signals.*local_every_n_steps"):
        CheckpointConfig(save_on_signals=("SIGKILL",), local_every_n_steps=3)

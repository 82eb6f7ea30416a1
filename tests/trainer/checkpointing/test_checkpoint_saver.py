"""Training goes on while a checkpoint is written, and however it ends, what is in flight lands or is reported."""

import ctypes
import gc
import os
import sys
import threading
import time
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, LearningRateFinder, ModelCheckpoint
from torch import Tensor

from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint import CheckpointConfig, is_checkpoint, load, read_meta
from lightning_megatron.checkpoint.atomic_directory import AtomicDirectory
from lightning_megatron.checkpoint.chunk_file import ChunkLocation, ChunkWriter
from lightning_megatron.checkpoint.owner_lock import RUN_LOCK
from lightning_megatron.checkpoint.state import Piece
from lightning_megatron.mesh import Mesh
from lightning_megatron.trainer.fault_tolerance import failure_watch
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import WHOLE, every_nth
from tests.trainer.checkpointing.test_checkpoint_dict import Language, Texts
from tests.trainer.fits import Parts, weights
from tests.trainer.layouts import PLAIN, Layout, make_trainer
from tests.trainer.modules import Data, Small

ONE, PP2, DP2, TP2 = Layout(), Layout(world=2, pp=2, microbatches=2), Layout(world=2), Layout(world=2, tp=2)
LAYOUTS = [ONE, PP2, DP2]
NO_BEST = "ignore:Checkpoint directory .* exists and is not empty"


def names_in(folder: Path) -> list[str]:
    """What is in a folder, less the lock of the run, which the first rank may hold a moment longer than the others."""
    return sorted(path.name for path in folder.iterdir() if path.name != RUN_LOCK)


class Gate:
    """No tensor is written until it is opened."""

    def __init__(self) -> None:
        self.opened, self.num_waiting = threading.Event(), 0
        write, gate = ChunkWriter.write, self

        def wait(self: ChunkWriter, value: Tensor | bytes) -> ChunkLocation:
            gate.num_waiting += 1
            assert gate.opened.wait(120), "the gate was never opened"
            gate.num_waiting -= 1
            return write(self, value)

        ChunkWriter.write = wait  # type: ignore[method-assign]


def saver(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{step}", **options)


def run(layout: Layout, *callbacks: Callback, config: CheckpointConfig | None = None, **options: Any) -> L.Trainer:
    """A trainer of ten batches an epoch."""
    trainer = make_trainer(
        layout,
        **{"callbacks": list(callbacks), "enable_checkpointing": True, "max_epochs": 1, "limit_val_batches": 0}
        | options,
    )
    if config is not None:
        assert isinstance(trainer.strategy, MegatronStrategy)
        trainer.strategy.checkpoint = config
    return trainer


def saved_weights(path: Path, module: L.LightningModule) -> Parts:
    """What this rank holds of the module, as the checkpoint has it; every rank reads by itself."""
    live = module.state_dict(keep_vars=True)
    into = {name: torch.zeros_like(tensor) for name, tensor in live.items()}
    pieces = {name: Piece.all_like(live[name], tensor) for name, tensor in into.items()}
    load(path, pieces, world=Mesh.single().world, strict=False, among=lambda name: False)
    return {name: (piece.box.offsets, piece.tensor) for name, [piece] in pieces.items()}


def equal(one: Parts, other: Parts) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name][1], other[name][1]) for name in one)


class Watcher(Callback):
    """At every batch's end, before the checkpoint callbacks: the weights, and whether there is a checkpoint yet."""

    def __init__(self, folder: Path, gate: Gate, open_at: int = -1) -> None:
        self.folder, self.gate, self.open_at = folder, gate, open_at
        self.weights: list[Parts] = []
        self.names: list[list[str]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.weights.append(weights(module))
        self.names.append(sorted(p.name for p in self.folder.glob("*.ckpt")))
        if trainer.global_step == self.open_at:
            self.gate.opened.set()


def fit_behind_a_gate(layout: Layout, folder: Path) -> None:
    gate = Gate()
    watcher = Watcher(folder, gate, open_at=5)
    module, callback = Small(), saver(folder, every_n_train_steps=3, save_top_k=-1)
    trainer = run(layout, watcher, callback)
    trainer.fit(module, Data(80))
    assert trainer.global_step == 10
    # Steps 4 and 5 came while the third was being written; the save of step 6 waited for it.
    assert watcher.names[4] == [] and "step=3.ckpt" in watcher.names[6]
    assert names_in(folder) == ["step=3.ckpt", "step=6.ckpt", "step=9.ckpt"]
    for step in (3, 6, 9):
        saved = saved_weights(folder / f"step={step}.ckpt", module)
        assert equal(saved, watcher.weights[step - 1]) and not equal(saved, watcher.weights[step])
        assert read_meta(folder / f"step={step}.ckpt")["global_step"] == step
    # After fit a save is waited for.
    trainer.save_checkpoint(folder / "after.ckpt")
    assert is_checkpoint(folder / "after.ckpt")


@pytest.mark.parametrize("layout", every_nth(LAYOUTS, 2))
def test_steps_go_on_while_a_save_is_written_and_it_has_the_weights_of_its_moment(
    layout: Layout, tmp_path: Path
) -> None:
    run_on_ranks(layout.world, fit_behind_a_gate, layout, tmp_path, init=False)


def test_a_save_from_a_hook_is_asynchronous_unless_that_is_switched_off(tmp_path: Path) -> None:
    run_on_ranks(2, fit_and_wait_first_only, tmp_path, init=False)


def fit_and_wait_first_only(folder: Path) -> None:
    gate = Gate()

    class Saves(Callback):
        was_there: bool | None = None

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            assert isinstance(trainer.strategy, MegatronStrategy)
            path = folder / f"{trainer.strategy.checkpoint.asynchronous}.ckpt"
            trainer.save_checkpoint(path)
            self.was_there = is_checkpoint(path)
            gate.opened.set()
            trainer.strategy.wait_for_checkpoint()
            assert is_checkpoint(path)

    behind = Saves()
    run(DP2, behind, max_steps=1, default_root_dir=folder).fit(Small(), Data())
    assert behind.was_there is False
    at_once = Saves()
    config = CheckpointConfig(asynchronous=False)
    run(DP2, at_once, max_steps=1, config=config, default_root_dir=folder).fit(Small(), Data())
    assert at_once.was_there is True


def fit_on_a_full_disk(layout: Layout, folder: Path) -> str:
    failure_watch._POLL_SECONDS = 0.02  # type: ignore[attr-defined]
    write = ChunkWriter.write

    class Fills(Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            def full(self: ChunkWriter, value: Tensor | bytes) -> ChunkLocation:
                raise OSError(28, "No space left on device")

            time.sleep(0.05)
            if trainer.global_step == 5 and trainer.global_rank == layout.world - 1:
                ChunkWriter.write = full  # type: ignore[method-assign]

    trainer = run(layout, Fills(), saver(folder, every_n_train_steps=3))
    with pytest.raises(RuntimeError) as raised:
        trainer.fit(Small(), Data(800))
    ChunkWriter.write = write  # type: ignore[method-assign]
    assert trainer.global_step < 90
    assert not getattr(raised.value, "__notes__", []), "this rank heard of it from another"
    return str(raised.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_failed_save_is_one_error_on_all_ranks_and_the_old_one_stands(layout: Layout, tmp_path: Path) -> None:
    shown = run_on_ranks(layout.world, fit_on_a_full_disk, layout, tmp_path, init=False)
    last = layout.world - 1
    assert set(shown) == {
        f"checkpoint {tmp_path}/step=6.ckpt was not written: rank {last}: OSError: [Errno 28] No space left on device"
    }
    assert [p.name for p in tmp_path.iterdir()] == ["step=3.ckpt"]
    assert is_checkpoint(tmp_path / "step=3.ckpt")


class Breaks(Callback):
    def __init__(self, gate: Gate, error: type[BaseException]) -> None:
        self.gate, self.error = gate, error

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            threading.Timer(0.3, self.gate.opened.set).start()
            raise self.error("broken on purpose")


def fit_and_break(layout: Layout, folder: Path, error: type[BaseException]) -> None:
    gate = Gate()
    trainer = run(layout, Breaks(gate, error), saver(folder, every_n_train_steps=3))
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        trainer.fit(Small(), Data(80))
    assert gate.opened.is_set()


@pytest.mark.matrix
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("layout", [ONE, DP2])
def test_a_run_that_breaks_lands_its_save_first(layout: Layout, error: type[BaseException], tmp_path: Path) -> None:
    run_on_ranks(layout.world, fit_and_break, layout, tmp_path, error, init=False)
    assert [p.name for p in tmp_path.iterdir()] == ["step=3.ckpt"]
    assert is_checkpoint(tmp_path / "step=3.ckpt")


class Counted(Small):
    """Its `score` goes 5 3 4 2 1 over the epochs."""

    def on_train_epoch_end(self) -> None:
        self.log("score", float([5, 3, 4, 2, 1][self.current_epoch]), sync_dist=True)


def fit_with_callbacks(layout: Layout, folder: Path) -> dict[str, Any]:
    gate = Gate()
    gate.opened.set()
    top = ModelCheckpoint(folder / "top", "{epoch}", monitor="score", save_top_k=2, save_last=True)
    timed = ModelCheckpoint(folder / "timed", "{step}", train_time_interval=timedelta(seconds=0), save_top_k=-1)
    light = ModelCheckpoint(folder / "light", "{epoch}", save_weights_only=True, save_top_k=1)
    linked = ModelCheckpoint(folder / "linked", "{epoch}", save_last="link", mode="max") if layout.pp == 2 else None
    callbacks = [top, timed, light, *([linked] if linked is not None else [])]
    trainer = run(layout, *callbacks, max_epochs=5, limit_train_batches=2)
    module = Counted()
    trainer.fit(module, Data())
    trainer.strategy.barrier()
    found = {name: names_in(folder / name) for name in ("top", "timed", "light")}
    assert equal(saved_weights(folder / "top" / "last.ckpt", module), weights(module))
    assert ("optimizer_states" in read_meta(folder / "light" / "epoch=4.ckpt")) is False
    assert "optimizers" not in read_meta(folder / "light" / "epoch=4.ckpt")
    if linked is not None:
        assert os.readlink(folder / "linked" / "last.ckpt") == "epoch=4.ckpt"
    return {**found, "best": Path(top.best_model_path).name}


@pytest.mark.parametrize("layout", every_nth(LAYOUTS, 2))
def test_stock_callbacks_keep_what_they_would_keep(layout: Layout, tmp_path: Path) -> None:
    for found in run_on_ranks(layout.world, fit_with_callbacks, layout, tmp_path, init=False):
        assert found["top"] == ["epoch=3.ckpt", "epoch=4.ckpt", "last.ckpt"]
        assert found["timed"] == sorted(f"step={step}.ckpt" for step in range(1, 11))
        assert found["light"] == ["epoch=4.ckpt"]
        assert found["best"] == "epoch=4.ckpt"


def fit_with_last_behind_a_gate(folder: Path) -> None:
    gate = Gate()
    watcher = Watcher(folder, gate, open_at=5)
    module = Small()
    trainer = run(DP2, watcher, saver(folder, every_n_train_steps=3, save_last=True), max_steps=5)
    trainer.fit(module, Data(80))
    # Neither of the two saves of step 3 was waited for.
    assert watcher.names[4] == []
    assert names_in(folder) == ["last.ckpt", "step=3.ckpt"]
    for name in ("last.ckpt", "step=3.ckpt"):
        assert equal(saved_weights(folder / name, module), watcher.weights[2])
    # A copy of the same moment shares its files.
    first, last = folder / "step=3.ckpt" / "__0_0.distcp", folder / "last.ckpt" / "__0_0.distcp"
    assert first.stat().st_ino == last.stat().st_ino
    assert read_meta(folder / "last.ckpt")["callbacks"] != read_meta(folder / "step=3.ckpt")["callbacks"]


def test_save_last_does_not_wait_for_the_save_before_it(tmp_path: Path) -> None:
    run_on_ranks(2, fit_with_last_behind_a_gate, tmp_path, init=False)


class FindsInTheMiddle(LearningRateFinder):
    def __init__(self) -> None:
        super().__init__(num_training_steps=4, update_attr=False)

    def on_fit_start(self, *_: Any) -> None:
        """Not at the start."""

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, module)


class Rated(Small):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def fit_with_a_finder(layout: Layout, folder: Path) -> None:
    os.chdir(folder)
    found = []
    for finders in ([], [FindsInTheMiddle()]):
        module = Rated()
        callbacks = [*finders, saver(folder / f"top{len(finders)}", every_n_train_steps=2, save_top_k=-1)]
        run(layout, *callbacks, max_epochs=3, default_root_dir=folder).fit(module, Data())
        found.append(weights(module))
    assert equal(*found)


@pytest.mark.parametrize("layout", [ONE, PP2])
def test_a_finder_of_learning_rates_in_the_middle_of_a_fit_changes_nothing(layout: Layout, tmp_path: Path) -> None:
    run_on_ranks(layout.world, fit_with_a_finder, layout, tmp_path, init=False)


def fit_again_and_again(folder: Path) -> None:
    module = Small()
    trainer = run(DP2, saver(folder / "a", every_n_train_steps=1, save_top_k=-1), limit_train_batches=2)
    trainer.fit(module, Data())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, Data())
    other = run(DP2, saver(folder / "b", every_n_train_steps=1), max_steps=2)
    other.fit(Small(), Data())
    other.strategy.barrier()
    assert names_in(folder / "a") == [f"step={step}.ckpt" for step in range(1, 5)]
    assert names_in(folder / "b") == ["step=2.ckpt"]
    assert not any(type(callback).__name__ == "Preemption" for callback in trainer.callbacks + other.callbacks)


@pytest.mark.filterwarnings(NO_BEST)
def test_fits_in_a_row_and_another_trainer_save_alike(tmp_path: Path) -> None:
    run_on_ranks(2, fit_again_and_again, tmp_path, init=False)


def fit_with_a_link(folder: Path) -> None:
    write = ChunkWriter.write

    def slowly(self: ChunkWriter, value: Tensor | bytes) -> ChunkLocation:
        time.sleep(0.05)
        return write(self, value)

    seen: list[bool] = []

    class Follows(Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step > 0:
                seen.append(is_checkpoint(folder / "last.ckpt"))

    ChunkWriter.write = slowly  # type: ignore[method-assign]
    callback = saver(folder, every_n_train_steps=1, save_last="link")
    run(ONE, Follows(), callback, max_steps=3).fit(Small(), Data())
    assert seen == [True, True]


def test_a_link_never_leads_to_what_is_not_there_yet(tmp_path: Path) -> None:
    run_on_ranks(1, fit_with_a_link, tmp_path, init=False)


def names_of(
    layout: Layout, folder: Path, *callbacks: ModelCheckpoint, late_seconds: float = 0.2, **options: Any
) -> dict[str, Any]:
    """What stands after a fit of two epochs whose saves take longer than its steps, and what the callbacks keep.

    Once a batch has begun while a save was in flight, saves are no longer late.
    """
    put_in_place, is_seen = AtomicDirectory.put_in_place, threading.Event()
    in_flight: list[bool] = []

    def late(self: AtomicDirectory, manifest: bytes) -> None:
        is_seen.wait(late_seconds)
        put_in_place(self, manifest)

    class Looks(Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if isinstance(trainer.strategy, MegatronStrategy):
                in_flight.append(trainer.strategy._saver.is_saving)
            if any(in_flight):
                is_seen.set()

    AtomicDirectory.put_in_place = late  # type: ignore[method-assign]
    trainer = run(layout, *callbacks, Looks(), **{"max_epochs": 2, "limit_train_batches": 4} | options)
    trainer.fit(Small(), Data(32))
    AtomicDirectory.put_in_place = put_in_place  # type: ignore[method-assign]
    kept = [sorted(Path(path).name for path in callback.best_k_models) for callback in callbacks]
    steps = {}
    for path in (folder / name for name in names_in(folder)):
        one = torch.load(path, weights_only=False) if layout.is_plain else read_meta(path)
        steps[path.name] = one["global_step"]
    return {"steps": steps, "kept": kept, "is behind": any(in_flight)}


CLASHES: dict[str, Any] = {
    "of an epoch, saved twice in it": [
        {"filename": "{epoch}", "save_top_k": 4, "every_n_train_steps": 2, "monitor": "train_loss"}
    ],
    "of a rounded metric": [
        {"filename": "{train_loss:.0f}", "save_top_k": 3, "every_n_train_steps": 1, "monitor": "train_loss"}
    ],
    "without a field": [{"filename": "one", "save_top_k": -1, "every_n_train_steps": 3, "monitor": "train_loss"}],
    "written over": [{"filename": "{epoch}", "save_top_k": -1, "every_n_train_steps": 2}],
    "of two callbacks with one template": [
        {"every_n_train_steps": 2},
        {"every_n_train_steps": 4, "monitor": "train_loss"},
    ],
    "last, of two callbacks": [
        {"filename": "{step}", "every_n_train_steps": 2, "save_last": True},
        {"filename": "best-{step}", "every_n_train_steps": 4, "monitor": "train_loss", "save_last": True},
    ],
}


def fit_with_names(names: str, folder: Path) -> None:
    found = []
    for layout in (PLAIN, ONE):
        place = folder / ("plain" if layout.is_plain else "ours")
        found.append(names_of(layout, place, *(ModelCheckpoint(place, **one) for one in CLASHES[names])))
    plain, ours = found
    assert ours["steps"] == plain["steps"] and ours["kept"] == plain["kept"]
    assert any("-v1" in name for name in plain["steps"]) == (names != "written over")


@pytest.mark.parametrize("names", CLASHES)
def test_names_that_may_come_twice_are_numbered_as_under_plain_lightning(names: str, tmp_path: Path) -> None:
    run_on_ranks(1, fit_with_names, names, tmp_path, init=False)


def fit_once_an_epoch(folder: Path) -> None:
    for number, options in enumerate(({"val_check_interval": 1.0}, {"limit_val_batches": 0, "val_check_interval": 2})):
        place = folder / str(number)
        callback = ModelCheckpoint(place, "{epoch}-{train_loss:.0f}", save_top_k=2, monitor="train_loss")
        assert names_of(ONE, place, callback, late_seconds=60.0, **{"limit_val_batches": 1} | options)["is behind"]
    place = folder / "twice"
    callback = ModelCheckpoint(place, "{epoch}", save_top_k=2, monitor="val_loss")
    found = names_of(ONE, place, callback, limit_val_batches=1, val_check_interval=2)
    assert not found["is behind"] and len(found["steps"]) == 2


def test_a_save_an_epoch_with_the_epoch_in_its_name_is_asynchronous(tmp_path: Path) -> None:
    run_on_ranks(1, fit_once_an_epoch, tmp_path, init=False)


class Slow(Language):
    """A step takes longer than the first rank needs to write."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.5)


def slowly_saved(folder: Path) -> None:
    """A save after each of two steps; when the second begins, one rank has written the first, the other has not."""
    create = AtomicDirectory.create

    def create_slowly(self: AtomicDirectory, name: str) -> AbstractContextManager[IO[bytes]]:
        if dist.get_rank() == 1:
            time.sleep(1.5)
        return create(self, name)

    AtomicDirectory.create = create_slowly  # type: ignore[method-assign]
    callback = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = make_trainer(Layout(world=2, tp=2), max_steps=2, callbacks=[callback], enable_checkpointing=True)
    trainer.fit(Slow(), Texts())


def test_a_save_begins_when_the_one_before_is_in_place(tmp_path: Path) -> None:
    """Both talk over one process group."""
    run_on_ranks(2, slowly_saved, tmp_path, init=False, timeout=40)
    steps = {path.name: read_meta(path)["global_step"] for path in tmp_path.iterdir()}
    assert steps == {"step=1.ckpt": 1, "step=2.ckpt": 2}


# Of a run with a save every so many steps; whole, the run of a day in small.
SAVE_EVERY = 25
NUM_STEPS = 2300 if os.environ.get(WHOLE) else 200
MOST_GROWTH_BYTES = 4 * 2**20


class Memory(Callback):
    """Notes what the process holds after each save; `leaks` keeps something of every step."""

    def __init__(self, *, leaks: bool) -> None:
        self.leaks, self.kept = leaks, list[Tensor]()
        self.held_bytes: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.leaks:
            self.kept.append(torch.zeros(100_000))
        if trainer.global_step % SAVE_EVERY == 0:
            trainer.strategy.wait_for_checkpoint()
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            self.held_bytes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))


def growth_bytes(layout: Layout, folder: Path, num_steps: int, leaks: bool) -> int:
    """By how much the process grows between a third of the run, when all has been made once, and its end.

    The largest step is left out: at some time the allocator takes a piece of some MB for a thread, once.
    """
    memory = Memory(leaks=leaks)
    trainer = make_trainer(
        layout,
        callbacks=[saver(folder, every_n_train_steps=SAVE_EVERY, save_top_k=1), memory],
        enable_checkpointing=True,
        max_epochs=-1,
        max_steps=num_steps,
        limit_val_batches=0,
    )
    trainer.fit(Small(), Data(16))
    assert len(memory.held_bytes) == num_steps // SAVE_EVERY
    held = memory.held_bytes[len(memory.held_bytes) // 3 :]
    return held[-1] - held[0] - max(later - before for before, later in pairwise(held))


@pytest.mark.matrix
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from Linux's /proc")
@pytest.mark.parametrize("layout", every_nth([PP2, DP2, ONE], 3), ids=lambda layout: f"pp{layout.pp} of {layout.world}")
def test_a_run_with_many_saves_does_not_grow(layout: Layout, tmp_path: Path) -> None:
    args = (layout, tmp_path / "kept", NUM_STEPS, False)
    found = run_on_ranks(layout.world, growth_bytes, *args, init=False, timeout=300)
    assert max(found) < MOST_GROWTH_BYTES, found
    # What of each step stays would be seen in fewer.
    leaking = run_on_ranks(layout.world, growth_bytes, layout, tmp_path / "leaking", 150, True, init=False)
    assert min(leaking) > 3 * MOST_GROWTH_BYTES, leaking

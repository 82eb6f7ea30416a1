"""A signal ends a run after a save, on all ranks together, and the run that resumes is the run without a break.

`tests/trainer/setup/test_launcher.py` sends one to scripts that a launcher has started.
"""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint import CheckpointConfig, is_checkpoint, read_meta
from lightning_megatron.checkpoint.chunk_file import ChunkLocation, ChunkWriter
from lightning_megatron.trainer.fault_tolerance import failure_watch, stop_vote
from lightning_megatron.trainer.fault_tolerance.stop_vote import StopCount, StopVote
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.trainer.checkpointing.test_checkpoint_dict import Resumable
from tests.trainer.fits import parts_apart, weights
from tests.trainer.layouts import Layout, make_trainer, replica_of
from tests.trainer.modules import Small, samples

ONE, PP2, DP2 = Layout(), Layout(world=2, pp=2, microbatches=2), Layout(world=2)
LAYOUTS = {"one": ONE, "pp2": PP2, "dp2": DP2}
EVERY_RANK = -1
ROWS, BATCH = 48, 8
NUM_BATCHES = ROWS // BATCH
NO_LAST = "ignore:.*there is no last checkpoint available:UserWarning"


class Rows(L.LightningDataModule):
    """Six batches, of which each dp rank takes its part, from loaders that go on where they were."""

    def _loader(self) -> Resumable:
        assert self.trainer is not None
        rank, size = replica_of(self.trainer)
        share = BATCH // size
        data = samples(ROWS)
        batches: list[Any] = []
        for first in range(rank * share, ROWS, BATCH):
            batches.append(tuple(tensor[first : first + share] for tensor in data.tensors))
        return Resumable(batches)

    def train_dataloader(self) -> Any:
        return self._loader()

    def val_dataloader(self) -> Any:
        return DataLoader(self._loader().batches, batch_size=None)  # type: ignore[arg-type]


def until_heard(trainer: L.Trainer, limit_seconds: float = 60.0) -> None:
    """Returns when this rank knows where all stop: on a busy machine the threads that tell may take their time."""
    assert isinstance(trainer.strategy, MegatronStrategy) and trainer.strategy._run is not None
    if trainer.world_size > 1:
        is_heard = trainer.strategy._run.preemption._vote._round.is_decided.wait(limit_seconds)
        assert is_heard or not limit_seconds


class Paced(L.Callback):
    """Sends a signal at a point, to one rank or to all, and waits there until it is heard."""

    def __init__(self, point: str = "", rank: int = EVERY_RANK, number: int = signal.SIGTERM) -> None:
        self.point, self.rank, self.number = point, rank, number
        self.validated: list[tuple[int, float]] = []
        self.skipped: list[int] = []

    def come(self, trainer: L.Trainer, point: str) -> None:
        if point == self.point:
            self.point = ""
            if self.rank in (trainer.global_rank, EVERY_RANK):
                os.kill(os.getpid(), self.number)
            until_heard(trainer)

    def on_sanity_check_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.come(trainer, "before the first step")

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self.come(trainer, f"step {trainer.global_step}")

    def on_validation_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if trainer.current_epoch == 1:
            self.come(trainer, "validation")

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.current_epoch == 0:
            self.come(trainer, "between epochs")

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validated.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))


def trainer_of(layout: Layout, folder: Path, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    config = options.pop("checkpoint", CheckpointConfig())
    trainer = make_trainer(
        layout,
        max_epochs=3,
        callbacks=[ModelCheckpoint(folder / "top", save_top_k=0), *callbacks],
        enable_checkpointing=True,
        default_root_dir=folder,
        **options,
    )
    if isinstance(trainer.strategy, MegatronStrategy):
        trainer.strategy.checkpoint = config
    return trainer


def interrupted(layout: Layout, folder: Path, point: str, rank: int, ema: bool, number: int) -> dict[str, Any]:
    """A run that a signal ends, and the one that goes on; and one without a break."""
    failure_watch._POLL_SECONDS = 0.02  # type: ignore[attr-defined]
    config = CheckpointConfig(save_on_signals=("SIGTERM", "SIGUSR1"))
    others = [EMAWeightAveraging(decay=0.5)] if ema else []
    paced = Paced(point, rank, number)
    trainer = trainer_of(layout, folder, paced, *others, checkpoint=config, num_sanity_val_steps=1)
    before = signal.getsignal(signal.SIGTERM)
    code: Any = "it went on"
    try:
        trainer.fit(Small().double(), Rows())
    except SIGTERMException as ended:
        code = ended.code
    found: dict[str, Any] = {"code": code, "step": trainer.global_step, "validated": paced.validated}
    found["is given back"] = signal.getsignal(signal.SIGTERM) is before
    found["saved"] = is_checkpoint(folder / "top" / "last.ckpt")

    module, again = Small().double(), Paced()
    others = [EMAWeightAveraging(decay=0.5)] if ema else []
    trainer = trainer_of(layout, folder, again, *others)
    trainer.fit(module, Rows(), ckpt_path="last")
    found["resumed"] = weights(module)
    found["validated"] += again.validated

    module, full = Small().double(), Paced()
    others = [EMAWeightAveraging(decay=0.5)] if ema else []
    trainer_of(layout, folder / "whole", full, *others).fit(module, Rows())
    found["whole"] = weights(module)
    found["all validations"] = full.validated
    return found


def whole_and_resumed_are_equal(found: dict[str, Any]) -> None:
    assert parts_apart(found["resumed"], found["whole"]) == 0
    assert found["validated"] == found["all validations"]
    assert len(found["validated"]) == 3


@pytest.mark.filterwarnings(NO_LAST, "ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize(
    ("name", "point", "rank", "ema"),
    every_nth(
        [
            ("pp2", "step 2", EVERY_RANK, False),
            ("pp2", "step 2", 1, False),
            ("one", "step 2", 0, False),
            ("dp2", "validation", 1, True),
            ("dp2", "step 7", 0, False),
            ("dp2", "step 5", 1, False),
            ("pp2", "between epochs", 0, False),
            ("one", "validation", 0, True),
            ("one", "between epochs", 0, False),
        ],
        3,
    ),
)
def test_a_signal_to_any_rank_ends_the_run_after_a_save(
    name: str, point: str, rank: int, ema: bool, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    number = signal.SIGUSR1 if rank == 0 else signal.SIGTERM
    all_found = run_on_ranks(layout.world, interrupted, layout, tmp_path, point, rank, ema, number, init=False)
    for found in all_found:
        assert found["code"] is None and found["saved"] and found["is given back"]
        assert 0 < found["step"] < 3 * NUM_BATCHES
        if point == "validation":
            assert found["step"] == 2 * NUM_BATCHES
        whole_and_resumed_are_equal(found)
    assert len({found["step"] for found in all_found}) == 1


@pytest.mark.filterwarnings(NO_LAST)
@pytest.mark.parametrize("layout", [ONE, DP2])
def test_before_the_first_step_there_is_nothing_to_save(layout: Layout, tmp_path: Path) -> None:
    for found in run_on_ranks(
        layout.world, interrupted, layout, tmp_path, "before the first step", 0, False, signal.SIGTERM, init=False
    ):
        assert found["code"] is None and not found["saved"] and found["step"] == 0
        whole_and_resumed_are_equal(found)


class Storm:
    """Once opened, every write of a file's part brings one more signal."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        write, storm = ChunkWriter.write, self

        def wait(self: ChunkWriter, value: Tensor | bytes) -> ChunkLocation:
            assert storm.opened.wait(120)
            os.kill(os.getpid(), signal.SIGTERM)
            return write(self, value)

        ChunkWriter.write = wait  # type: ignore[method-assign]


class Signals(L.Callback):
    """Sends signals to the last rank, number by step, which waits until they are heard."""

    def __init__(self, at: dict[int, int], storm: Storm | None = None, limit_seconds: float = 60.0) -> None:
        self.at, self.storm, self.limit_seconds = at, storm, limit_seconds

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if (number := self.at.pop(trainer.global_step, 0)) and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), number)
            until_heard(trainer, self.limit_seconds)
        if trainer.global_step == 4 and self.storm is not None:
            threading.Timer(0.3, self.storm.opened.set).start()

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.on_train_batch_start(trainer)


def signalled_in_flight(layout: Layout, folder: Path) -> list[str]:
    failure_watch._POLL_SECONDS = 0.02  # type: ignore[attr-defined]
    signals = Signals({4: signal.SIGTERM}, Storm())
    trainer = trainer_of(layout, folder, signals, ModelCheckpoint(folder, "{step}", every_n_train_steps=3))
    with pytest.raises(SIGTERMException) as ended:
        trainer.fit(Small(), Rows())
    assert ended.value.code is None
    return sorted(path.name for path in folder.glob("**/*.ckpt") if is_checkpoint(path))


@pytest.mark.parametrize("layout", [ONE, PP2])
def test_a_save_in_flight_lands_first_and_further_signals_lose_nothing(layout: Layout, tmp_path: Path) -> None:
    for found in run_on_ranks(layout.world, signalled_in_flight, layout, tmp_path, init=False):
        assert found in (["last.ckpt", "step=3.ckpt"], ["last.ckpt", "step=6.ckpt"])
    assert not list(tmp_path.glob("**/.unfinished"))


def signalled_with_validations(folder: Path) -> None:
    """Every second batch of every second epoch is followed by one."""
    for at, ended_at, validated_at in ((1, 2, []), (7, 8, [8])):
        paced = Paced()
        options = {"val_check_interval": 2, "check_val_every_n_epoch": 2, "num_sanity_val_steps": 0}
        trainer = trainer_of(ONE, folder / str(at), Signals({at: signal.SIGTERM}), paced, **options)
        with pytest.raises(SIGTERMException):
            trainer.fit(Small(), Rows())
        assert trainer.global_step == ended_at
        assert [step for step, _ in paced.validated] == validated_at


def test_a_run_stops_after_a_validation_that_is_due_and_waits_for_none_of_another_epoch(tmp_path: Path) -> None:
    run_on_ranks(1, signalled_with_validations, tmp_path, init=False)


def signalled_at_the_end(folder: Path) -> None:
    # Nobody hears of it in time.
    failure_watch._POLL_SECONDS = 60.0  # type: ignore[attr-defined]
    trainer = trainer_of(DP2, folder, Signals({16: signal.SIGTERM}, limit_seconds=0.0))
    with pytest.raises(SIGTERMException):
        trainer.fit(Small(), Rows())
    assert trainer.global_step == 18


def test_a_run_that_ends_before_all_ranks_hear_of_the_signal_ends_the_process_too(tmp_path: Path) -> None:
    run_on_ranks(2, signalled_at_the_end, tmp_path, init=False)


def signalled_in_a_run_of(what: str, folder: Path) -> None:
    failure_watch._POLL_SECONDS = 0.02  # type: ignore[attr-defined]
    trainer = trainer_of(DP2, folder, Signals({0: signal.SIGTERM}))
    with pytest.raises(SIGTERMException) as ended:
        getattr(trainer, what)(Small(), Rows(), verbose=False)
    # Of the other rank too, which got no signal.
    assert trainer.received_sigterm
    assert ended.value.code is None and not list(folder.glob("**/*.ckpt"))


def test_an_evaluation_ends_and_saves_nothing(tmp_path: Path) -> None:
    run_on_ranks(2, signalled_in_a_run_of, "validate", tmp_path, init=False)


def ignored(folder: Path) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    # Not asked for: the user's own handler stays alone.
    trainer = trainer_of(ONE, folder, Signals({2: signal.SIGUSR1}))
    trainer.fit(Small(), Rows())
    assert seen == [signal.SIGUSR1] and trainer.global_step == 18
    # Asked for: it is called too.
    config = CheckpointConfig(save_on_signals=("SIGUSR1",))
    with pytest.raises(SIGTERMException):
        trainer_of(ONE, folder, Signals({2: signal.SIGUSR1}), checkpoint=config).fit(Small(), Rows())
    assert seen == [signal.SIGUSR1] * 2


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_handler_of_the_user_is_called_too(tmp_path: Path) -> None:
    run_on_ranks(1, ignored, tmp_path, init=False)


def requeued(folder: Path) -> int:
    failure_watch._POLL_SECONDS = 0.02  # type: ignore[attr-defined]
    rank = os.environ["RANK"]
    os.environ.update(
        SLURM_JOB_ID="77", SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_NTASKS="2", SLURM_NODEID="0",
        SLURM_JOB_NAME="train", SLURM_NTASKS_PER_NODE="2", PATH=f"{folder}:{os.environ['PATH']}",
    )  # fmt: skip
    signals = Signals({3: signal.SIGUSR1, 12: signal.SIGTERM})
    trainer = trainer_of(PP2, folder, signals, plugins=[SLURMEnvironment()])
    with pytest.raises(SIGTERMException):
        trainer.fit(Small(), Rows())
    return trainer.global_step


def test_a_job_of_slurm_is_saved_by_all_ranks_before_it_is_queued_again(tmp_path: Path) -> None:
    script = tmp_path / "scontrol"
    log, saved = tmp_path / "log", tmp_path / "hpc_ckpt_1.ckpt" / "manifest.json"
    script.write_text(f'#!/bin/sh\necho "$@" >> "{log}"\nls "{saved}" >> "{log}"\n')
    script.chmod(0o755)
    steps = run_on_ranks(2, requeued, tmp_path, init=False)
    assert log.read_text().splitlines() == ["requeue 77", str(saved)]
    # The run went on until it was ended.
    assert steps[0] == steps[1] >= 12
    assert 3 < read_meta(tmp_path / "hpc_ckpt_1.ckpt")["global_step"] < 12
    assert is_checkpoint(tmp_path / "top" / "last.ckpt")


class NoTime:
    """Votes whose messages a test carries by hand."""

    def __init__(self, num_ranks: int) -> None:
        self.count = StopCount(num_ranks)
        self.votes = [StopVote(num_ranks) for _ in range(num_ranks)]

    def talk(self, times: int = 1) -> None:
        for _ in range(times):
            for rank, vote in enumerate(self.votes):
                for message in vote.due():
                    if (answer := self.count.hear(rank, message)) is not None:
                        for told in self.votes:
                            told.hear(answer)


def test_ranks_stop_after_the_latest_stop_point_that_any_has_passed() -> None:
    board = NoTime(3)
    for vote, passed in zip(board.votes, (5, 7, 6), strict=True):
        assert all(vote.reason_to_stop(point) is None for point in range(1, passed + 1))
    board.votes[2].ask("SIGTERM")
    board.votes[0].ask("SIGUSR1")
    board.talk(3)
    reasons = [{vote.reason_to_stop(point) for vote in board.votes} for point in (6, 7, 8)]
    assert reasons == [{None}, {None}, {"SIGUSR1"}]
    for vote in board.votes:
        vote.go_on(8, "SIGUSR1")
    # The other wish is not forgotten.
    assert board.votes[0].reason_to_stop(9) is None
    board.talk(3)
    assert [vote.reason_to_stop(10) for vote in board.votes] == ["SIGTERM"] * 3


def test_a_rank_that_never_answers_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_vote, "_AGREE_SECONDS", 0.05)
    board = NoTime(2)
    board.votes.pop()
    board.votes[0].ask("SIGTERM")
    board.talk(2)
    with pytest.raises(RuntimeError, match=r"SIGTERM, but not all ranks answered within 0\.05 s"):
        board.votes[0].reason_to_stop(1)


def test_names_that_are_no_signals_are_refused() -> None:
    with pytest.raises(ValueError, match=r"save_on_signals \('SIGKILL', 'USR1'\) must be names of signals"):
        CheckpointConfig(save_on_signals=("USR1", "SIGKILL"))

"""Ranks that torchrun starts again find each other, whatever its store has of the last attempt, and go on from last."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint import CheckpointConfig
from lightning_megatron.trainer.setup.attempt_store import attempt_store
from tests.harness.ranks import free_port, run_on_ranks
from tests.trainer.fits import parts_apart, weights
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.modules import Data, Small

TIMEOUT = timedelta(seconds=20)
DP2 = Layout(world=2)
# What Lightning says of a fresh run, and of one that goes on.
USUAL = (
    "ignore:.*there is no last checkpoint available:UserWarning",
    "ignore:Checkpoint directory .* exists and is not",
)


class IsKilledOnce(L.Callback):
    """Kills one rank in the first attempt; notes at which step each attempt begins."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        (self.folder / f"attempt {attempt} rank {trainer.global_rank}").write_text(str(trainer.global_step))

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 5 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            trainer.strategy.barrier()
            if trainer.global_rank == self.rank:
                os.kill(os.getpid(), signal.SIGKILL)


def attempt(folder: Path, killed_rank: int) -> dict[str, torch.Tensor]:
    saves = ModelCheckpoint(folder / "saves", save_last=True, every_n_train_steps=2)
    module, callbacks = Small(), [saves, IsKilledOnce(folder, killed_rank)]
    # Nothing is in flight when the rank is killed.
    strategy = MegatronStrategy(checkpoint=CheckpointConfig(asynchronous=False), timeout_seconds=60)
    trainer = make_trainer(DP2, strategy=strategy, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(module, Data(), ckpt_path="last")
    return weights(module)


def torchrun(backend: str, folder: Path, killed_rank: int) -> dict[int, Any]:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend=backend,
        rdzv_endpoint=f"127.0.0.1:{free_port()}",
        rdzv_configs={"rank": 0, "timeout": 30},
        max_restarts=1,
        monitor_interval=0.1,
        # The libraries are loaded here already.
        start_method="fork",
    )
    results: dict[int, Any] = elastic_launch(config, attempt)(folder, killed_rank)
    return results


def whole() -> dict[str, torch.Tensor]:
    module = Small()
    make_trainer(DP2).fit(module, Data())
    return weights(module)


@pytest.mark.filterwarnings(*USUAL)
@pytest.mark.parametrize(("backend", "killed_rank"), [("static", 0), ("c10d", 1)])
def test_a_run_that_torchrun_starts_again_goes_on_from_last(backend: str, killed_rank: int, tmp_path: Path) -> None:
    [resumed] = run_on_ranks(1, torchrun, backend, tmp_path, killed_rank, init=False)
    for rank in range(2):
        assert (tmp_path / f"attempt 0 rank {rank}").read_text() == "0"
        assert (tmp_path / f"attempt 1 rank {rank}").read_text() == "4"
    for own, other in zip((resumed[0], resumed[1]), run_on_ranks(2, whole, init=False), strict=True):
        assert parts_apart(own, other) == 0


def test_ranks_of_an_attempt_see_what_they_write_and_nothing_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))

    def join(rank: int) -> Store:
        # In the second attempt the first rank finds the tickets of the first attempt before there are new ones.
        time.sleep(0.1 * rank)
        store = attempt_store(rank, 3, TIMEOUT)
        assert store is not None
        return store

    for attempt_number in range(2):
        with ThreadPoolExecutor(3) as pool:
            stores = list(pool.map(join, range(3)))
        assert not any(store.check(["address"]) for store in stores)
        stores[attempt_number].set("address", str(attempt_number))
        assert {store.get("address") for store in stores} == {str(attempt_number).encode()}


def test_where_torch_makes_a_store_for_each_attempt_there_is_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert attempt_store(0, 2, TIMEOUT) is None

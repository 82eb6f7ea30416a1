"""Tests of the harness itself: it reports the truth about ranks that work, fail, die and hang."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import ranks
from tests.harness.ranks import RankFailed, on_ranks, run_on_ranks


@on_ranks(4)
def test_ranks_are_joined_and_numbered() -> None:
    rank = dist.get_rank()
    assert os.environ["RANK"] == str(rank)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == 10


@pytest.mark.parametrize("factor", [2, 3])
@on_ranks(2)
def test_parameters_and_fixtures_reach_the_ranks(factor: int, tmp_path: Path) -> None:
    (tmp_path / f"{dist.get_rank()}").write_text(str(factor))
    dist.barrier()
    assert {path.read_text() for path in tmp_path.iterdir()} == {str(factor)}
    assert len(list(tmp_path.iterdir())) == 2


def rank_times(factor: torch.Tensor) -> torch.Tensor:
    return factor * dist.get_rank()


def test_results_come_back_in_rank_order() -> None:
    large = torch.ones(100_000)
    results = run_on_ranks(3, rank_times, large)
    assert [result[0].item() for result in results] == [0, 1, 2]
    assert all(result.shape == large.shape for result in results)


def thread_counts() -> tuple[int, int, int, float]:
    server = os.getppid()
    return server, len(os.listdir(f"/proc/{server}/task")), torch.get_num_threads(), torch.rand(1).item()


def test_ranks_are_forks_of_one_server_that_has_one_thread() -> None:
    first, second = run_on_ranks(2, thread_counts, init=False)
    again, _ = run_on_ranks(2, thread_counts, init=False)
    assert first[0] == second[0] == again[0]
    assert first[0] != os.getpid()
    assert first[1] == 1, "a fork of a process with threads may hang"
    assert first[2] == 1
    assert first[3] == second[3], "every rank begins with the same seed"


def one_rank_raises() -> None:
    if dist.get_rank() == 2:
        raise ValueError("the third rank has had enough")
    dist.barrier()


def test_a_failing_rank_is_reported_with_its_own_traceback() -> None:
    with pytest.raises(RankFailed) as failure:
        run_on_ranks(4, one_rank_raises)
    text = str(failure.value)
    assert text.startswith("rank 2 of 4 failed")
    assert "ValueError: the third rank has had enough" in text
    assert "in one_rank_raises" in text
    assert "raise ValueError" in text


def one_rank_asserts() -> None:
    value_of_interest = 5
    assert value_of_interest == dist.get_world_size()


def test_a_bare_assert_shows_what_it_looked_at() -> None:
    with pytest.raises(RankFailed, match="value_of_interest = 5"):
        run_on_ranks(2, one_rank_asserts)


def one_rank_raises_while_another_sleeps() -> None:
    if dist.get_rank() == 0:
        time.sleep(600)
    raise ValueError("at once")


def test_a_failure_does_not_wait_for_ranks_that_go_on() -> None:
    with pytest.raises(RankFailed, match="at once") as failure:
        run_on_ranks(2, one_rank_raises_while_another_sleeps)
    assert "rank 0 was still running and was ended" in str(failure.value)


def one_rank_dies() -> None:
    if dist.get_rank() == 1:
        os.abort()
    dist.barrier()


def test_a_rank_that_dies_without_a_word_is_the_one_that_is_named() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 2 failed:\nthe process ended by signal SIGABRT"):
        run_on_ranks(2, one_rank_dies)


def one_rank_returns_early() -> None:
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1), src=0)


def test_a_rank_that_waits_for_one_that_is_done_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LINGER_SECONDS", 1.0)
    with pytest.raises(RankFailed, match="rank 1 of 2 failed") as failure:
        run_on_ranks(2, one_rank_returns_early)
    assert "rank 0 had ended well" in str(failure.value)


def one_rank_is_stuck(seconds: float) -> None:
    if os.environ["RANK"] == "1":
        time.sleep(seconds)


def test_a_stuck_rank_is_ended_and_named_with_the_place() -> None:
    with pytest.raises(RankFailed, match="rank 1 of 2 did not end within 3 s") as failure:
        run_on_ranks(2, one_rank_is_stuck, 600.0, init=False, timeout=3)
    text = str(failure.value)
    assert "rank 1 was stuck here" in text
    assert "in one_rank_is_stuck" in text


@on_ranks(2)
def skipping_body() -> None:
    pytest.skip("not here")


def test_a_skip_on_the_ranks_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        skipping_body()


def test_a_function_that_ranks_cannot_import_is_refused() -> None:
    def local() -> None: ...

    with pytest.raises(TypeError, match="ranks import it"):
        run_on_ranks(2, local)


def warns() -> None:
    import warnings

    warnings.warn("careless", FutureWarning, stacklevel=1)


def test_a_warning_on_a_rank_is_an_error_as_in_any_test() -> None:
    with pytest.raises(RankFailed, match="FutureWarning: careless"):
        run_on_ranks(2, warns, init=False)


def fit_a_trainer(folder: str) -> tuple[int, int, float]:
    import lightning as L
    from torch.utils.data import DataLoader, TensorDataset

    class Line(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.layer(batch[0]).pow(2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    line = Line()
    trainer.fit(line, DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4))
    return trainer.world_size, trainer.global_step, line.layer.weight.sum().item()


def test_a_trainer_runs_inside_the_ranks(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, fit_a_trainer, str(tmp_path), init=False)
    assert first[:2] == (2, 3)
    assert first == second

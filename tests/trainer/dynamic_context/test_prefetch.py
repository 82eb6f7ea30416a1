"""Steps that are planned in the background: nothing waits, nothing counts twice, and errors are reported."""

import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanMetric

from lightning_megatron import ConfigurationError, CostModel, DynamicContextConfig, MegatronStrategy, PipelineConfig
from lightning_megatron.lightning_modules.loaders import training_loader
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.trainer.dynamic_context.prefetch import DynamicContext
from lightning_megatron.trainer.setup.replica import Replica
from tests.harness.ranks import RankFailed, run_on_ranks
from tests.harness.sample import WHOLE, every_nth
from tests.trainer.fits import Parts, parts_apart, weights
from tests.trainer.layouts import QUIET, replica_of

pytestmark = [
    pytest.mark.filterwarnings(QUIET),
    pytest.mark.filterwarnings("ignore:You have overridden `on_.*_batch_transfer`:UserWarning"),
]

ROWS, SEQUENCE = 24, 12
COST = CostModel(seconds_per_token=1.0, seconds_per_square=0.4, seconds_per_sent_token=0.1)
CONFIG = DynamicContextConfig(max_tokens_per_rank=8, cost=COST)
WAIT_SECONDS = 30.0
MODEL = GPTConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    vocab_size=32,
    max_sequence_length=16,
    init_std=0.1,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    position="rotary",
)

Sample = dict[str, Tensor]


def samples(kind: str) -> list[Sample]:
    """Rows of uneven documents; of `kind` "sparse" one token in all is valid, of "empty" there is no document."""
    generator = torch.Generator().manual_seed(4)
    rows = []
    for row in range(ROWS):
        tokens = torch.randint(0, 32, (SEQUENCE + 1,), generator=generator)
        lengths = torch.randint(1, 10, (SEQUENCE,), generator=generator)
        segments = torch.arange(SEQUENCE).repeat_interleave(lengths)[:SEQUENCE].clone()
        segments[SEQUENCE - row % 3 :] = -1
        mask = (torch.rand(SEQUENCE, generator=generator) < 0.6).double()
        if kind == "sparse":
            mask = torch.zeros(SEQUENCE, dtype=torch.float64)
            mask[0] = float(row == 5)
        if kind == "empty":
            segments.fill_(-1)
        rows.append({"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask, "segments": segments})
    return rows


class Rows(Dataset[Sample]):
    """The rows; where `is_noisy`, masks are drawn from the default generator when a row is read."""

    def __init__(self, kind: str = "", *, is_noisy: bool = False) -> None:
        self.rows, self.is_noisy = samples(kind), is_noisy
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        self.num_read += 1
        row = self.rows[index]
        return row | {"loss_mask": torch.rand(SEQUENCE, dtype=torch.float64)} if self.is_noisy else row


class Stream(IterableDataset[Sample]):
    """Rows without a length."""

    def __init__(self, rank: int, size: int) -> None:
        self.rows = Rows(is_noisy=True)
        self.rank, self.size = rank, size

    def __iter__(self) -> Iterator[Sample]:
        for index in range(self.rank, len(self.rows), self.size):
            yield self.rows[index]


class Part(Dataset[Sample]):
    """A dp rank's rows of every global batch of 8."""

    def __init__(self, rows: Rows, rank: int, size: int) -> None:
        share = 8 // size
        self.rows = rows
        self.chosen = [
            i for first in range(0, ROWS, 8) for i in range(first + rank * share, first + (rank + 1) * share)
        ]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Sample:
        return self.rows[self.chosen[index]]


def loader(data: str, rank: int, size: int) -> Any:
    """Three batches of 8 rows over all dp ranks."""
    if data == "two loaders":
        return {name: loader("", rank, size) for name in ("a", "b")}
    if data == "stream":
        return DataLoader(Stream(rank, size), batch_size=8 // size)
    if data == "own state":
        dp_rank = Replica(rank, size)
        rows = Rows(is_noisy=True)
        return training_loader(rows, ROWS, global_batch_size=8, replica=dp_rank, seed=1, num_workers=0)
    if data == "noisy":
        return DataLoader(Part(Rows(is_noisy=True), rank, size), batch_size=8 // size, shuffle=True)
    return DataLoader(Part(Rows(data), rank, size), batch_size=8 // size)


class Learner(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: GPTModel | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPTModel(MODEL, seed=3)

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(**batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("num_tokens", (batch["segments"] >= 0).double().sum(), reduce_fx="sum")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


@dataclass
class Record:
    """What a fit did on one rank."""

    losses: dict[int, float] = field(default_factory=dict)
    """By the number of the batch in the run."""
    logged: dict[str, float] = field(default_factory=dict)
    weights: Parts = field(default_factory=dict)
    names: list[list[int]] = field(default_factory=list)
    """Of the documents of the first batch that this rank counts: those of groups of which it is the first rank."""
    sizes: set[int] = field(default_factory=set)
    """Of the groups that it was in."""
    num_read: int = 0
    num_threads: int = 0


class Recorder(L.Callback):
    def __init__(self, folder: Path | None) -> None:
        self.record, self.folder = Record(), folder

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        number = trainer.fit_loop.total_batch_idx
        self.record.losses[number] = float(outputs["loss"])
        if self.folder is not None:
            trainer.save_checkpoint(self.folder / f"{number}.ckpt")

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.record.weights = weights(module)
        self.record.logged = {name: float(value) for name, value in trainer.callback_metrics.items()}


class Watching(Learner):
    """Writes down which documents it is given."""

    record: Record

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        assert self.model is not None
        group = self.model.context_group
        if group is not None:
            self.record.sizes.add(group.size)
            if batch_idx == 0 and group.rank == 0 and self.current_epoch == 0:
                assert self.model.draws.documents is not None
                self.record.names += self.model.draws.documents.tolist()
        return super().training_step(batch, batch_idx)


def make_trainer(world: int, strategy: Any, **options: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world,
        "strategy": strategy,
        "precision": "64-true",
        "max_epochs": 2,
        "use_distributed_sampler": False,
        "log_every_n_steps": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return L.Trainer(**(defaults | options))


def fit(
    world: int,
    data: str = "",
    *,
    folder: Path | None = None,
    resumed_from: Path | None = None,
    seed: int = 1,
    module: Callable[[], Learner] = Watching,
    strategy: Any = None,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Record:
    torch.manual_seed(seed)
    settings = {"dynamic_context": CONFIG, "timeout_seconds": 60} | settings
    made = strategy or MegatronStrategy(**settings)
    recorder = Recorder(folder)
    trainer = make_trainer(world, made, callbacks=[recorder], **(options or {}))
    learner = module()
    learner.record = recorder.record  # type: ignore[assignment]
    loaders: list[Any] = []

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            loaders.append(loader(data, *replica_of(trainer)))
            return loaders[-1]

    trainer.fit(learner, datamodule=Data(), ckpt_path=resumed_from)
    dataset = loaders[-1].dataset
    recorder.record.num_read = dataset.rows.num_read if isinstance(dataset, Part) else 0
    recorder.record.num_threads = sum(thread.name == "dynamic-context" for thread in threading.enumerate())
    return recorder.record


def fit_with(world: int, data: str, settings: dict[str, Any]) -> Record:
    return fit(world, data, **settings)


def fits(world: int, data: str = "", **settings: Any) -> list[Record]:
    return run_on_ranks(world, fit_with, world, data, settings, init=False)


@functools.cache
def plain(data: str) -> Record:
    [record] = run_on_ranks(1, fit_with, 1, data, {"strategy": MegatronStrategy()}, init=False)
    return record


# ----------------------------------------------------------------------------------------------------------------------
# numbers


@pytest.mark.parametrize(
    ("world", "data", "settings"),
    [
        (4, "", {"context_parallel_size": 2}),
        (2, "sparse", {}),
        (2, "empty", {"pipeline_model_parallel_size": 2}),
        (1, "", {"dynamic_context": DynamicContextConfig(max_tokens_per_rank=20, cost=COST)}),
    ],
    ids=["dp2 cp2", "one valid token", "no document", "one device"],
)
def test_losses_and_weights_are_those_of_the_static_layout(world: int, data: str, settings: dict[str, Any]) -> None:
    wanted = plain(data)
    records = fits(world, data, **settings)
    for record in records:
        assert record.losses.keys() == wanted.losses.keys() and len(wanted.losses) == 6
        assert max(abs(record.losses[step] - loss) for step, loss in wanted.losses.items()) < 1e-12
        assert parts_apart(record.weights, wanted.weights) < 1e-12
        assert record.logged.keys() == wanted.logged.keys()
        assert max(abs(record.logged[name] - value) for name, value in wanted.logged.items()) < 1e-12
        assert record.num_threads == 0
    if data == "":
        assert record.logged["num_tokens"] == sum(int((row["segments"] >= 0).sum()) for row in samples("")[16:])


def test_every_document_runs_once_under_its_own_name_and_long_ones_on_several_ranks() -> None:
    records = fits(4)
    rows = samples("")[:8]
    wanted = [[row, number] for row, one in enumerate(rows) for number in range(int(one["segments"].max()) + 1)]
    assert sorted(name for record in records for name in record.names) == wanted
    assert {1, 2} <= set().union(*(record.sizes for record in records))


class Drawing(Watching):
    """Draws a number in every microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[tuple[int, ...], list[float]] = {}

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        assert self.model is not None and self.model.context_group is not None
        self.drawn.setdefault(self.model.context_group.ranks, []).append(float(torch.rand(())))
        return super().training_step(batch, batch_idx)


def drawn() -> dict[tuple[int, ...], list[float]]:
    module = Drawing()
    fit(4, module=lambda: module, options={"max_epochs": 1})
    return module.drawn


def test_a_step_draws_alike_on_the_ranks_of_a_group_and_apart_elsewhere() -> None:
    by_rank = run_on_ranks(4, drawn, init=False)
    assert max(len(ranks) for drawn in by_rank for ranks in drawn) > 1
    groups = {ranks: numbers for drawn in by_rank for ranks, numbers in drawn.items()}
    for own in by_rank:
        assert all(groups[ranks] == numbers for ranks, numbers in own.items())
    numbers = [number for drawn in groups.values() for number in drawn]
    assert len(set(numbers)) == len(numbers)


# ----------------------------------------------------------------------------------------------------------------------
# ahead of time


class Meeting(Watching):
    """In every step but the last waits until the plan of the next one has been begun, which waits for its end."""

    begun = tuple(threading.Event() for _ in range(7))
    ended = tuple(threading.Event() for _ in range(7))

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        step = self.trainer.fit_loop.total_batch_idx
        if batch_idx < 2:
            assert self.begun[step + 1].wait(WAIT_SECONDS), f"in step {step} the next one's plan was not begun"
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.ended[self.trainer.fit_loop.total_batch_idx].set()


class MeetingStrategy(MegatronStrategy):
    def _make_document_prefetch(self, trainer: L.Trainer, config: DynamicContextConfig) -> DynamicContext:
        dynamic = super()._make_document_prefetch(trainer, config)
        solve, steps = dynamic._plan, iter(range(7))

        def solve_late(*args: Any, **kwargs: Any) -> Any:
            step = next(steps)
            Meeting.begun[step].set()
            # The first of an epoch has no compute to overlap.
            if step % 3:
                assert Meeting.ended[step - 1].wait(WAIT_SECONDS), f"step {step - 1} waits for the plan of the next one"
            return solve(*args, **kwargs)

        dynamic._plan = solve_late
        return dynamic


def test_a_step_ends_while_the_plan_of_the_next_one_is_being_made() -> None:
    settings = {"strategy": MeetingStrategy(dynamic_context=CONFIG, timeout_seconds=60), "module": Meeting}
    for record in fits(2, **settings):
        assert len(record.losses) == 6


@pytest.mark.parametrize("limit", [2, 1.0])
def test_nothing_is_read_that_is_not_trained_on(limit: float) -> None:
    for record in fits(2, options={"limit_train_batches": limit}):
        batches = 2 if limit == 2 else 3
        assert record.num_read == 2 * batches * 4
        assert len(record.losses) == 2 * batches


def test_a_run_that_stops_with_a_plan_on_its_way_leaves_no_thread() -> None:
    for record in fits(2, options={"max_steps": 2}):
        assert len(record.losses) == 2 and record.num_read == 12 and record.num_threads == 0


# ----------------------------------------------------------------------------------------------------------------------
# resuming


def resumed(data: str, steps: tuple[int, ...], folder: Path) -> list[str]:
    full = fit(2, data, folder=folder)
    found = []
    for step in steps:
        again = fit(2, data, resumed_from=folder / f"{step}.ckpt", seed=55)
        if again.losses != {number: loss for number, loss in full.losses.items() if number > step}:
            found.append(f"{step}: losses {again.losses} and not {full.losses}")
        if any(not torch.equal(again.weights[name][1], part) for name, (_, part) in full.weights.items()):
            found.append(f"{step}: weights")
    return found


# Steps of the first epoch and of the second; in a sample the three loaders share them.
PLACES = {"noisy": (1, 4), "own state": (2,), "stream": (4,)}


@pytest.mark.matrix
@pytest.mark.parametrize("data", every_nth(PLACES, 2))
def test_a_run_resumed_within_an_epoch_is_bit_by_bit_the_run_that_never_stopped(data: str, tmp_path: Path) -> None:
    steps = (1, 2, 4) if WHOLE in os.environ else PLACES[data]
    for found in run_on_ranks(2, resumed, data, steps, tmp_path, init=False, timeout=120):
        assert found == []


# ----------------------------------------------------------------------------------------------------------------------
# what goes wrong


class FailingStrategy(MegatronStrategy):
    """On the last rank the plan of the second step cannot be made."""

    def _make_document_prefetch(self, trainer: L.Trainer, config: DynamicContextConfig) -> DynamicContext:
        dynamic = super()._make_document_prefetch(trainer, config)
        solve, steps = dynamic._plan, iter(range(7))

        def solve_or_fail(*args: Any, **kwargs: Any) -> Any:
            if next(steps) == 1 and self.global_rank == 1:
                raise ArithmeticError("no plan today")
            return solve(*args, **kwargs)

        dynamic._plan = solve_or_fail
        return dynamic


def test_a_plan_that_fails_on_one_rank_ends_all_with_its_traceback() -> None:
    with pytest.raises(RankFailed, match=r"solve_or_fail[\s\S]*no plan today"):
        fits(2, strategy=FailingStrategy(dynamic_context=CONFIG, timeout_seconds=60))


class Forgetful(Learner):
    """Does not hand bounds to the model."""

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        assert self.model is not None
        return self.model(batch["tokens"], labels=batch["labels"], loss_mask=batch["loss_mask"])  # type: ignore[no-any-return]


class Counting(Learner):
    """Updates a metric while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        return loss


class Unweighted(Learner):
    """A loss of its own, of which nobody knows what it is a mean over."""

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        assert self.model is not None
        return self.model(batch["tokens"], segments=batch["segments"]).pow(2).mean()  # type: ignore[no-any-return]


class Hooked(Watching):
    """Changes every batch on its way to the device."""

    def on_before_batch_transfer(self, batch: Sample, dataloader_idx: int) -> Sample:
        return batch | {"tokens": (batch["tokens"] + 1) % 32}

    def on_after_batch_transfer(self, batch: Sample, dataloader_idx: int) -> Sample:
        return batch | {"loss_mask": batch["loss_mask"] * 0.5 * (batch["tokens"] > 9)}


def test_hooks_that_change_a_batch_change_the_microbatches() -> None:
    static = {"strategy": MegatronStrategy(), "module": Hooked}
    [wanted] = run_on_ranks(1, fit_with, 1, "", static, init=False)
    for record in fits(2, module=Hooked):
        assert max(abs(record.losses[step] - loss) for step, loss in wanted.losses.items()) < 1e-12
    assert abs(wanted.losses[0] - plain("").losses[0]) > 1e-3


def test_a_batch_that_was_not_planned_is_refused() -> None:
    with pytest.raises(RankFailed, match=r"got batch 0 of its epoch, of a, b, and one of .*labels.* was planned"):
        fits(2, "two loaders")


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"module": Forgetful}, r"packed \d+ documents into this microbatch, and the model was told of 0.*segments"),
        ({"module": Counting}, r"training_step updated the metrics mean under dynamic context"),
        ({"module": Unweighted}, r"say what the loss is a mean over"),
        (
            {"dynamic_context": DynamicContextConfig(max_tokens_per_rank=4, cost=COST)},
            r"\(9 tokens\).* longer than max_tokens_per_rank \(4\) times the widest group \(2 ranks\), 8 tokens; cut",
        ),
    ],
    ids=["no bounds", "metric", "no weight", "too long"],
)
def test_what_cannot_be_right_is_refused_in_the_first_step(settings: dict[str, Any], shown: str) -> None:
    with pytest.raises(RankFailed, match=shown):
        fits(2, **settings)


class Manual(Learner):
    automatic_optimization = False  # type: ignore[assignment]


def test_all_faults_of_a_configuration_are_reported_before_a_process_starts() -> None:
    strategy = MegatronStrategy(
        dynamic_context=CONFIG, num_microbatches=3, pipeline=PipelineConfig(mode="collective"), timeout_seconds=60
    )
    with pytest.raises(ConfigurationError) as caught:
        make_trainer(1, strategy).fit(Manual(), loader("", 0, 1))
    shown = "\n".join(caught.value.faults)
    assert "num_microbatches (3) must be 1 with dynamic_context" in shown
    assert "the manual optimization of Manual" in shown and 'mode="collective"' in shown


# ----------------------------------------------------------------------------------------------------------------------
# costs


def costs() -> list[float]:
    strategy = MegatronStrategy(
        dynamic_context=DynamicContextConfig(max_tokens_per_rank=8), context_parallel_size=2, timeout_seconds=60
    )
    found: list[CostModel] = []

    class Reading(Watching):
        def on_train_start(self) -> None:
            prefetch = strategy._require_run().document_prefetch
            assert prefetch is not None and prefetch.cost is not None
            found.append(prefetch.cost)
            assert all(parameter.grad is None for parameter in self.parameters())

    fit(2, strategy=strategy, module=Reading)
    return [found[0].seconds(tokens, tokens**2, size) for tokens in (4, 16) for size in (1, 2)]


def test_costs_are_measured_where_none_are_given_and_are_the_same_on_every_rank() -> None:
    first, second = run_on_ranks(2, costs, init=False)
    assert first == second and min(first) > 0

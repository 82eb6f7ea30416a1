"""The monitor of memory finds the fullest rank and phase, and compares the plan with what is there, kind by kind."""

import csv
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_megatron import CostModel, DynamicContextConfig, MegatronStrategy, OptimizerConfig
from lightning_megatron.lightning_modules import GPTModule
from lightning_megatron.lightning_modules.adamw import AdamWConfig
from lightning_megatron.trainer.callbacks import MemoryMonitor, memory
from lightning_megatron.trainer.callbacks.memory_meter import MeterName
from lightning_megatron.trainer.callbacks.plan_adapter import planned_run, seen_by
from lightning_megatron.transformer.lora import LoraConfig
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.trainer.callbacks.small_gpt import CONFIG, LAYOUTS, SEQUENCE, Texts, train
from tests.trainer.layouts import QUIET, Layout

pytestmark = pytest.mark.filterwarnings(QUIET)
MAIN = Layout(world=2, optimizer=OptimizerConfig(kind="distributed"))


class Dial:
    """A meter that shows what the test says: so much more for every rank, and for every phase."""

    name: MeterName = "resident"
    rank = 0
    num_resets = 0

    def reset(self) -> None:
        Dial.num_resets += 1

    def peak_bytes(self) -> int:
        return 1_000_000_000 * (1 + self.rank) + 1_000_000 * Dial.num_resets

    def reserved_bytes(self) -> int:
        return 0


def dialled(layout: Layout, folder: str) -> tuple[dict[str, float], list[dict[str, str]]]:
    """What was logged last, and the lines of the logger that have memory, by a meter of the test's."""

    class Rank(L.Callback):
        def setup(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
            Dial.rank, Dial.num_resets = trainer.global_rank, 0

    memory.meter_of = lambda device: Dial()  # type: ignore[attr-defined]
    callbacks = [Rank(), MemoryMonitor(print_after_steps=0)]
    _, trainer = train(layout, callbacks, Path(folder), limit_val_batches=1, log_every_n_steps=2, val_check_interval=3)
    trainer.strategy.barrier()
    with (Path(folder) / "metrics.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if line.get("memory/fullest_rank")]
    numbers = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("memory")}
    return numbers, lines


@pytest.mark.parametrize("name", ["one", "plain", "pp2", "dp2"])
def test_the_fullest_rank_is_logged_alike_on_all_ranks_every_n_steps(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    found = run_on_ranks(layout.world, dialled, layout, str(tmp_path), init=False)
    for numbers, lines in found:
        assert numbers == found[0][0]
        assert numbers["memory/fullest_rank"] == layout.world - 1
        peaks = [value for name, value in numbers.items() if name.endswith("_resident_gb")]
        assert all(int(peak) == layout.world for peak in peaks)
        # Two of four steps; validation comes between them.
        assert [line["step"] for line in lines] == ["1", "3"]
        assert [bool(line["memory/evaluation_resident_gb"]) for line in lines] == [False, True]
        assert lines[0]["memory/setup_resident_gb"] == lines[1]["memory/setup_resident_gb"] != ""
        assert ("memory/planned_gb" in numbers) == (not layout.is_plain)
    # A later phase shows more: each was set back before it.
    numbers = found[0][0]
    assert numbers["memory/optimizer_resident_gb"] > numbers["memory/forward_backward_resident_gb"]


def table_of(layout: Layout, options: dict[str, Any]) -> str:
    """What is printed."""
    printed: list[str] = []

    L.Trainer.print = lambda self, *parts: printed.extend(map(str, parts))  # type: ignore[method-assign]
    train(layout, [MemoryMonitor()], **options)
    return "\n".join(printed)


def columns(text: str) -> dict[str, tuple[float, float]]:
    """Plan and measured by kind."""
    rows = re.findall(r"^([a-z ]+?) +([\d.e-]+) +([\d.e-]+)$", text, re.MULTILINE)
    return {kind: (float(plan), float(measured)) for kind, plan, measured in rows}


TABLES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "tp2": (LAYOUTS["tp2"], {}),
    "one": (LAYOUTS["one"], {}),
    "interleaved": (LAYOUTS["interleaved"], {}),
    "pp2": (LAYOUTS["pp2"], {}),
    "LoRA adapters": (LAYOUTS["pp2"], {"lora": LoraConfig(rank=16, targets=("attention.qkv", "mlp.down"))}),
    "distributed": (MAIN, {}),
    "bf16 with master weights": (MAIN, {"precision": "bf16-mixed"}),
    "collective": (replace(LAYOUTS["pp2"], collective=True), {}),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", every_nth(TABLES, 2))
def test_what_is_held_from_step_to_step_is_what_the_planner_estimated(name: str) -> None:
    layout, options = TABLES[name]
    text, *others = run_on_ranks(layout.world, table_of, layout, options, init=False, timeout=120)
    assert others == [""] * (layout.world - 1)
    found = columns(text)
    has_master = options.get("precision") == "bf16-mixed"
    for kind in ("weights", "gradients", "moments", *(["master weights"] if has_master else [])):
        plan, measured = found[kind]
        # AdamW's numbers of steps are 4 bytes a parameter; under mixed precision vectors stay in float32, and buckets
        # of both data-parallel ranks are padded to one length.
        assert plan > 0 and measured == pytest.approx(plan, rel=0.05 if has_master or layout is MAIN else 2e-3)
    if not has_master:
        # What the optimizer steps shares the memory of the weights.
        assert found["master weights"] == (0, 0)
    # The process has all of that, and buffers of libraries besides.
    assert found["activations and the rest"][1] > found["activations and the rest"][0] > 0
    assert found["sum"][1] == pytest.approx(sum(m for kind, (_, m) in found.items() if kind != "sum"), rel=1e-3)


def test_why_there_is_no_plan_is_printed_and_what_was_measured_all_the_same() -> None:
    [text] = run_on_ranks(1, table_of, LAYOUTS["plain"], {}, init=False)
    assert "no plan: the planner plans runs under MegatronStrategy" in text
    assert re.search(r"^weights +- +0\.000", text, re.MULTILINE)


COST = CostModel(seconds_per_token=1.0, seconds_per_square=0.4, seconds_per_sent_token=0.1)


class Documents(Texts):
    """The same tokens in documents of uneven lengths."""

    def train_dataloader(self) -> Any:
        full = super().train_dataloader()
        for index, row in enumerate(full.dataset):
            row["segments"] = torch.arange(SEQUENCE).ge(1 + index % (SEQUENCE - 1)).long()
        return full


class Steps(L.Callback):
    """Of each step the documents that were planned, and how many tokens this rank ran of them."""

    def __init__(self) -> None:
        self.planned: list[tuple[tuple[int, ...], int]] = []
        self.num_run: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.num_run.append(0)
        step = module.training_step

        def counted(batch: Any, batch_idx: int) -> Any:
            self.num_run[-1] += batch["tokens"].numel()
            return step(batch, batch_idx)

        if not hasattr(module, "is_counted"):
            module.training_step, module.is_counted = counted, True  # type: ignore[method-assign, assignment]

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, _: int
    ) -> None:
        run = planned_run(trainer, [seen_by(trainer, batch)])
        assert run.balanced is not None
        groups = run.balanced.plan.groups_of(trainer.global_rank)
        self.planned.append((run.balanced.lengths, sum(sum(run.balanced.lengths_of(group)) for group in groups)))


def balanced_fit() -> tuple[str, list[tuple[tuple[int, ...], int]], list[int]]:
    """What is printed, what was planned in each step, and what ran."""
    printed: list[str] = []
    L.Trainer.print = lambda self, *parts: printed.extend(map(str, parts))  # type: ignore[method-assign]
    steps = Steps()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MegatronStrategy(
            dynamic_context=DynamicContextConfig(max_tokens_per_rank=16, cost=COST), timeout_seconds=60
        ),
        precision="32-true",
        max_epochs=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[steps, MemoryMonitor()],
    )
    trainer.fit(GPTModule(CONFIG, AdamWConfig(warmup_steps=1)), Documents(2))
    return "\n".join(printed), steps.planned, steps.num_run


def test_under_dynamic_context_the_plan_is_that_of_the_very_step() -> None:
    found = run_on_ranks(2, balanced_fit, init=False)
    table = columns(found[0][0])
    for kind in ("weights", "gradients", "moments"):
        plan, measured = table[kind]
        assert plan > 0 and measured == pytest.approx(plan, rel=2e-3)
    assert table["activations and the rest"][0] > 0
    for _, planned, num_run in found:
        assert len(planned) == 2
        for step, (lengths, _) in enumerate(planned):
            # Four rows of each of two dp ranks.
            own = [length for index in range(4) for length in (1 + 4 * step + index, 15 - 4 * step - index)]
            assert list(lengths) == own * 2
        assert num_run == [own for _, own in planned]


def test_a_larger_model_shows_in_the_measured_peak() -> None:
    """The rest is measured and not made up: with more microbatches at a time it grows as the plan says."""
    small, large = (
        columns(run_on_ranks(1, table_of, layout, {"num_batches": 2}, init=False)[0])["activations and the rest"][0]
        for layout in (LAYOUTS["one"], replace(LAYOUTS["one"], microbatches=1))
    )
    assert large == pytest.approx(2 * small, rel=0.1)


def test_a_wrong_number_of_steps_is_reported() -> None:
    with pytest.raises(ValueError, match=r"print_after_steps \(-1\) of MemoryMonitor must be at least 0"):
        MemoryMonitor(print_after_steps=-1)

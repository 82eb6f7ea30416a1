"""With overlap gradients leave while other stages' backwards still run, and weights are waited for part by part."""

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy, OptimizerConfig, PipelineConfig
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.optim.bucket import Bucket
from lightning_megatron.optim.master_weights import MasterWeights
from lightning_megatron.pipeline.scheduled import ScheduledCall
from tests.harness.ranks import run_on_ranks

CONFIG = GPTConfig(
    num_layers=4, hidden_size=16, num_attention_heads=2, vocab_size=32, max_sequence_length=8, tie_embeddings=False
)
Events = list[tuple[str, Any]]


class Module(L.LightningModule):
    def configure_model(self) -> None:
        self.model = GPTModel(CONFIG, seed=3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch[0], labels=batch[0])
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def note(events: Events, kind: type, method: str, what: Any) -> None:
    """Has every call of a method written down, by what `what` makes of its arguments, before it runs."""
    original = getattr(kind, method)

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        events.append((method, what(self, *args)))
        return original(self, *args, **kwargs)

    setattr(kind, method, noted)


def last_step(overlaps: bool, layout: dict[str, Any], schedule: Any) -> Events:
    """What happened on this rank in the second of two steps, in order."""
    warnings.simplefilter("ignore")
    events: Events = []
    note(events, Bucket, "reduce", lambda bucket, **_: bucket.stages)
    note(events, ScheduledCall, "backward", lambda call, stage, microbatch, grad: stage)
    note(events, ScheduledCall, "backward_weight", lambda call, stage, microbatch: stage)
    note(events, ScheduledCall, "forward", lambda call, stage, microbatch, received: stage)
    flown: list[int] = []
    original = MasterWeights.wait

    def wait(self: MasterWeights, parameters: Any = None) -> None:
        before = len(self._in_flight)
        original(self, parameters)
        if before != len(self._in_flight):
            flown.append(before - len(self._in_flight))
            events.append(("landed", before - len(self._in_flight)))

    MasterWeights.wait = wait  # type: ignore[method-assign]
    config = OptimizerConfig(
        kind="distributed",
        bucket_size=500,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps,
        # It would wait for all weights after each of the first steps.
        check_replicas_every_n_steps=-1,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=layout.pop("world"),
        strategy=MegatronStrategy(
            optimizer=config, pipeline=PipelineConfig(schedule=schedule), timeout_seconds=60, **layout
        ),
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(trainer.global_rank // 8))
    module = Module()
    began: list[int] = []
    module.on_train_batch_start = lambda *_: began.append(len(events))  # type: ignore[assignment]
    trainer.fit(module, DataLoader(TensorDataset(rows), batch_size=4))
    return events[began[-1] :]


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "one stage": ({"world": 2, "num_microbatches": 2}, "auto"),
    "interleaved": (
        {
            "world": 4,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "num_microbatches": 4,
        },
        "auto",
    ),
    "ZB-V": (
        {
            "world": 4,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "num_microbatches": 4,
        },
        "zb_v",
    ),
}
_BACKWARDS = ("backward", "backward_weight")


@pytest.mark.parametrize("case", ["interleaved", "ZB-V"])
def test_gradients_of_a_stage_leave_before_the_backwards_of_the_others_are_over(case: str) -> None:
    layout, schedule = CASES[case]
    for events in run_on_ranks(layout["world"], last_step, True, dict(layout), schedule, init=False):
        sends = [place for place, (what, _) in enumerate(events) if what == "reduce"]
        backwards = [place for place, (what, _) in enumerate(events) if what in _BACKWARDS]
        assert len(sends) > 4
        assert min(sends) < max(backwards), events
        # And none before the last backward of its own stage has begun.
        for place in sends:
            assert not any(what in _BACKWARDS and stage in events[place][1] for what, stage in events[place + 1 :])


@pytest.mark.parametrize("case", ["one stage", "interleaved"])
def test_weights_land_part_by_part(case: str) -> None:
    layout, schedule = CASES[case]
    ranks = run_on_ranks(layout["world"], last_step, True, dict(layout), schedule, init=False)
    others = run_on_ranks(layout["world"], last_step, False, dict(layout), schedule, init=False)
    for events, plain in zip(ranks, others, strict=True):
        first = next(place for place, (what, _) in enumerate(events) if what == "forward")
        landed = [place for place, (what, _) in enumerate(events) if what == "landed"]
        # Several waits, and within forwards of the step: not all at once before it.
        assert len([place for place in landed if place > first]) > 2, events
        # Without overlap all land in one wait, at the end of the step before.
        assert [what for what, _ in plain].count("landed") == 1, plain

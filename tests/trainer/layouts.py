"""Layouts that the trainer's tests run under, and Trainers that are quiet about it."""

from dataclasses import dataclass, field
from typing import Any, Literal

import lightning as L
from lightning.pytorch.strategies import ParallelStrategy, Strategy

from lightning_megatron import ContextConfig, MegatronStrategy, PipelineConfig
from lightning_megatron.mesh import StageLayout
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.pipeline.registry import ScheduleName
from tests.harness.device import trainer_devices

# Values that the strategy hands to `log` are those of the global batch already.
QUIET = "ignore:It is recommended to use .*sync_dist=True:UserWarning"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many processes, how they are cut, and into how many microbatches a step goes."""

    world: int = 1
    tp: int = 1
    pp: int = 1
    sp: bool = False
    microbatches: int = 1
    collective: bool = False
    vp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    joint: bool = False
    """A forward overlaps a backward."""
    context: ContextConfig = field(default_factory=ContextConfig)
    schedule: Literal["auto"] | ScheduleName = "auto"
    stages: StageLayout = field(default_factory=StageLayout)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    is_plain: bool = False
    """Whether Lightning's own strategy for one device runs."""

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp * self.cp)

    def strategy(self) -> Strategy | str:
        """A new strategy of this layout."""
        if self.is_plain:
            return "auto"
        return MegatronStrategy(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            context_parallel_size=self.cp,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp,
            context=self.context,
            sequence_parallel=self.sp,
            num_microbatches=self.microbatches,
            virtual_pipeline_model_parallel_size=self.vp,
            pipeline=PipelineConfig(
                mode="collective" if self.collective else "auto",
                schedule=self.schedule,
                layout=self.stages,
                overlap_expert_exchange=self.joint,
            ),
            optimizer=self.optimizer,
            timeout_seconds=60,
        )


PLAIN = Layout(is_plain=True)


def make_trainer(layout: Layout, **options: Any) -> L.Trainer:
    """A Trainer of two epochs in float64 under the layout, with no output; `options` are the Trainer's."""
    defaults: dict[str, Any] = {
        **trainer_devices(layout.world),
        "strategy": layout.strategy(),
        "precision": "64-true",
        "max_epochs": 2,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "log_every_n_steps": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**(defaults | options))


def replica_of(trainer: L.Trainer) -> tuple[int, int]:
    """Data-parallel rank and size of this process."""
    strategy = trainer.strategy
    if not isinstance(strategy, ParallelStrategy):
        return 0, 1
    shown = strategy.distributed_sampler_kwargs
    return shown["rank"], shown["num_replicas"]


def share_of(texts: list[list[int]], layout: Layout, rank: int) -> list[list[int]]:
    """Of what is predicted from one global batch of prompts the part of this data-parallel rank."""
    num_own = -(-len(texts) // layout.dp)
    return texts[rank // (layout.tp * layout.cp) % layout.dp * num_own :][:num_own]

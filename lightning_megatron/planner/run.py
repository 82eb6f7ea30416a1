"""`Run`: a training run as the planner sees it, without Lightning and without a process.

`faults_of` lists its errors, by the rules that the strategy checks too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lightning_megatron.context.config import ContextConfig
from lightning_megatron.mesh import Sizes
from lightning_megatron.models import BertConfig
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.pipeline.registry import ScheduleName, default_name
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.schedules.gpipe import GPIPE
from lightning_megatron.planner.balanced_batch import BalancedBatch
from lightning_megatron.planner.framework_profile import OURS, AttentionKernel, FrameworkProfile
from lightning_megatron.planner.hardware import Products
from lightning_megatron.planner.model_parts import (
    Layer,
    Model,
    ModelParts,
    SequenceLengths,
    Stage,
    hashed_once,
    shared_over_context,
)
from lightning_megatron.planner.requires_grad import recomputed_parts, stages_of, stages_with_gradients
from lightning_megatron.planner.step_work import PLAIN_ADAMW, MakeOptimizer
from lightning_megatron.planner.trainable import ALL, Trainable, trainable_parts_of
from lightning_megatron.precision.fp8 import Fp8Config, engine_faults
from lightning_megatron.precision.kernels import KernelConfig
from lightning_megatron.rules.cross_config import Facts, faults
from lightning_megatron.transformer.recompute import RecomputeConfig

PRECISIONS = ("bf16-mixed", "bf16-true", "16-mixed", "32-true", "64-true")
_WIDE: dict[str, tuple[Products, int]] = {"32-true": ("full", 4), "64-true": ("double", 8)}


class UnmeasuredError(Exception):
    """A run on whose ranks a model cannot be cut, or does not run; the message has the errors, one a line."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Layout, batch, precision and strategy settings of a training run, whatever it trains."""

    lengths: SequenceLengths
    """Lengths of samples."""
    sizes: Sizes
    """Ranks on each axis."""
    global_batch_size: int
    """Samples of a batch, which is a step unless batches are accumulated."""
    num_accumulated: int = 1
    """Batches of an optimizer step, as the Trainer's accumulate_grad_batches."""
    micro_batch_size: int = 1
    """Samples of a microbatch."""
    cuts_by_rows: bool = False
    """Whether the strategy's microbatch_size cuts the batch: then a single microbatch runs under a schedule too."""
    precision: str = "bf16-mixed"
    """Precision of the Trainer."""
    fp8: Fp8Config | None = None
    """FP8 recipe of the layers' linears; None: no FP8."""
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    """Activation checkpointing: what the backward recomputes."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Sharding of the optimizer, and overlap of its communication with compute."""
    schedule_name: ScheduleName | None = None
    """Name of the pipeline schedule; None: the default for so many stages on a rank."""
    group_size: int = 0
    """Microbatches of a group of a schedule that has groups; 0: pp."""
    is_overlapped: bool = False
    """Whether forwards overlap backwards, as under the strategy's overlap_expert_exchange."""
    is_collective: bool = False
    """Whether a training step runs once for all microbatches, as in the pipeline's mode "collective", over stages."""
    context: ContextConfig = field(default_factory=ContextConfig)
    """Communication of attention under context parallelism."""
    kernels: KernelConfig = field(default_factory=KernelConfig)
    """Kernels in place of torch's own."""
    make_optimizer: MakeOptimizer = PLAIN_ADAMW
    """Makes the optimizer of a rank."""
    balanced: BalancedBatch | None = None
    """Documents of a batch and the ranks that run them, under dynamic context parallelism; None: without."""

    @cached_property
    def num_microbatches(self) -> int:
        """Number of microbatches of a batch on a data-parallel rank, rounded down; 0 where the sizes have errors."""
        if self.balanced is not None:
            return self.balanced.num_microbatches
        if self.sizes.faults() or self.micro_batch_size < 1:
            return 0
        return self.global_batch_size // (self.sizes.dp * self.micro_batch_size)

    @cached_property
    def schedule(self) -> Schedule:
        """Pipeline schedule of a batch; it may have errors. A collective step takes all forwards first."""
        name: ScheduleName = GPIPE.name if self.is_collective else self.schedule_name or default_name(self.sizes.vp)
        return Schedule(
            name=name,
            pp=self.sizes.pp,
            chunks=self.sizes.vp,
            microbatches=max(self.num_microbatches, 1),
            group_size=self.group_size,
            is_overlapped=self.is_overlapped,
        )

    @property
    def sets_gradients_aside(self) -> bool:
        """Whether the sum of earlier batches' gradients is held apart from those of the current batch: under a
        schedule each batch is divided by its own number of tokens."""
        return (
            not self.is_collective
            and self.num_accumulated > 1
            and (self.sizes.pp > 1 or self.num_microbatches > 1 or self.cuts_by_rows or self.balanced is not None)
        )

    @property
    def is_mixed(self) -> bool:
        """Whether weights in 16 bits have master weights in float32."""
        return self.precision in ("bf16-mixed", "16-mixed")

    @property
    def is_half(self) -> bool:
        """Whether products are in 16 bits or fewer."""
        return self.precision not in _WIDE

    @property
    def plain_products(self) -> Products:
        """Precision of the matrix products that are never in FP8."""
        return _WIDE[self.precision][0] if self.precision in _WIDE else "half"

    @property
    def products(self) -> Products:
        """Precision of the layers' matrix products."""
        return self.plain_products if self.fp8 is None else "fp8"

    @property
    def bytes_per_element(self) -> int:
        """Bytes of an activation element."""
        return _WIDE[self.precision][1] if self.precision in _WIDE else 2

    @property
    def stepped_bytes(self) -> int:
        """Bytes of a weight that the optimizer updates, and of each of its moments."""
        return 4 if self.is_mixed else self.bytes_per_element

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an accumulated gradient element."""
        return {"auto": self.stepped_bytes, "float32": 4, "bfloat16": 2}[self.optimizer.grad_dtype]

    @property
    def dry_kernels(self) -> KernelConfig:
        """Kernels of a dry run: operations on memory that ranks share need the ranks."""
        return replace(self.kernels, symmetric_memory=False)

    @property
    def fused_attention(self) -> AttentionKernel:
        """Fused attention kernel. FlashAttention's later releases are as fast as the vendor's kernel, which takes no
        packed documents. Source: Shah et al., arXiv 2407.08608, figure 5."""
        library = self.kernels.attention
        is_torch = library == "torch" or (library == "cudnn" and self.lengths.are_packed)
        return OURS.attention if is_torch else "vendor"

    @property
    def num_tokens(self) -> int:
        """Number of tokens of an optimizer step."""
        return self.num_accumulated * self.global_batch_size * self.lengths.sequence


@hashed_once
@dataclass(frozen=True, kw_only=True)
class Run(RunSettings):
    """A training run of one of the package's models."""

    model: Model
    """Architecture of the model."""
    trained: Trainable = ALL
    """Weights that are trained."""
    framework: FrameworkProfile = OURS
    """Training framework that runs it."""

    @cached_property
    def model_parts(self) -> ModelParts:
        return trainable_parts_of(self.model, self.lengths, self.trained)

    @cached_property
    def stages(self) -> tuple[tuple[Stage, ...], ...]:
        """Stages of each pipeline rank, first chunk first, as a cp rank runs them."""
        return self._by_rank(stages_of(self.model_parts, self.sizes.num_stages, self.sizes.stage_layout))

    @cached_property
    def recomputed(self) -> tuple[tuple[Stage, ...], ...]:
        """Layers of each stage that full recomputation covers."""
        stages = stages_with_gradients(self.model_parts, self.sizes.num_stages, self.sizes.stage_layout)
        return self._by_rank([recomputed_parts(stage, self.recompute) for stage in stages])

    @property
    def sp(self) -> int:
        """Ranks that shard activations between tensor-parallel regions: tp under sequence parallelism, else 1."""
        return self.sizes.tp if self.sizes.sequence_parallel else 1

    @property
    def dp_cp(self) -> int:
        """Ranks that hold the same dense weights."""
        return self.sizes.dp * self.sizes.cp

    def tokens_of(self, layer: Layer) -> float:
        """Number of tokens of a microbatch in a layer's sequence on a rank."""
        return self.micro_batch_size * layer.tokens_on(self.sizes)

    def recomputes_feed_forward(self, layer: Layer) -> bool:
        """Whether selective recomputation covers a layer's feed-forward network."""
        return ("moe" if layer.has_experts else "mlp") in self.recompute.recomputed_parts

    def _by_rank(self, stages: Sequence[Stage]) -> tuple[tuple[Stage, ...], ...]:
        own: list[list[Stage]] = [[] for _ in range(self.sizes.pp)]
        for number, stage in enumerate(stages):
            own[self.sizes.pp_rank_of(number)].append(self._on_rank(stage))
        return tuple(map(tuple, own))

    def _on_rank(self, stage: Stage) -> Stage:
        images, cp = self.lengths.images, self.sizes.cp
        if images == 0 or cp == 1:
            return stage
        return {shared_over_context(part, images, self.micro_batch_size, cp): count for part, count in stage.items()}

    @property
    def fused_attention(self) -> AttentionKernel:
        """Fused attention kernel of the framework, or that of another library."""
        return super().fused_attention if self.framework == OURS else self.framework.attention

    @property
    def saves_float8(self) -> bool:
        """Whether linears save and send what they multiply in float8: with scales of blocks they cast it later."""
        return self.fp8 is not None and self.fp8.scaling != "mxfp8"

    @property
    def num_tokens(self) -> int:
        """Number of tokens of an optimizer step."""
        if self.balanced is not None:
            return self.num_accumulated * self.balanced.num_tokens
        return self.num_accumulated * self.global_batch_size * self.model_parts.tokens


def context_fields(context: ContextConfig, cp: int) -> dict[str, Any]:
    """The fields of `Sizes` that describe the communication of attention over cp."""
    return {
        "cp_ulysses": context.ulysses_size_of(cp),
        "cp_exchange": "all_gather" if context.comm_type == "all_gather" else "ring",
        "attention_kernel": context.kernel,
        "pads_uneven": context.uneven == "pad",
    }


def faults_of(run: RunSettings) -> list[str]:
    """Errors of a run on any machine, one sentence for each rule that it breaks."""
    sizes, batch, micro = run.sizes, run.global_batch_size, run.micro_batch_size
    found = []
    if run.precision not in PRECISIONS:
        found.append(f"precision ({run.precision!r}) must be one of {', '.join(map(repr, PRECISIONS))}")
    if micro < 1:
        found.append(f"micro_batch_size ({micro}) must be at least 1")
    elif not sizes.faults() and (batch < 1 or batch % (sizes.dp * micro)):
        step = sizes.dp * micro
        below, above = max(batch, 0) // step * step, (max(batch, 0) // step + 1) * step
        fits = " or ".join(str(size) for size in (below, above) if size)
        found.append(
            f"global_batch_size ({batch}) must be a multiple of data-parallel size x micro batch ({sizes.dp} x {micro} "
            f"= {step}); use {fits}, or other sizes"
        )
    facts = Facts(
        sizes=sizes,
        num_microbatches=max(run.num_microbatches, 1),
        model=run.model if isinstance(run, Run) else None,
        sequence_length=run.lengths.sequence,
        decoder_sequence_length=run.lengths.decoder_sequence or None,
        schedule=run.schedule,
        recompute=run.recompute,
        kernels=run.kernels,
        fp8=run.fp8,
        precision=run.precision,
        context=run.context,
        optimizer=run.optimizer,
    )
    if isinstance(run, Run):
        if run.trained.lora is not None and run.fp8 is not None and run.fp8.engine == "transformer_engine":
            found.append("lora and the fp8 engine 'transformer_engine' do not go together; use the engine 'torch'")
        found += _packing_faults(run)
    # This machine need not have what the run needs.
    lacking = [] if run.fp8 is None else engine_faults(run.fp8)
    return found + [fault for fault in faults(facts) if fault not in lacking]


def _packing_faults(run: Run) -> list[str]:
    """Errors of packed documents, under which data-parallel ranks have different numbers of tokens."""
    if run.lengths.are_packed and isinstance(run.model, BertConfig):
        return ["packed documents are for a GPT, a T5 or a LLaVA, and the model is a BERT's, which takes no segments"]
    sizes, moe = run.sizes, run.model.moe
    num_sharing = sizes.ep * sizes.etp
    if moe is None or moe.dispatcher != "all_gather" or not run.lengths.are_packed:
        return []
    if num_sharing < 1 or sizes.tp * sizes.cp % num_sharing == 0:
        return []
    return [
        "dispatcher 'all_gather' needs as many tokens on each of the ranks that share experts "
        f"(expert x expert tensor parallel size, {num_sharing}), and with packed documents only ranks that share a "
        f"batch have (tensor x context parallel size, {sizes.tp * sizes.cp}); use dispatcher 'all_to_all', or rows "
        "without documents apart"
    ]

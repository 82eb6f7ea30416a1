"""A run under `MegatronStrategy` as the planner sees it: callbacks compare its plan with what they measure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_megatron.models import BertConfig, GPTConfig, LlavaConfig, T5Config
from lightning_megatron.models.images import images_by_row
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.planner.run import Run, faults_of
from lightning_megatron.trainer.callbacks.trained_weights import TrainedWeights, trained_of_ranks, trained_weights
from lightning_megatron.trainer.precision import compute_dtype
from lightning_megatron.trainer.setup import checks
from lightning_megatron.trainer.strategy import MegatronStrategy
from lightning_megatron.transformer.config import TransformerConfig


class NotPlanned(ValueError):
    """The planner has no picture of this run; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One rank's view of a step that is to be planned."""

    weights: TrainedWeights
    rows: int
    """Rows of its batch, where it has texts."""
    lengths: SequenceLengths | None
    """Lengths of the samples of its batch."""
    why_not: str = ""
    """Reason why the lengths cannot be known; empty where they are."""


def seen_by(trainer: pl.Trainer, batch: Any) -> Seen:
    """This rank's view of a step on this batch."""
    module, rows, lengths, why_not = trainer.lightning_module, 0, None, ""
    try:
        rows, lengths = _texts_of(checks.architecture_of(module), batch)
    except NotPlanned as error:
        why_not = str(error)
    return Seen(weights=trained_weights(module), rows=rows, lengths=lengths, why_not=why_not)


def planned_run(trainer: pl.Trainer, ranks: Sequence[Seen], *, rank: int = 0) -> Run:
    """A step in which every data-parallel rank has a batch like that of one global rank; under dynamic context
    parallelism the very step that runs, or was the last. `ranks` is what all of them saw.

    Raises NotPlanned.
    """
    strategy, module = trainer.strategy, trainer.lightning_module
    if not isinstance(strategy, MegatronStrategy):
        raise NotPlanned(f"the planner plans runs under MegatronStrategy, and this one is under {_name(strategy)}")
    model = checks.architecture_of(module)
    if not isinstance(model, (GPTConfig, BertConfig, T5Config)):
        raise NotPlanned(f"{_name(module)} has not exactly one configuration of a GPT, BERT, T5 or LLaVA")
    if strategy.dynamic_context is not None and strategy.pipeline.overlap_expert_exchange:
        raise NotPlanned("overlap_expert_exchange with dynamic context parallelism saves more than a plan knows")
    seen = ranks[rank]
    if seen.lengths is None:
        raise NotPlanned(seen.why_not)
    try:
        trained = trained_of_ranks([one.weights for one in ranks])
    except ValueError as error:
        raise NotPlanned(str(error)) from error
    rows = seen.rows
    count = -(-rows // strategy.microbatch_size) if strategy.microbatch_size else strategy.num_microbatches
    if strategy.dynamic_context is not None:
        count = rows
    fp8, precision = strategy.fp8, str(trainer.precision)
    is_fp8 = compute_dtype(precision) == torch.bfloat16 and fp8 is not None and fp8.is_float8
    run = Run(
        model=model,
        lengths=seen.lengths,
        sizes=strategy.sizes,
        global_batch_size=rows * strategy.sizes.dp,
        num_accumulated=trainer.accumulate_grad_batches,
        micro_batch_size=max(rows // count, 1),
        cuts_by_rows=strategy.microbatch_size > 0,
        precision="bf16-true" if precision == "transformer-engine" else precision,
        fp8=fp8 if is_fp8 else None,
        recompute=strategy.recompute,
        optimizer=strategy.optimizer,
        schedule_name=None if strategy.pipeline.schedule == "auto" else strategy.pipeline.schedule,
        group_size=strategy.pipeline.microbatch_group_size,
        is_overlapped=strategy.pipeline.overlap_expert_exchange,
        is_collective=is_collective(strategy, module),
        context=strategy.context,
        balanced=strategy.balanced_step,
        trained=trained,
    )
    if faults := trained.faults(model) + faults_of(run):
        raise NotPlanned("; ".join(faults))
    return run


def is_collective(strategy: MegatronStrategy, module: pl.LightningModule) -> bool:
    """Whether a training step of several stages runs once for all microbatches."""
    is_whole = strategy.pipeline.mode == "collective" or not module.automatic_optimization
    return is_whole and strategy.sizes.pp > 1


def _texts_of(model: TransformerConfig | None, batch: Any) -> tuple[int, SequenceLengths]:
    """Rows of a batch, and how long its samples are."""
    names = ("encoder_tokens", "decoder_tokens") if isinstance(model, T5Config) else ("tokens",)
    given = [batch.get(name) for name in names] if isinstance(batch, dict) else [batch]
    shapes = [tensor.shape for tensor in given if isinstance(tensor, Tensor) and tensor.dim() == 2]
    if len(shapes) != len(names):
        raise NotPlanned(f"the batch has not {' and '.join(names)}, each [batch, sequence]")
    rows, lengths = max(shapes[0][0], 1), [length for _, length in shapes]
    images = 0
    if isinstance(model, LlavaConfig) and isinstance(batch, dict):
        try:
            by_row = images_by_row(batch.get("images"), batch.get("image_rows"), rows)
        except ValueError as error:
            raise NotPlanned(str(error)) from error
        images = 0 if by_row is None else -(-sum(by_row.counts) // rows)
    segments = "encoder_segments" if isinstance(model, T5Config) else "segments"
    is_packed = isinstance(batch, dict) and batch.get(segments) is not None
    return rows, SequenceLengths(
        sequence=lengths[0], decoder_sequence=sum(lengths[1:]), images=images, are_packed=is_packed
    )


def _name(value: object) -> str:
    return type(value).__name__

"""FLOPs of a step by any convention that publications use: a convention is a value, and each number names its own.

    training step = 3 x forward                        a multiply-add is 2, matrix products alone; for frozen weights
                                                       only the needed products (`trainable`)
    causal attention                                   half of all pairs, or all of them
    recomputation                                      left out (model FLOPs), or added (hardware FLOPs)
    by parameters                                      6 N a token, and 12 L H S for attention, of all pairs

Sources: Narayanan et al., arXiv 2104.04473, appendix; Korthikanti et al., arXiv 2205.05198, appendix A; Chowdhery et
al., arXiv 2204.02311, appendix B (by parameters).
"""

from collections import Counter
from dataclasses import dataclass

from lightning_megatron.mesh import Sizes
from lightning_megatron.planner.model_parts import (
    ModelPart,
    ModelParts,
    SequenceLengths,
    ordered_stages,
    own_attention_flops,
    part_flops,
)
from lightning_megatron.planner.requires_grad import recomputed_parts
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.trainable import trainable_parts_of
from lightning_megatron.transformer import cost
from lightning_megatron.transformer.recompute import RecomputeConfig


@dataclass(frozen=True, kw_only=True)
class Convention:
    """A convention of counting FLOPs."""

    name: str
    """Name in reports."""
    counts_all_pairs: bool = False
    """Causal attention counts as if every token saw all others."""
    counts_recompute: bool = False
    """Whether recomputation counts."""
    by_parameters: bool = False
    """6 N a token instead of products; attention's pairs as above."""


MODEL = Convention(name="model FLOPs, causal attention half")
"""MFU's convention in this package, as in `metrics.throughput`."""
HARDWARE = Convention(name="hardware FLOPs, causal attention half", counts_recompute=True)
"""Model FLOPs and recomputation, as HFU counts."""
MODEL_ALL_PAIRS = Convention(name="model FLOPs, causal attention whole", counts_all_pairs=True)
HARDWARE_ALL_PAIRS = Convention(
    name="hardware FLOPs, causal attention whole", counts_all_pairs=True, counts_recompute=True
)
BY_PARAMETERS = Convention(
    name="6 N a token and attention, causal attention whole", counts_all_pairs=True, by_parameters=True
)


def step_flops(run: Run, convention: Convention = MODEL) -> float:
    """FLOPs of an optimizer step on all GPUs together."""
    if run.balanced is not None:
        # One sample holds all documents of a batch.
        lengths = SequenceLengths(sequence=run.balanced.num_tokens, are_packed=True, documents=run.balanced.lengths)
        model_parts = trainable_parts_of(run.model, lengths, run.trained)
        return batch_flops(model_parts, run.num_accumulated, convention, run.recompute, run.sizes)
    batch = run.num_accumulated * run.global_batch_size
    flops = batch_flops(run.model_parts, batch, convention, run.recompute, run.sizes)
    if convention.counts_recompute and run.kernels.loss_chunk_tokens:
        parts = run.model_parts.parts
        flops += sum(cost.head_flops(run.model, num_tokens=batch * part.logit_tokens) for part in parts)
    return flops


def batch_flops(
    model_parts: ModelParts, batch: int, convention: Convention, recompute: RecomputeConfig, sizes: Sizes = cost.ONE
) -> float:
    """FLOPs of forward and backward of so many samples. Of the layout only the layers that each stage recomputes
    matter."""
    all_pairs = convention.counts_all_pairs
    if convention.by_parameters:
        flops = 6.0 * model_parts.parameters() * batch * model_parts.tokens
        flops += 3.0 * sum(_attention_flops(part, batch, all_pairs) for part in model_parts.parts)
        num_layers = sum(part.is_layer for part in model_parts.parts)
        num_recomputed = _recomputed_layers(model_parts, recompute, sizes).total() if convention.counts_recompute else 0
        return flops + flops * num_recomputed / num_layers / 3
    flops = 0.0
    for part in model_parts.parts:
        forward = part_flops(part, model_parts.config, batch=batch, counts_all_pairs=all_pairs)
        attention = _attention_flops(part, batch, all_pairs)
        flops += (forward - attention) * (1.0 + part.passes_gradient + part.is_trained)
        flops += attention * (1 + 2 * part.passes_gradient) + 3 * _adapter_flops(part, batch)
    if convention.counts_recompute:
        flops += recomputed_flops(model_parts, batch, recompute, sizes, counts_all_pairs=all_pairs)
    return flops


def recomputed_flops(
    model_parts: ModelParts,
    batch: int,
    recompute: RecomputeConfig,
    sizes: Sizes = cost.ONE,
    *,
    counts_all_pairs: bool = False,
) -> float:
    """FLOPs that the backward of so many samples recomputes, on stages of these sizes.

    All of a recomputed forward counts, as in the publications; torch omits its last product, whose output no backward
    reads.
    """
    if recompute.granularity == "none":
        return 0.0
    selective = sum(_selective_flops(part, batch, counts_all_pairs, recompute) for part in model_parts.parts)
    return selective + sum(
        count * part_flops(part, model_parts.config, batch=batch, counts_all_pairs=counts_all_pairs)
        for part, count in _recomputed_layers(model_parts, recompute, sizes).items()
        if part.passes_gradient
    )


def _recomputed_layers(model_parts: ModelParts, recompute: RecomputeConfig, sizes: Sizes) -> Counter[ModelPart]:
    """The layers that full recomputation covers, with their counts."""
    stages = ordered_stages(model_parts, sizes.num_stages, sizes.stage_layout)
    return sum((recomputed_parts(stage, recompute) for stage in stages), Counter[ModelPart]())


def _selective_flops(part: ModelPart, batch: int, all_pairs: bool, recompute: RecomputeConfig) -> float:
    """FLOPs that selective recomputation adds to a layer."""
    layer, flops = part.layer, 0.0
    if layer is None or not part.passes_gradient:
        return flops
    if "core_attention" in recompute.recomputed_parts and layer.config.attention_dropout > 0:
        flops += _attention_flops(part, batch, all_pairs)
    if ("moe" if layer.has_experts else "mlp") in recompute.recomputed_parts:
        flops += cost.layer_mlp_flops(layer.config, num_tokens=layer.streams(batch) * layer.sequence, layer=layer.index)
    return flops


def _adapter_flops(part: ModelPart, batch: int) -> float:
    """Forward FLOPs of a part's LoRA adapters."""
    layer = part.layer
    if layer is None:
        return 0.0
    each = (
        adapter.tokens_on(layer, cost.ONE) * adapter.rank * (adapter.inputs + adapter.outputs)
        for adapter in part.adapters
    )
    return 2.0 * batch * sum(each)


def _attention_flops(part: ModelPart, batch: int, all_pairs: bool) -> float:
    """Forward FLOPs of attention: of scores and of weighted values."""
    layer = part.layer
    if layer is None:
        return 0.0
    own, streams = layer.config, layer.streams(batch)
    flops = own_attention_flops(layer, streams, counts_all_pairs=all_pairs)
    return flops + 4 * streams * layer.sequence * layer.memory * own.num_attention_heads * own.head_dim

"""Bytes of activations that a pipeline stage saves of a microbatch for backward, by the formulas of `transformer.cost`.

A closed form, which counts weights as trained and attention as one kernel; what a search shows is measured. To the
activations of layers come the ids and the dropout mask of an embedding, and the inputs of the final norm and of the
head. Under full recomputation a stage saves the inputs of groups of layers instead.
T tokens of a microbatch on this rank, H hidden.
"""

from functools import lru_cache

from lightning_megatron.models import BertConfig
from lightning_megatron.planner.layer_work import has_no_kernel
from lightning_megatron.planner.model_parts import Layer, ModelPart, Stage, sent_tokens
from lightning_megatron.planner.run import Run
from lightning_megatron.transformer import cost
from lightning_megatron.transformer.recompute import RecomputeConfig, groups_of

NO_RECOMPUTE = RecomputeConfig()


def stage_bytes(run: Run, stage: Stage) -> float:
    """Bytes that a stage saves of one microbatch for backward."""
    return sum(_end_bytes(run, part) for part in stage if part.layer is None) + layers_bytes(run, stage)


def layers_bytes(run: Run, stage: Stage) -> float:
    """Bytes that the layers of a stage save of one microbatch."""
    layers = 0.0
    for group, is_recomputed in layer_groups(run.recompute, stage):
        if is_recomputed:
            layers += layer_bytes(run, group[0], run.recompute)
        else:
            layers += sum(layer_bytes(run, part, within_layers(run.recompute)) for part in group)
    return layers


def largest_layer_bytes(run: Run, stage: Stage) -> float:
    """The most that a layer of a stage saves of one microbatch, if it is not recomputed in full."""
    layers = (part for part in stage if part.layer is not None)
    return max((layer_bytes(run, part, within_layers(run.recompute)) for part in layers), default=0.0)


def logit_bytes(run: Run, stage: Stage) -> float:
    """Bytes of one microbatch's logits and of what the loss computes from them."""
    tokens = max((part.logit_tokens for part in stage), default=0)
    if not tokens:
        return 0.0
    columns = cost.vocabulary_parameters(run.model, run.sizes) // run.model.hidden_size
    # From float32 on the exponentials overwrite the logits.
    each = run.framework.logit_bytes if run.is_half else run.bytes_per_element
    at_once = run.micro_batch_size * tokens / run.sizes.cp
    return min(at_once, run.kernels.loss_chunk_tokens or at_once) * columns * each


def recompute_bytes(run: Run, stage: Stage) -> float:
    """The most that a backward recomputes at a time, beyond what is saved for it."""
    return max(
        (
            sum(layer_bytes(run, part, NO_RECOMPUTE) for part in group) - layer_bytes(run, group[0], run.recompute)
            for group, is_recomputed in layer_groups(run.recompute, stage)
            if is_recomputed
        ),
        default=0.0,
    )


def layer_groups(recompute: RecomputeConfig, stage: Stage) -> list[tuple[list[ModelPart], bool]]:
    """Groups of a stage's layers, each with whether it is recomputed from its first input."""
    layers = [part for part, count in stage.items() if part.layer is not None for _ in range(count)]
    if recompute.granularity != "full":
        return [(layers, False)]
    ranges = groups_of(recompute, [part.is_layer for part in layers])
    return [([layers[index] for index in indices], is_recomputed) for indices, is_recomputed in ranges]


def within_layers(recompute: RecomputeConfig) -> RecomputeConfig:
    """The recomputation inside layers that are not recomputed in full."""
    return recompute if recompute.granularity == "selective" else NO_RECOMPUTE


def _end_bytes(run: Run, part: ModelPart) -> float:
    """Bytes that a part without a layer saves for backward."""
    hidden, width = run.model.hidden_size, run.bytes_per_element
    tokens = run.micro_batch_size * (run.lengths.decoder_sequence or run.lengths.sequence) / run.sizes.cp
    if part.embedded_tokens:
        # Ids, the dropout mask, and the input of a BERT's norm.
        tokens = run.micro_batch_size * part.embedded_tokens / run.sizes.cp
        is_normed = isinstance(run.model, BertConfig) and run.model.embedding_norm
        kept = (run.model.hidden_dropout > 0) + is_normed * width
        if part.products:
            # Inputs of two norms and of what joins them, without dropout.
            kept = 4 * width
        return tokens * (8 + hidden / run.sp * kept)
    if part.products:
        return sum(
            run.micro_batch_size * product.tokens * (product.inputs + product.outputs) * width
            for product in part.products
        )
    if part.component == "vision":
        # The rank holds the tower's last norm and does not run it.
        return 0.0
    # Sequence parallelism saves a shard of the head's input and regathers it.
    return tokens * hidden * width / run.sp


@lru_cache(maxsize=4096)
def layer_bytes(run: Run, part: ModelPart, recompute: RecomputeConfig) -> float:
    """Bytes that a layer saves of one microbatch for backward under a recomputation."""
    layer, sizes, width, framework = part.layer, run.sizes, run.bytes_per_element, run.framework
    assert layer is not None
    config, tp, streams = layer.config, sizes.tp, layer.streams(run.micro_batch_size)
    sequence = -(-layer.sequence // (sizes.cp if layer.is_cut_by_context else 1))
    if streams == 0:
        return 0.0
    saved = float(
        cost.layer_activation_bytes(
            config,
            sizes,
            batch=streams,
            sequence=sequence,
            bytes_per_element=width,
            recompute=recompute,
            window=layer.window,
            layer=layer.index,
            is_packed=layer.has_bounds,
        )
    )
    if recompute.granularity == "full":
        return saved
    if config.activation == "relu" and not layer.has_experts:
        # A squared ReLU saves its input.
        saved += framework.squares_relu * streams * sequence * config.ffn_hidden_size / tp * width
    if config.attention_dropout == 0 and has_no_kernel(layer, sizes, width) and not layer.is_by_document(sizes):
        # Torch saves the weights that it materialises.
        seen = min(layer.window or layer.sequence, layer.sequence)
        saved += streams * sequence * seen * config.num_attention_heads / tp * width
    if config.attention_dropout > 0 and "core_attention" not in recompute.recomputed_parts:
        # The formula is that of this package's attention, with as many queries as keys.
        pairs = streams * sequence * layer.sequence * config.num_attention_heads / tp
        saved += pairs * framework.pair_bytes - streams * sequence**2 * config.num_attention_heads // tp * (5 + width)
    if layer.memory:
        saved += cost.cross_attention_activation_bytes(
            config, sizes, batch=streams, sequence=sequence, memory=layer.memory // sizes.cp, bytes_per_element=width
        )
        if config.attention_dropout > 0:
            pairs = streams * sequence * layer.memory / sizes.cp * config.num_attention_heads / tp
            saved += pairs * (framework.pair_bytes - 5 - width)
    return saved - (_fp8_saving(run, layer, recompute) if run.saves_float8 else 0.0)


def _fp8_saving(run: Run, layer: Layer, recompute: RecomputeConfig) -> float:
    """Bytes that FP8 spares: inputs of linears take one byte an element; attention's output is saved a second time."""
    config, sizes, width = layer.config, run.sizes, run.bytes_per_element
    recomputed, tp = recompute.recomputed_parts, sizes.tp
    streams = layer.streams(run.micro_batch_size)
    tokens = streams * -(-layer.sequence // (sizes.cp if layer.is_cut_by_context else 1))
    num_norms = 0 if "norm" in recomputed else 1 + (not layer.has_experts)
    spared = tokens / run.sp * config.hidden_size * (width - 1) * num_norms
    spared += tokens * config.num_attention_heads * config.head_dim / tp * -1
    if not layer.has_experts and not {"activation", "mlp"} & set(recomputed):
        # ReLU saves its own output in the activations' precision.
        spared += tokens * config.ffn_hidden_size / tp * (width * (config.activation != "relu") - 1)
    if config.moe is not None and layer.has_experts and "moe" not in recomputed:
        sent = sent_tokens(layer, sizes, run.micro_batch_size) * sizes.etp
        features = (config.moe.ffn_hidden_size or config.ffn_hidden_size) / sizes.etp
        spared += sent * (config.hidden_size + features) * (width - 1)
        spared += tokens * config.moe.shared_expert_intermediate_size / tp * (width - 1)
    return spared

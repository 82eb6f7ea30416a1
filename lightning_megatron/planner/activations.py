"""Bytes that stages keep of a microbatch until its backward, at the formulas of `transformer.cost`.

Beside what layers keep: the ids and the mask of dropout of an embedding; what the final norm reads, and the head; under
full recomputation the inputs of groups of layers, and of one group at a time all that is made again.
T tokens of a microbatch on this rank, H hidden.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from lightning_megatron.mesh import Sizes
from lightning_megatron.models import BertConfig, T5Config
from lightning_megatron.planner.framework_profile import FrameworkProfile
from lightning_megatron.planner.layer_work import has_no_kernel
from lightning_megatron.planner.model_parts import Layer, ModelPart, Stage, sent_rows
from lightning_megatron.planner.run import Run
from lightning_megatron.transformer import cost
from lightning_megatron.transformer.linears import DOWN, UP
from lightning_megatron.transformer.recompute import RecomputeConfig, RecomputePart, groups_of

_ALL = RecomputeConfig()
# Of a row of weights that dropout draws for in tiles: its random key, int64.
_KEY_BYTES = 8


def stage_bytes(run: Run, stage: Stage) -> float:
    """What a stage keeps of one microbatch."""
    ends = sum(_end_bytes(run, part) for part in stage if part.layer is None)
    layers = 0.0
    for group, is_again in _groups(run.recompute, stage):
        if is_again:
            layers += _layer_bytes(run, group[0], run.recompute)
        else:
            layers += sum(_layer_bytes(run, part, _own(run.recompute)) for part in group)
    return ends + layers


def behind_layers(stage: Stage) -> Stage:
    """The pieces behind all layers of a stage that has any: a backward is done with them before it comes to those."""
    parts = list(stage.items())
    last = max((place for place, (part, _) in enumerate(parts) if part.layer is not None), default=len(parts))
    return dict(parts[last + 1 :])


def behind_bytes(run: Run, stage: Stage) -> float:
    """Of `stage_bytes` those of the pieces behind all layers."""
    return sum(count * _end_bytes(run, part) for part, count in behind_layers(stage).items())


def recompute_bytes(run: Run, stage: Stage, spared: Callable[[ModelPart], float]) -> float:
    """What full recomputation makes again at a time, beyond what a backward that comes to it has let go of the layers
    behind; `spared` of each layer."""
    if run.recompute.granularity != "full":
        return 0.0
    most = behind = 0.0
    for group, is_again in reversed(_groups(run.recompute, stage)):
        whole = sum(_layer_bytes(run, part, _ALL) - spared(part) for part in group)
        kept = _layer_bytes(run, group[0], run.recompute) if is_again else whole
        most = max(most, whole - kept - behind)
        behind += kept
    return most


def recompute_groups(run: Run, stage: Stage, spared: Callable[[ModelPart], float]) -> list[tuple[float, list[float]]]:
    """Of the groups of layers of a stage what a backward first makes again of each, and what each of its layers keeps
    then."""
    found = []
    for group, is_again in _groups(run.recompute, stage):
        kept = _ALL if is_again else _own(run.recompute)
        each = [_layer_bytes(run, part, kept) - spared(part) for part in group]
        found.append((sum(each) - _layer_bytes(run, group[0], run.recompute) if is_again else 0.0, each))
    return found


def logit_bytes(run: Run, stage: Stage) -> float:
    """Logits of one microbatch, and what the loss makes of them."""
    tokens = max((part.logit_tokens for part in stage), default=0)
    if not tokens:
        return 0.0
    columns = cost.vocabulary_parameters(run.model, run.sizes) // run.model.hidden_size
    return run.micro_batch_size * tokens / run.sizes.cp * columns * _bytes_per_logit(run)


def logit_share(run: Run, width: int) -> float:
    """Of `logit_bytes` those of so many bytes for each token and row of the vocabulary."""
    return width / _bytes_per_logit(run)


def _bytes_per_logit(run: Run) -> int:
    """In float32 exponentials take the place of the logits."""
    return run.framework.logit_bytes if run.is_half else 4


def _groups(recompute: RecomputeConfig, stage: Stage) -> list[tuple[list[ModelPart], bool]]:
    """The layers of a stage in runs, and whether each run is made again from its first input."""
    layers = [part for part, count in stage.items() if part.layer is not None for _ in range(count)]
    if recompute.granularity != "full":
        return [(layers, False)]
    ranges = groups_of(recompute, [part.is_layer for part in layers])
    return [([layers[place] for place in places], is_again) for places, is_again in ranges]


def _end_bytes(run: Run, part: ModelPart) -> float:
    """What a piece that is no layer keeps."""
    sizes, hidden, width = run.sizes, run.model.hidden_size, run.bytes_per_element
    sp = sizes.tp if sizes.sequence_parallel else 1
    tokens = run.micro_batch_size * (run.lengths.decoder_sequence or run.lengths.sequence) / sizes.cp
    if part.embedded_tokens:
        # Ids, the mask of dropout, and what a norm of a BERT reads.
        rows = run.micro_batch_size * part.embedded_tokens / sizes.cp
        is_normed = isinstance(run.model, BertConfig) and run.model.embedding_norm
        return rows * (8 + hidden / sp * ((run.model.hidden_dropout > 0) + is_normed * norm_input_width(run)))
    if part.products:
        return sum(
            run.micro_batch_size * product.tokens * (product.inputs + product.outputs) * width
            for product in part.products
        )
    if part.component == "vision":
        # The tower's last norm is held and not run.
        return 0.0
    if part.symbol == "L":
        # Sequence parallelism keeps a part and gathers it again.
        return tokens * hidden * width / sp
    if part.replicated == cost.norm_parameters(run.model):
        return tokens * hidden * norm_input_width(run) / sp
    return tokens * hidden * width / sp


def _layer_bytes(run: Run, part: ModelPart, recompute: RecomputeConfig) -> float:
    assert part.layer is not None
    return _kept(
        part.layer,
        run.sizes,
        run.micro_batch_size,
        run.bytes_per_element,
        recompute,
        run.fp8 is not None,
        pair_bytes(run),
        norm_input_width(run),
        stream_width(run, part),
        run.framework,
    )


def feed_forward_bytes(run: Run, part: ModelPart) -> float:
    """Of what a layer keeps that of its feed-forward network, which a backward is done with before attention's."""
    assert part.layer is not None
    recompute_part: RecomputePart = "moe" if part.layer.has_experts else "mlp"
    others = tuple(name for name in run.recompute.recomputed_parts if name not in ("activation", "mlp", "moe"))
    without = RecomputeConfig(granularity="selective", parts=(*others, recompute_part))
    kept = _layer_bytes(run, part, _own(run.recompute)) - _layer_bytes(run, part, without)
    return kept - (0.0 if part.is_trained or part.layer.has_experts else _unread_features(run, part))


def _unread_features(run: Run, part: ModelPart) -> float:
    """What a frozen feed-forward network does not keep of what goes into its products, for want of a path there."""
    layer, names = part.layer, {path.name for path in part.adapters}
    assert layer is not None
    again, config, sizes = run.recompute.recomputed_parts, layer.config, run.sizes
    tokens = run.micro_batch_size * layer.tokens_on(sizes)
    unread = 0.0
    if not {"norm", "mlp"} & set(again) and UP not in names:
        unread += tokens / (sizes.tp if sizes.sequence_parallel else 1) * config.hidden_size
    if not {"activation", "mlp"} & set(again) and config.activation != "relu" and DOWN not in names:
        unread += tokens * config.ffn_hidden_size / sizes.tp
    return unread * run.bytes_per_element


def attention_bytes(run: Run, part: ModelPart) -> tuple[float, float]:
    """Of what a layer keeps that of attention between its linears: to its own stream, and to an encoder's."""
    layer = part.layer
    assert layer is not None
    again: tuple[RecomputePart, ...] = ("norm", "moe" if layer.has_experts else "mlp")
    if "core_attention" in run.recompute.recomputed_parts:
        again = ("core_attention", *again)
    lean, plain = RecomputeConfig(granularity="selective", parts=again), replace(run, fp8=None)
    # Beside an encoder's stream it is a document's.
    alone = replace(part, layer=replace(layer, memory=0, has_bounds=layer.has_bounds or layer.memory > 0))
    own, whole = (_layer_bytes(plain, one, lean) for one in (alone, part))
    config, sizes, width = layer.config, run.sizes, run.bytes_per_element
    tokens = round(run.micro_batch_size * layer.tokens_on(sizes))
    shard = tokens / (sizes.tp if sizes.sequence_parallel else 1)
    norm = 2 * shard * config.hidden_size * width
    norm += shard * 4 * (2 if config.normalization == "layernorm" else 1)
    mask = shard * config.hidden_size * (config.hidden_dropout > 0)
    wider, wider_with_memory = (
        _wider_norms(one, sizes, tokens, width, norm_input_width(run), stream_width(run, part), lean)
        for one in (replace(layer, memory=0), layer)
    )
    others = norm + 2 * mask + wider
    return own - others, whole - own - (norm + mask + wider_with_memory - wider) * (layer.memory > 0)


def is_shared(layer: Layer, sizes: Sizes) -> bool:
    """Whether attention runs document by document, over ranks that share them: what it gives is then kept by head and
    by token."""
    config = layer.config
    is_padded = isinstance(config, BertConfig) or layer.has_bounds
    has_bias = isinstance(config, T5Config) and config.position == "relative"
    return is_padded or has_bias or bool(layer.memory) or (sizes.cp > 1 and layer.is_cut_by_context)


def lays_scores_out(layer: Layer, sizes: Sizes, bytes_per_element: int) -> bool:
    """Whether attention without dropout keeps a weight for each pair of tokens."""
    return layer.config.attention_dropout == 0 and has_no_kernel(layer, sizes, bytes_per_element)


def stream_width(run: Run, part: ModelPart) -> int:
    """Bytes of each number between the layers of a piece's part: under mixed precision frozen embeddings stay in
    float32, and what layers are added to does with them."""
    return 4 if run.is_mixed and part.component in run.model_parts.wide_components else run.bytes_per_element


def pair_bytes(run: Run) -> int:
    """Kept for each pair of tokens and head where attention lays its weights out; what was dropped is as wide as
    activations are."""
    return run.framework.pair_bytes + (run.bytes_per_element - 2) * run.framework.counts_work


def norm_input_width(run: Run) -> int:
    """Bytes of each number that a norm keeps of what it reads."""
    return 4 if run.framework.widens_norms and run.is_mixed else run.bytes_per_element


@lru_cache(maxsize=65536)
def _kept(
    layer: Layer,
    sizes: Sizes,
    micro_batch: int,
    width: int,
    recompute: RecomputeConfig,
    is_fp8: bool,
    pair_bytes: int,
    norm_width: int,
    own_width: int,
    framework: FrameworkProfile,
) -> float:
    config, tp, streams = layer.config, sizes.tp, layer.streams(micro_batch)
    sequence = -(-layer.sequence // (sizes.cp if layer.is_cut_by_context else 1))
    if streams == 0:
        return 0.0
    num_attentions = 2 if layer.memory else 1
    own_rows = streams * sequence * config.num_attention_heads / tp
    drops_in_tiles = framework.counts_work and config.attention_dropout > 0 and is_shared(layer, sizes)
    if drops_in_tiles:
        config = replace(config, attention_dropout=0.0)
    kept = float(
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
        return kept * own_width / width
    kept += _wider_norms(layer, sizes, streams * sequence, width, norm_width, own_width, recompute)
    if framework.squares_relu and config.activation == "relu" and not layer.has_experts:
        kept += streams * sequence * config.ffn_hidden_size / tp * width
    if framework.counts_work and config.activation == "relu" and not layer.has_experts:
        # One that is to be made again keeps what it reads for that, and what it gives as ever.
        parts = recompute.recomputed_parts
        is_twice = "activation" in parts and "mlp" not in parts
        kept += is_twice * streams * sequence * config.ffn_hidden_size / tp * width
    # Where it is added up over the ranks of a ring, in float32, projections read just that.
    is_added_up = width == 4 and layer.is_cut_by_context and sizes.cp > sizes.cp_ulysses
    is_copied = framework.counts_work and is_shared(layer, sizes) and not is_added_up
    if is_copied:
        kept += num_attentions * own_rows * config.head_dim * width
    if drops_in_tiles:
        kept += num_attentions * own_rows * _KEY_BYTES
    if framework.counts_work and lays_scores_out(layer, sizes, width):
        # Weights in the place of their sums, and a key and a value for each query head.
        groups = max(config.num_query_groups // tp, 1)
        repeated = 2 * streams * sequence * (config.num_attention_heads // tp - groups) * config.head_dim
        kept += own_rows * (layer.sequence - 1) * width + repeated * width
    lays_out = config.attention_dropout > 0 and "core_attention" not in recompute.recomputed_parts
    if lays_out:
        # The formula is that of our own attention, and of queries as many as keys.
        pairs = streams * sequence * layer.sequence * config.num_attention_heads / tp
        kept += pairs * pair_bytes - streams * sequence**2 * config.num_attention_heads // tp * (5 + width)
    if layer.memory:
        kept += cost.cross_attention_activation_bytes(
            config, sizes, batch=streams, sequence=sequence, memory=layer.memory // sizes.cp, bytes_per_element=width
        )
        if config.attention_dropout > 0:
            pairs = streams * sequence * layer.memory / sizes.cp * config.num_attention_heads / tp
            kept += pairs * (pair_bytes - 5 - width)
    return kept - (_fp8_saving(layer, sizes, micro_batch, width, recompute, is_copied) if is_fp8 else 0.0)


def _wider_norms(
    layer: Layer,
    sizes: Sizes,
    tokens: int,
    width: int,
    norm_width: int,
    own_width: int,
    recompute: RecomputeConfig,
) -> float:
    """More than the formula counts where norms keep their input wider than activations are."""
    if norm_width == width:
        return 0.0
    config, again = layer.config, recompute.recomputed_parts
    shard = tokens / (sizes.tp if sizes.sequence_parallel else 1)
    num_norms = 3 if layer.memory else 2
    if own_width == norm_width:
        # What a norm reads is what it keeps.
        each = norm_width - width
    else:
        # Else it is kept twice where the norm's output is made again of it.
        each = norm_width - (0 if "norm" in again else width)
        if "norm" in again and {"mlp", "moe"} & set(again):
            # Inside of what is made again.
            num_norms -= 1
    more: float = num_norms * shard * config.hidden_size * each
    if own_width != norm_width and layer.has_experts and "norm" in again and "moe" not in again:
        # That before the experts is not made again.
        more -= shard * config.hidden_size * width
    if config.qk_norm:
        heads = config.num_attention_heads + config.num_query_groups
        more += tokens * heads / sizes.tp * config.head_dim * (norm_width - width)
    return more


def _fp8_saving(
    layer: Layer, sizes: Sizes, micro_batch: int, width: int, recompute: RecomputeConfig, is_copied: bool
) -> float:
    """Less than without FP8: inputs of products are kept in one byte, attention's output for itself as well, unless
    what the projection reads is a copy of it."""
    config, tp = layer.config, sizes.tp
    sp = tp if sizes.sequence_parallel else 1
    again = recompute.recomputed_parts
    tokens = layer.streams(micro_batch) * -(-layer.sequence // (sizes.cp if layer.is_cut_by_context else 1))
    saved = tokens / sp * config.hidden_size * (width - 1) * (0 if "norm" in again else 1 + (not layer.has_experts))
    saved += tokens * config.num_attention_heads * config.head_dim / tp * (is_copied * width - 1)
    if not layer.has_experts and not {"activation", "mlp"} & set(again):
        # ReLU keeps what it gives in its own numbers.
        saved += tokens * config.ffn_hidden_size / tp * (width * (config.activation != "relu") - 1)
    if config.moe is not None and layer.has_experts and "moe" not in again:
        rows = sent_rows(layer, sizes, micro_batch) * sizes.etp
        features = (config.moe.ffn_hidden_size or config.ffn_hidden_size) / sizes.etp
        saved += rows * (config.hidden_size + features) * (width - 1)
        saved += tokens * config.moe.shared_expert_intermediate_size / tp * (width - 1)
    return saved


def _own(recompute: RecomputeConfig) -> RecomputeConfig:
    """What acts inside of layers that are not recomputed whole."""
    return recompute if recompute.granularity == "selective" else _ALL

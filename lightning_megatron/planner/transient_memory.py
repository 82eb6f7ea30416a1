"""Transient memory of a rank: what a backward, messages and the optimizer hold on top of saved activations.

    a layer's backward     gradients inside its feed-forward network, the largest weight's before it is accumulated,
                           and, under sequence parallelism, a gathered gradient
    dropout's draws        int64, two at a time, of one block of elements; of a LoRA adapter on top of its linear's
                           output
    scores                 where attention materialises them: two gradients of them, after the feed-forward backward
    experts                activations in float32; dispatched and combined tokens; gradients of all their weights
    exchanged keys         over cp: keys and values that are sent and received, and their gradients; under Ulysses,
                           gradients of all inputs of attention
    embedding              the gradient of its whole matrix, and its float32 copy where gradients are float32; the
                           microbatch's layers are freed by then
    head                   logits, or their gradient and that of the weight
    accumulation           the sum of earlier batches' gradients, where a step accumulates batches under a schedule
    optimizer              the root of the second moments of the parameters that a rank updates; float32 copies of
                           gradients in 16 bits

A step's peak is at one of them. `dry_run` runs the code that these formulas describe; tests hold one to the other.
T tokens of a microbatch, H hidden, F feed-forward, V vocabulary, of this rank.
"""

from collections.abc import Sequence

from lightning_megatron.comm import rng
from lightning_megatron.context.unfused_attention import MOST_SCORES
from lightning_megatron.models import LlavaConfig
from lightning_megatron.pipeline.registry import spec_of
from lightning_megatron.planner.activations import (
    bytes_after_layers,
    feed_forward_bytes,
    is_shared,
    logit_bytes,
    logit_share,
    materialises_scores,
    norm_input_width,
    pair_bytes,
    stage_bytes,
    stream_width,
)
from lightning_megatron.planner.model_parts import Layer, LoraAdapter, ModelPart, Stage, sent_tokens
from lightning_megatron.planner.pipeline_load import has_pairs, splits_backward
from lightning_megatron.planner.run import Run
from lightning_megatron.transformer import cost
from lightning_megatron.transformer.linears import DOWN

# Each token has an id and a label (int64) and an entry of the loss mask (float32).
_BATCH_BYTES = 20
# Each token of packed documents has the number of its document (int64).
_BOUND_BYTES = 8
# Drawing a mask takes so much for each of at most `rng.MASK_BLOCK` elements.
_DRAW_BYTES = 16


def work_bytes(
    run: Run,
    rank: int,
    saved: tuple[float, ...],
    by_stage: Sequence[float],
    recomputed: float,
    trained: tuple[int, int],
    unmade: float,
) -> float:
    """The most that a pipeline rank holds on top of weights, gradients and optimizer states.

    The rank saves `saved` microbatches of each chunk, each of `by_stage` bytes; full recomputation holds `recomputed`
    bytes at a time; `trained` counts its dense and its expert parameters that are trained. Of a forward that overlaps a
    backward, `unmade` bytes do not exist before that backward ends.
    """
    stages = run.stages[rank]
    by_chunk = [
        count * (size + received)
        for count, size, received in zip(saved, by_stage, received_by_chunk(run, rank), strict=True)
    ]
    message = max(message_bytes(run, stage) for stage in stages)
    in_flight = num_in_flight(run, rank)
    held = sum(by_chunk) - unmade + always_bytes(run, trained) + in_flight * message
    is_gpipe = run.schedule.name == "gpipe"
    # GPipe's backwards come after all forwards: the other microbatches' exponentials of logits exist.
    exponentials = is_gpipe * (saved[-1] - 1) * logit_bytes(run, stages[-1]) * logit_share(run, 4)
    held += exponentials
    # An overlapped forward that is through leaves its own when its backward ends, or where nothing waits for tokens,
    # when that starts.
    through = logit_bytes(run, stages[-1]) * logit_share(run, 4) * has_pairs(run.schedule, rank)
    held += 0.0 if unmade else through
    peaks = [stepping_bytes(run, rank, trained)]
    if rank < run.sizes.pp - 1:
        # After the forwards before a first backward none of their sends is known to be complete.
        peaks.append(held + max(sum(saved) - in_flight, 0.0) * message)
    matrix = cost.vocabulary_parameters(run.model, run.sizes)
    for chunk, stage in enumerate(stages):
        logits = logit_bytes(run, stage)
        gradient = logits * logit_share(run, run.bytes_per_element)
        inside = held + recomputed - bytes_after_layers(run, stage) + matrix * waiting_look_up_width(run, stage)
        peaks.append(inside + max((layer_work(run, part) for part in stage), default=0.0))
        if not any(part.passes_gradient or part.is_trained for part in stage):
            peaks.append(held + max((_forward_work(run, part) for part in stage), default=0.0))
        peaks.append(inside + max(max(drawing_bytes(run, part), experts_bytes(run, part)) for part in stage))
        # A backward has freed the feed-forward network by then; an overlapped forward has made a layer.
        is_done = not has_pairs(run.schedule, rank) or unmade > 0
        attention = (
            max(scores_bytes(run, part), exchanged_bytes(run, part))
            - feed_forward_bytes(run, part) * is_done
            + min(unmade, stage_bytes(run, {part: 1}))
            for part in stage
            if part.layer
        )
        peaks.append(inside + max(attention, default=0.0))
        if logits:
            peaks += [held + logits, held + gradient + head_work(run, stage, matrix)]
        if indices := [index for index, part in enumerate(stage) if part.embedded_tokens and part.is_trained]:
            # A decoder's embedding comes after the encoder's layers, and a LLaVA's after the tower's: its backward
            # runs before theirs.
            after = dict(list(stage.items())[indices[-1] + 1 :])
            made = unmade + through if unmade else 0.0
            if is_gpipe and chunk < len(stages) - 1:
                # All backwards of later chunks are over by then.
                made -= sum(by_chunk[chunk + 1 :]) + exponentials
            peaks.append(held - stage_bytes(run, after) + made + matrix * _gradient_width(run))
            peaks.append(held - stage_bytes(run, stage) + made + matrix * look_up_width(run, stage))
    return max(peaks)


def always_bytes(run: Run, trained: tuple[int, int]) -> float:
    """Bytes that a rank holds throughout the microbatches of a step."""
    return batch_bytes(run) + sum(trained) * run.gradient_bytes * run.sets_gradients_aside


def stepping_bytes(run: Run, rank: int, trained: tuple[int, int]) -> float:
    """Bytes that a rank holds in the optimizer's step, on top of weights, gradients and optimizer states."""
    dense, experts = trained
    is_replicated = run.optimizer.kind == "replicated"
    num_stepped = float(dense + experts) if is_replicated else dense / run.dp_cp + experts / run.sizes.edp
    # Gradients in 16 bits have float32 copies for master weights.
    widened = 4.0 * num_stepped if run.is_mixed and run.optimizer.grad_dtype == "bfloat16" else 0.0
    root = num_stepped * (run.bytes_per_element if run.precision == "bf16-true" else 4)
    adopting = 0.0
    if run.is_mixed:
        # The search for changed weights makes two masks and two float32 copies of the largest weight.
        largest = max((weight_of(run, part) for stage in run.stages[rank] for part in stage), default=0.0)
        adopting = 10.0 * min(largest / (run.dp_cp if run.optimizer.kind == "distributed" else 1), num_stepped)
    return batch_bytes(run) + (max(root, adopting) + widened)


def look_up_width(run: Run, stage: Stage) -> int:
    """Bytes for each element of a vocabulary matrix while the gradient of a stage's first look-up is accumulated."""
    # The gradients of both stacks' look-ups are added to a third.
    return 3 * waiting_look_up_width(run, stage) or _gradient_width(run)


def waiting_look_up_width(run: Run, stage: Stage) -> int:
    """Bytes for each element of a vocabulary matrix that the decoder's look-up holds while its encoder's layers run
    backward: autograd adds its gradient to that of the encoder's look-up, of the same matrix, before it goes on."""
    embeddings = [part for part in stage if part.embedded_tokens and part.is_trained]
    has_both = any(part.shared_matrices for part in embeddings[1:])
    return has_both * (4 if is_widened(run) else run.bytes_per_element)


def trains_head(stage: Stage) -> bool:
    """Whether a stage has an output head that is trained."""
    return any(part.is_trained for part in stage if part.logit_tokens)


def head_work(run: Run, stage: Stage, matrix: int) -> float:
    """Bytes that the head's backward holds on top of the logits' gradient: its weight's, before that is accumulated in
    float32, and, under sequence parallelism, the gathered input of the head and its gradient."""
    if not trains_head(stage):
        return 0.0
    if is_widened(run) and not splits_backward(run.schedule):
        return float(matrix * run.bytes_per_element)
    tokens = run.micro_batch_size * max(part.logit_tokens for part in stage) / run.sizes.cp
    return 2 * tokens * run.model.hidden_size * run.bytes_per_element * (run.sp > 1)


def waiting_bytes(run: Run, part: ModelPart, *, is_attention: bool = False) -> float:
    """Bytes that a layer, or its attention, saves between dgrad and wgrad: inputs of linears and gradients of their
    outputs. Under sequence parallelism the gradient of a row-parallel linear's output is gathered."""
    layer = part.layer
    if layer is None:
        return 0.0
    config, sizes = layer.config, run.sizes
    tp, sp = sizes.tp, run.sp
    if not part.is_trained:
        adapters = (
            run.micro_batch_size
            * adapter.tokens_on(layer, sizes)
            * (sum(adapter.features_on(tp, sp)) + 2 * adapter.rank)
            for adapter in part.adapters
        )
        return run.bytes_per_element * sum(adapters)
    tokens = run.tokens_of(layer)
    hidden, query = config.hidden_size, config.num_attention_heads * config.head_dim
    keys, gates = config.num_query_groups * config.head_dim, 2 if config.is_gated else 1
    width = 1 if run.saves_float8 else run.bytes_per_element

    def pair(inner_in: float, inner_out: float) -> float:
        """Elements of a column-parallel linear and the row-parallel one after it."""
        return tokens * (hidden / sp + (inner_out + inner_in) / tp + hidden)

    numbers = pair(query, query + 2 * keys)
    if layer.memory:
        numbers += pair(query, query) + run.micro_batch_size * layer.memory / sizes.cp * 2 * keys / tp
    if is_attention:
        return width * numbers
    if not layer.has_experts:
        return width * (numbers + pair(config.ffn_hidden_size, gates * config.ffn_hidden_size))
    assert config.moe is not None
    sent, features, _ = inner_sizes(run, layer, tokens)
    numbers += sent * (2 * hidden + (1 + gates) * features)
    if shared := config.moe.shared_expert_intermediate_size:
        numbers += pair(shared, gates * shared)
    return width * numbers


def batch_bytes(run: Run) -> float:
    """Bytes of a data-parallel rank's batch, which is on the device throughout a step."""
    num_samples = run.num_microbatches * run.micro_batch_size
    num_tokens = run.held_tokens or num_samples * run.model_parts.tokens
    pixels = 0
    if isinstance(run.model, LlavaConfig):
        vision = run.model.vision
        pixels = run.lengths.images * vision.num_channels * vision.image_size**2
    return float(num_tokens * (_BATCH_BYTES + _BOUND_BYTES * run.lengths.are_packed) + num_samples * 4 * pixels)


def received_by_chunk(run: Run, rank: int) -> list[float]:
    """Bytes that each stage of a rank saves of a microbatch because another stage sent them."""
    sizes = run.sizes
    numbers = (number for number in range(sizes.num_stages) if sizes.pp_rank_of(number) == rank)
    numbered = zip(run.stages[rank], numbers, strict=True)
    return [_received_bytes(run, stage) if number else 0.0 for stage, number in numbered]


def _received_bytes(run: Run, stage: Stage) -> float:
    if run.recompute.granularity == "full":
        # The message is the saved input of the first layer.
        return 0.0
    recomputed = run.recompute.recomputed_parts
    # The first norm saves it where it is as wide, and so does the recomputation of a norm.
    is_saved = not run.is_mixed or "norm" in recomputed or all(stream_width(run, part) == 4 for part in stage)
    return message_bytes(run, stage) - is_saved * own_bytes(run, stage)


def message_bytes(run: Run, stage: Stage) -> float:
    """Bytes of a message between stages: a hidden state, for a decoder also the encoder's output."""
    memory = run.lengths.sequence if _is_decoder(stage) else 0
    return own_bytes(run, stage) + _stream_bytes(run, stage, memory)


def own_bytes(run: Run, stage: Stage) -> float:
    """Bytes of a message between stages of one stack: its hidden state."""
    return _stream_bytes(run, stage, run.lengths.decoder_sequence if _is_decoder(stage) else run.lengths.sequence)


def _stream_bytes(run: Run, stage: Stage, tokens: int) -> float:
    """Bytes of the hidden state of so many tokens of a sample between two layers of a stage."""
    width = max((stream_width(run, part) for part in stage), default=run.bytes_per_element)
    return run.micro_batch_size * tokens / run.sizes.cp / run.sp * run.model.hidden_size * width


def _is_decoder(stage: Stage) -> bool:
    return any(part.layer is not None and part.layer.memory for part in stage)


def num_in_flight(run: Run, rank: int) -> int:
    """Messages of a backward that are posted ahead or not known to be sent, and the gradient that it starts from. The
    last rank of several stages cannot know before its backwards that its sends to the first are complete."""
    pp, schedule = run.sizes.pp, run.schedule
    if pp == 1:
        return 0
    if not spec_of(schedule.name).has_groups or schedule.microbatches <= schedule.group:
        return 2 if rank in (0, pp - 1) else 3
    if pp == 2:
        return 4
    return 5 if rank < pp - 1 else (schedule.chunks - 1) * schedule.group + 3


def weight_of(run: Run, part: ModelPart) -> float:
    """Elements of the largest trained weight of a part on this rank."""
    if not part.is_trained:
        return 0.0
    if part.layer is None:
        return float(cost.vocabulary_parameters(run.model, run.sizes) * (part.matrices + part.shared_matrices > 0))
    _, _, weight = inner_sizes(run, part.layer, 0.0)
    return weight * (2 if part.layer.config.is_gated else 1)


def is_widened(run: Run) -> bool:
    """Whether gradients are accumulated in a wider precision than products give them in."""
    return run.is_mixed and run.optimizer.grad_dtype != "bfloat16"


def _gradient_width(run: Run) -> int:
    """Bytes for each element of a gradient that autograd makes, and of its wider copy."""
    return run.bytes_per_element + (4 if is_widened(run) else 0)


def layer_work(run: Run, part: ModelPart) -> float:
    """The most that a layer's backward holds on top of saved activations, in its feed-forward network."""
    layer = part.layer
    if layer is None or not layer.repeats or not part.passes_gradient:
        return 0.0
    config, sizes, width = layer.config, run.sizes, run.bytes_per_element
    tokens = run.tokens_of(layer)
    recomputed = run.recompute.recomputed_parts
    stream = tokens / run.sp * config.hidden_size * stream_width(run, part)
    read, features, weight = inner_sizes(run, layer, tokens)
    inner = read * features * width
    moved = read * config.hidden_size * width if layer.has_experts else 0.0
    remade = 0.0
    if run.recomputes_feed_forward(layer):
        # Experts recompute their gate's output once more, in their own backward.
        remade = inner * (3 if config.is_gated and not layer.has_experts else 2) + stream * ("norm" in recomputed)
        if config.moe is not None and layer.has_experts:
            # The router's input, the dispatched tokens, and the experts' output before and after its probabilities.
            shared = tokens * config.moe.shared_expert_intermediate_size / sizes.tp * width
            routed = tokens / sizes.tp * config.hidden_size * max(width, 4)
            remade += shared * (3 if config.is_gated else 2) + (routed + moved + inner) * part.is_trained
    elif "activation" in recomputed and not layer.has_experts:
        remade = inner
    gathered = tokens * config.hidden_size * width if run.sp > 1 else 0.0
    activation = (4 if config.is_gated else 1) * inner
    has_adapter = any(adapter.name == DOWN for adapter in part.adapters)
    is_split = splits_backward(run.schedule) and (part.is_trained or has_adapter)
    reads_output = config.activation == "relu" and not {"activation", "mlp"} & set(recomputed)
    if is_split or reads_output or not (part.is_trained or has_adapter):
        # No features are freed, or they stay for wgrad or for the gradient of the activation.
        activation += inner
    if is_split and has_adapter and stream_width(run, part) > width:
        # The gradient of the adapter's output is in the adapter's own precision.
        activation += tokens / run.sp * config.hidden_size * width
    if is_split and part.is_trained:
        down = gathered + inner
    elif part.is_trained:
        down = gathered + inner + (weight * width if is_widened(run) else 0.0)
    else:
        # No linear saves the features, and the weight is cast a second time.
        cast = weight * width * run.is_mixed
        # So is the first weight, twice as large where it is gated; the activation's saved input is freed by then.
        down = gathered + max(2 * inner + cast, moved + cast * (2 if config.is_gated else 1))
    if part.is_trained and layer.has_experts and run.fp8 is not None and not splits_backward(run.schedule):
        # One gradient of all experts' largest weights, which those of single experts are copied into.
        own = config.moe.router.num_experts // sizes.ep if config.moe is not None else 1
        largest = weight * (2 if config.is_gated else 1) * (4 if is_widened(run) else width)
        down = max(down, largest * (1 + 1 / own))
    if layer.has_experts:
        return stream + max(down, _experts_work(run, part, tokens)) + remade
    return stream + max(down, activation) + remade


def _experts_work(run: Run, part: ModelPart, tokens: float) -> float:
    """The most that the experts' backward holds: gradients of combined tokens, gradients inside the experts, where
    activations times router probabilities are in float32, and gradients of dispatched tokens."""
    layer, width = part.layer, run.bytes_per_element
    assert layer is not None
    sent, features, weight = inner_sizes(run, layer, tokens)
    numbers, moved = sent * features, sent * layer.config.hidden_size * width
    wide = 4 * (width < 4)
    activation = numbers * (4 * width + wide if layer.config.is_gated else width + (3 * wide or 2 * width))
    if not part.is_trained:
        return max(2 * moved, activation + numbers * width)
    if splits_backward(run.schedule):
        # The gradients of combined tokens wait for wgrad.
        return moved + max(moved, activation)
    # Gradients of all experts' weights are made before they are accumulated. After the second linears their inputs are
    # freed, and after the activation its input.
    second, first = weight * width, weight * width * (2 if layer.config.is_gated else 1)
    inner = numbers * width
    return max(2 * moved, moved + inner + second, activation - inner, moved + first - inner)


def experts_bytes(run: Run, part: ModelPart) -> float:
    """The most that an expert layer's forward holds on top of saved activations: activations times router
    probabilities in float32; or the experts' outputs, combined and in the order of tokens. And two hidden states."""
    layer, width = part.layer, run.bytes_per_element
    if layer is None or not layer.has_experts:
        return 0.0
    tokens = run.micro_batch_size * layer.sequence / (run.sizes.cp if layer.is_cut_by_context else 1)
    sent, features, _ = inner_sizes(run, layer, tokens)
    is_dispatched = run.sizes.ep * run.sizes.etp > 1
    combined = sent * layer.config.hidden_size * width * (2 + is_dispatched)
    shard = tokens / run.sp * layer.config.hidden_size
    return max(combined, sent * features * (width + 4 * (width < 4))) + 2 * shard * width


def _forward_work(run: Run, part: ModelPart) -> float:
    """The most that a layer's forward holds in a first stage that saves nothing: the layer's input, its feed-forward
    network's before and after the norm, the activations inside with a cast weight, and its output."""
    layer = part.layer
    if layer is None or not layer.repeats:
        return 0.0
    tokens = run.tokens_of(layer)
    read, features, weight = inner_sizes(run, layer, tokens)
    shard = tokens / run.sp * layer.config.hidden_size
    inner = read * features * (3 if layer.config.is_gated else 2)
    return 3 * shard * stream_width(run, part) + (inner + shard + weight * run.is_mixed) * run.bytes_per_element


def drawing_bytes(run: Run, part: ModelPart) -> float:
    """The most that a layer holds while it draws a dropout mask."""
    layer = part.layer
    if layer is None or not layer.repeats:
        return 0.0
    config, tokens = layer.config, run.tokens_of(layer)
    hidden = tokens / run.sp * config.hidden_size * (config.hidden_dropout > 0)
    features = tokens * config.ffn_hidden_size / run.sizes.tp * (config.ffn_dropout > 0 and not layer.has_experts)
    adapters = (_adapter_drawing_bytes(run, part, adapter, tokens) for adapter in part.adapters if adapter.has_dropout)
    return max(_drawn_bytes(max(hidden, features)), _attention_drawing_bytes(run, layer), *adapters)


def _drawn_bytes(numbers: float) -> float:
    return min(numbers, rng.MASK_BLOCK) * _DRAW_BYTES


def _adapter_drawing_bytes(run: Run, part: ModelPart, adapter: LoraAdapter, tokens: float) -> float:
    """Bytes of an adapter's draws, less what its layer does not hold yet. The adapter of a feed-forward network's last
    linear draws last: that linear's output exists, and that of the network's norm."""
    layer, width = part.layer, run.bytes_per_element
    assert layer is not None
    numbers = tokens * adapter.features_on(run.sizes.tp, run.sp)[0]
    if not adapter.name.endswith(".down"):
        return _drawn_bytes(numbers) - feed_forward_bytes(run, part)
    shard = tokens / run.sp * layer.config.hidden_size
    made = shard * (width + norm_input_width(run))
    if run.recomputes_feed_forward(layer):
        # It is recomputed in a backward, which holds a gradient.
        made += numbers * (width * (3 if layer.config.is_gated else 2) + 1) + shard * stream_width(run, part)
    return _drawn_bytes(numbers) + made


def _attention_drawing_bytes(run: Run, layer: Layer) -> float:
    """Bytes of the draws of attention dropout in tiles; materialised weights need more in the backward."""
    if layer.config.attention_dropout == 0 or not is_shared(run, layer):
        return 0.0
    cp = run.sizes.cp if layer.is_cut_by_context else 1
    queries = run.micro_batch_size * layer.repeats * layer.sequence / cp
    queries = queries * layer.config.num_attention_heads / run.sizes.tp
    tile = min(queries * max(layer.sequence, layer.memory) / cp, MOST_SCORES)
    return tile * (_DRAW_BYTES + 4) + queries * layer.config.head_dim * 4


def scores_bytes(run: Run, part: ModelPart) -> float:
    """The most that attention's backward holds where scores are materialised: two gradients of them. Under dropout
    those are in float32, the weights are freed by then, and may have been recomputed."""
    layer = part.layer
    if layer is None or not part.passes_gradient:
        return 0.0
    pairs = run.micro_batch_size * layer.repeats * layer.sequence**2 * layer.config.num_attention_heads / run.sizes.tp
    if layer.config.attention_dropout > 0 and not is_shared(run, layer):
        is_recomputed = "core_attention" in run.recompute.recomputed_parts
        return pairs * (8 - run.bytes_per_element + is_recomputed * pair_bytes(run))
    return 2 * pairs * run.bytes_per_element * materialises_scores(run, layer)


def exchanged_bytes(run: Run, part: ModelPart) -> float:
    """The most that attention's backward holds of other cp ranks' keys and values and of their float32 gradients, after
    the feed-forward backward.

    The bytes of an element are what dry runs hold (rings and all-gathers of 2, 4 and 8 ranks, three precisions).
    """
    layer, sizes = part.layer, run.sizes
    outer = sizes.cp // sizes.cp_ulysses
    if layer is None or not part.passes_gradient or not layer.is_cut_by_context or sizes.cp == 1:
        return 0.0
    config, is_half = layer.config, run.is_half
    tokens = run.micro_batch_size * layer.repeats * layer.sequence / sizes.cp
    numbers = 2 * tokens * max(config.num_query_groups / sizes.tp, 1) * config.head_dim
    if outer == 1:
        # Ulysses holds gradients of all inputs of attention and of its output, received; in 16 bits also in float32,
        # on top of copies of the kernel's inputs.
        width, queries = run.bytes_per_element, tokens * config.num_attention_heads * config.head_dim / sizes.tp
        read = queries + numbers
        return (read + queries) * width + is_half * (read * (4 + width) + queries * width)
    # Bytes for each element of keys and values that are sent and received, and of the rest of the layer by then.
    if sizes.cp_exchange == "all_gather":
        own = (19 if run.is_mixed else 20) if is_half else 25
        return numbers * (own + (run.bytes_per_element + 4) * outer)
    own = (21 if run.is_mixed else 22) if is_half else 27
    # A ring of two ranks never receives while it sends.
    passed_on = (14 if is_half else 18) * (outer > 2)
    return numbers * (own + passed_on)


def inner_sizes(run: Run, layer: Layer, tokens: float) -> tuple[float, float, float]:
    """Tokens and features of a feed-forward network on this rank, and elements of its largest weight, ungated."""
    config, sizes = layer.config, run.sizes
    if config.moe is None or not layer.has_experts:
        features = config.ffn_hidden_size / sizes.tp
        return tokens, features, features * config.hidden_size
    features = (config.moe.ffn_hidden_size or config.ffn_hidden_size) / sizes.etp
    sent = sent_tokens(layer, sizes, run.micro_batch_size) * sizes.etp
    own = config.moe.router.num_experts // sizes.ep
    return sent, features, own * features * config.hidden_size

"""What a rank holds for a while beside what its microbatches keep: tensors of a backward, messages, the optimizer.

    a layer's backward     gradients inside of its feed-forward network, the largest weight's before it is added, and,
                           with sequence parallelism, a gathered gradient
    dropout's draws        int64, two at a time, of a block of what may be dropped; of a low-rank path beside what its
                           linear gave
    scores                 where attention lays them out: two gradients of them, when the feed-forward network is done
    experts                inside of them numbers in float32; rows on their way there and home; gradients of all weights
    exchanged keys         of ranks that share sequences: keys and values as they come and go, and gradients of them;
                           where they exchange heads, gradients of all that attention reads
    the embedding's        the gradient of its whole matrix, and the same in float32 where gradients are; the layers of
                           the microbatch are gone by then
    the head's             logits, or their gradient beside that of the weight
    earlier batches        the sum of their gradients, where a step accumulates several and a schedule runs them
    the optimizer          the root of the second moments of all that the rank steps; of gradients in 16 bits a copy in
                           float32

A step's peak is at one of them. `dry_run` runs the code that these formulas describe; tests hold one to the other.
T tokens of a microbatch, H hidden, F feed-forward, V vocabulary, of this rank.
"""

from collections.abc import Sequence

from lightning_megatron.comm import rng
from lightning_megatron.context.unfused_attention import MOST_SCORES
from lightning_megatron.models import LlavaConfig
from lightning_megatron.pipeline.registry import spec_of
from lightning_megatron.planner.activations import (
    behind_bytes,
    feed_forward_bytes,
    is_shared,
    lays_scores_out,
    logit_bytes,
    logit_share,
    norm_input_width,
    pair_bytes,
    stage_bytes,
    stream_width,
)
from lightning_megatron.planner.model_parts import Layer, LoraAdapter, ModelPart, Stage, sent_rows
from lightning_megatron.planner.pipeline_load import has_pairs, splits_backward
from lightning_megatron.planner.run import Run
from lightning_megatron.transformer import cost
from lightning_megatron.transformer.linears import DOWN

# Of a token: its id and its label, int64, and its place in the loss mask, float32.
_BATCH_BYTES = 20
# Of a token, where its document has a number.
_BOUND_BYTES = 8

# Of each number that may be dropped, of `rng.MASK_BLOCK` at most, while a mask is drawn.
_DRAW_BYTES = 16


def work_bytes(
    run: Run,
    rank: int,
    kept: tuple[float, ...],
    by_stage: Sequence[float],
    again: float,
    trained: tuple[int, int],
    unmade: float = 0.0,
) -> float:
    """The most that a pipeline rank holds beside weights, gradients and optimizer states.

    `kept` microbatches of each chunk it keeps, and of each `by_stage`; `again` is what full recomputation makes at a
    time; `trained` are its trained parameters, dense ones and those of experts; `unmade` bytes are not among what is
    kept while a backward keeps all, but at its end, made by a forward beside it.
    """
    stages = run.stages[rank]
    by_chunk = [
        count * (size + received)
        for count, size, received in zip(kept, by_stage, received_by_chunk(run, rank), strict=True)
    ]
    message = max(message_bytes(run, stage) for stage in stages)
    flying = num_flying(run, rank)
    held = sum(by_chunk) - unmade + always_bytes(run, trained) + flying * message
    is_gpipe = run.schedule.name == "gpipe"
    # Exponentials of the logits of the other microbatches, whose backwards come when all forwards are done.
    exponentials = is_gpipe * (kept[-1] - 1) * logit_bytes(run, stages[-1]) * logit_share(run, 4)
    held += exponentials
    # What a forward leaves of them that is through when the backward beside it comes to an end, or where no tokens are
    # waited for, to its start.
    through = logit_bytes(run, stages[-1]) * logit_share(run, 4) * has_pairs(run.schedule, rank)
    held += 0.0 if unmade else through
    peaks = [stepping_bytes(run, rank, trained)]
    if rank < run.sizes.pp - 1:
        # When all forwards have been that come before a backward, none of what they sent is known to have left.
        peaks.append(held + max(sum(kept) - flying, 0.0) * message)
    matrix = cost.vocabulary_parameters(run.model, run.sizes)
    for chunk, stage in enumerate(stages):
        logits = logit_bytes(run, stage)
        gradient = logits * logit_share(run, run.bytes_per_element)
        inside = held + again - behind_bytes(run, stage) + matrix * waiting_look_up_width(run, stage)
        peaks.append(inside + max((layer_work(run, part) for part in stage), default=0.0))
        if not any(part.passes_gradient or part.is_trained for part in stage):
            peaks.append(held + max((_forward_work(run, part) for part in stage), default=0.0))
        peaks.append(inside + max(max(drawing_bytes(run, part), experts_bytes(run, part)) for part in stage))
        # A backward is done with the feed-forward network by then; a forward beside it has made a layer.
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
        if places := [place for place, part in enumerate(stage) if part.embedded_tokens and part.is_trained]:
            # A decoder's embedding stands behind the encoder's layers, and a LLaVA's behind the tower's: its backward
            # comes before theirs.
            behind = dict(list(stage.items())[places[-1] + 1 :])
            made = unmade + through if unmade else 0.0
            if is_gpipe and chunk < len(stages) - 1:
                # All backwards of later chunks have been by then.
                made -= sum(by_chunk[chunk + 1 :]) + exponentials
            peaks.append(held - stage_bytes(run, behind) + made + matrix * gradient_width(run))
            peaks.append(held - stage_bytes(run, stage) + made + matrix * look_up_width(run, stage))
    return max(peaks)


def always_bytes(run: Run, trained: tuple[int, int]) -> float:
    """What a rank holds while it runs microbatches, whichever those are."""
    return batch_bytes(run) + sum(trained) * run.gradient_bytes * run.sets_gradients_aside


def stepping_bytes(run: Run, rank: int, trained: tuple[int, int]) -> float:
    """What it holds in the optimizer's step."""
    num_stepped = _stepped_parameters(run, *trained)
    return batch_bytes(run) + max(_optimizer_bytes(run, num_stepped), _adopting_bytes(run, rank, num_stepped))


def look_up_width(run: Run, stage: Stage) -> int:
    """Bytes of each number of a vocabulary matrix while the gradient of a stage's first look-up is added."""
    # The gradients of both stacks' look-ups are added to a third.
    return 3 * waiting_look_up_width(run, stage) or gradient_width(run)


def waiting_look_up_width(run: Run, stage: Stage) -> int:
    """The same of the gradient of a decoder's look-up while the layers of its encoder have theirs: autograd adds it to
    that of the encoder's look-up, which is of the same matrix, before it goes any further."""
    embeddings = [part for part in stage if part.embedded_tokens and part.is_trained]
    has_both = any(part.shared_matrices for part in embeddings[1:])
    return has_both * (4 if is_widened(run) else run.bytes_per_element)


def trains_head(stage: Stage) -> bool:
    return any(part.is_trained for part in stage if part.logit_tokens)


def head_work(run: Run, stage: Stage, matrix: int) -> float:
    """What the backward of the head holds beside the gradient of the logits: that of its weight, before it is added
    where it is wider, and, with sequence parallelism, what the head reads and its gradient, of all tokens."""
    if not trains_head(stage):
        return 0.0
    if is_widened(run) and not splits_backward(run.schedule):
        return float(matrix * run.bytes_per_element)
    sizes = run.sizes
    tokens = run.micro_batch_size * max(part.logit_tokens for part in stage) / sizes.cp
    is_cut = sizes.sequence_parallel and sizes.tp > 1
    return 2 * tokens * run.model.hidden_size * run.bytes_per_element * is_cut


def waiting_bytes(run: Run, part: ModelPart, *, is_attention: bool = False) -> float:
    """What a layer, or its attention, keeps for the half of its backward that makes weights' gradients: what products
    read, and the gradients of what they give. With sequence parallelism the second of two has its gradient whole."""
    layer = part.layer
    if layer is None:
        return 0.0
    config, sizes = layer.config, run.sizes
    tp, sp = sizes.tp, sizes.tp if sizes.sequence_parallel else 1
    if not part.is_trained:
        micro, width = run.micro_batch_size, run.bytes_per_element
        return width * sum(_path_waiting(path, micro * path.tokens_on(layer, sizes), tp, sp) for path in part.adapters)
    tokens = run.micro_batch_size * layer.tokens_on(sizes)
    hidden, query = config.hidden_size, config.num_attention_heads * config.head_dim
    keys, gates = config.num_query_groups * config.head_dim, 2 if config.is_gated else 1
    width = run.bytes_per_element if run.fp8 is None else 1

    def pair(inner_in: float, inner_out: float) -> float:
        """Of a product that opens a region cut over tp and one that closes it."""
        return tokens * (hidden / sp + (inner_out + inner_in) / tp + hidden)

    numbers = pair(query, query + 2 * keys)
    if layer.memory:
        numbers += pair(query, query) + run.micro_batch_size * layer.memory / sizes.cp * 2 * keys / tp
    if is_attention:
        return width * numbers
    if not layer.has_experts:
        return width * (numbers + pair(config.ffn_hidden_size, gates * config.ffn_hidden_size))
    assert config.moe is not None
    rows, features, _ = inner_sizes(run, layer, tokens)
    numbers += rows * (2 * hidden + (1 + gates) * features)
    if shared := config.moe.shared_expert_intermediate_size:
        numbers += pair(shared, gates * shared)
    return width * numbers


def _path_waiting(path: LoraAdapter, tokens: float, tp: int, sp: int) -> float:
    """The same of a low-rank path, in numbers."""
    inputs, outputs = (path.inputs / sp, path.outputs / tp) if path.cuts_outputs else (path.inputs / tp, path.outputs)
    return tokens * (inputs + outputs + 2 * path.rank)


def stage_numbers(run: Run, rank: int) -> tuple[int, ...]:
    """The numbers of a pipeline rank's stages, its first chunk's first."""
    sizes = run.sizes
    return tuple(number for number in range(sizes.num_stages) if sizes.pp_rank_of(number) == rank)


def batch_bytes(run: Run) -> float:
    """A replica's batch, which is on the device all step long."""
    num_tokens = run.held_tokens or run.num_microbatches * run.micro_batch_size * run.model_parts.tokens
    each = _BATCH_BYTES + _BOUND_BYTES * run.lengths.are_packed
    return float(num_tokens * each + run.num_microbatches * run.micro_batch_size * _pixel_bytes(run))


def _pixel_bytes(run: Run) -> int:
    """Those of a sample's images, in float32."""
    if not isinstance(run.model, LlavaConfig):
        return 0
    vision = run.model.vision
    return 4 * run.lengths.images * vision.num_channels * vision.image_size**2


def received_by_chunk(run: Run, rank: int) -> list[float]:
    """What each stage of a rank keeps of a microbatch because it came by a message."""
    numbered = zip(run.stages[rank], stage_numbers(run, rank), strict=True)
    return [received_bytes(run, stage) if number else 0.0 for stage, number in numbered]


def received_bytes(run: Run, stage: Stage) -> float:
    """What a stage that is not the first keeps of each microbatch because it came by a message."""
    if run.recompute.granularity == "full":
        # That is the saved input of the first layer.
        return 0.0
    again = run.recompute.recomputed_parts
    # The first norm keeps it itself where it is as wide, and what makes a norm again.
    is_kept = not run.is_mixed or "norm" in again or all(stream_width(run, part) == 4 for part in stage)
    return message_bytes(run, stage) - is_kept * own_bytes(run, stage)


def message_bytes(run: Run, stage: Stage) -> float:
    """A hidden state between stages; of a decoder with what its encoder gave."""
    memory = run.lengths.sequence if _is_decoder(stage) else 0
    return own_bytes(run, stage) + _stream_bytes(run, stage, memory)


def own_bytes(run: Run, stage: Stage) -> float:
    """Of `message_bytes` those of the stage's own stack."""
    return _stream_bytes(run, stage, run.lengths.decoder_sequence if _is_decoder(stage) else run.lengths.sequence)


def _stream_bytes(run: Run, stage: Stage, tokens: int) -> float:
    """Of so many tokens of a sample between two layers of the stage."""
    sizes = run.sizes
    sp = sizes.tp if sizes.sequence_parallel else 1
    width = max((stream_width(run, part) for part in stage), default=run.bytes_per_element)
    return run.micro_batch_size * tokens / sizes.cp / sp * run.model.hidden_size * width


def _is_decoder(stage: Stage) -> bool:
    return any(part.layer is not None and part.layer.memory for part in stage)


def num_flying(run: Run, rank: int) -> int:
    """Messages in a backward that were posted ahead, or are not known to have left; and the gradient that it starts
    from. The last rank of several stages does not know before its backwards of whatever it has sent to the first."""
    pp, schedule = run.sizes.pp, run.schedule
    if pp == 1:
        return 0
    if not spec_of(schedule.name).has_groups or schedule.microbatches <= schedule.group:
        return 2 if rank in (0, pp - 1) else 3
    if pp == 2:
        return 4
    return 5 if rank < pp - 1 else (schedule.chunks - 1) * schedule.group + 3


def _stepped_parameters(run: Run, dense: int, experts: int) -> float:
    """Of the trained parameters of a rank those that its optimizer steps."""
    if run.optimizer.kind == "replicated":
        return float(dense + experts)
    return dense / (run.sizes.dp * run.sizes.cp) + experts / run.sizes.edp


def _optimizer_bytes(run: Run, num_stepped: float) -> float:
    """What the optimizer makes of all that a rank steps."""
    root = run.bytes_per_element if run.precision == "bf16-true" else 4
    return num_stepped * root + _widened_bytes(run, num_stepped)


def _widened_bytes(run: Run, num_stepped: float) -> float:
    """Gradients in 16 bits, of master weights in float32."""
    return 4.0 * num_stepped if run.is_mixed and run.optimizer.grad_dtype == "bfloat16" else 0.0


def _adopting_bytes(run: Run, rank: int, num_stepped: float) -> float:
    """What looks for weights that somebody changed makes of the largest: two masks, and the weight twice in float32;
    beside the gradients that were widened before."""
    if not run.is_mixed:
        return 0.0
    replicas = run.sizes.dp * run.sizes.cp if run.optimizer.kind == "distributed" else 1
    largest = max((weight_of(run, part) for stage in run.stages[rank] for part in stage), default=0.0)
    return 10.0 * min(largest / replicas, num_stepped) + _widened_bytes(run, num_stepped)


def weight_of(run: Run, part: ModelPart) -> float:
    """Numbers of the largest weight of a piece that is trained, on this rank."""
    if not part.is_trained:
        return 0.0
    if part.layer is None:
        return float(cost.vocabulary_parameters(run.model, run.sizes) * (part.matrices + part.shared_matrices > 0))
    _, _, weight = inner_sizes(run, part.layer, 0.0)
    return weight * (2 if part.layer.config.is_gated else 1)


def is_widened(run: Run) -> bool:
    """Whether gradients are added up wider than products make them."""
    return run.is_mixed and run.optimizer.grad_dtype != "bfloat16"


def gradient_width(run: Run) -> int:
    """Bytes of a gradient that autograd makes, and of what becomes of it."""
    return run.bytes_per_element + (4 if is_widened(run) else 0)


def layer_work(run: Run, part: ModelPart) -> float:
    """What the backward of a layer holds at a time beside what the layer kept: its feed-forward network's share."""
    layer = part.layer
    if layer is None or not layer.repeats or not part.passes_gradient:
        return 0.0
    config, sizes, width = layer.config, run.sizes, run.bytes_per_element
    tokens = run.micro_batch_size * layer.tokens_on(sizes)
    sp = sizes.tp if sizes.sequence_parallel else 1
    again = run.recompute.recomputed_parts
    stream = tokens / sp * config.hidden_size * stream_width(run, part)
    rows, features, weight = inner_sizes(run, layer, tokens)
    inner = rows * features * width
    moved = rows * config.hidden_size * width if layer.has_experts else 0.0
    remade = 0.0
    if ("moe" if layer.has_experts else "mlp") in again:
        # Experts make what a gate gives once more, in their own backward.
        remade = inner * (3 if config.is_gated and not layer.has_experts else 2) + stream * ("norm" in again)
        if config.moe is not None and layer.has_experts:
            # What the router reads and what came to the experts, and what they gave before and after its weights.
            shared = tokens * config.moe.shared_expert_intermediate_size / sizes.tp * width
            routed = tokens / sizes.tp * config.hidden_size * max(width, 4)
            remade += shared * (3 if config.is_gated else 2) + (routed + moved + inner) * part.is_trained
    elif "activation" in again and not layer.has_experts:
        remade = inner
    gathered = tokens * config.hidden_size * width if sp > 1 else 0.0
    activation = (4 if config.is_gated else 1) * inner
    has_path = any(path.name == DOWN for path in part.adapters)
    is_put_off = splits_backward(run.schedule) and (part.is_trained or has_path)
    reads_output = config.activation == "relu" and not {"activation", "mlp"} & set(again)
    if is_put_off or reads_output or not (part.is_trained or has_path):
        # Nothing of the features is let go, or they stay for the gradient of the weight, which is none of this half, or
        # for that of the activation.
        activation += inner
    if is_put_off and has_path and stream_width(run, part) > width:
        # What the path's product gave has its gradient in its own numbers.
        activation += tokens / sp * config.hidden_size * width
    if is_put_off and part.is_trained:
        down = gathered + inner
    elif part.is_trained:
        down = gathered + inner + (weight * width if is_widened(run) else 0.0)
    else:
        # No product keeps the features, and the weight is cast again.
        cast = weight * width * run.is_mixed
        # The first product's as well, wider where it is gated; what the activation kept is gone then.
        down = gathered + max(2 * inner + cast, moved + cast * (2 if config.is_gated else 1))
    if part.is_trained and layer.has_experts and run.fp8 is not None and not splits_backward(run.schedule):
        # Of all experts' largest weights one gradient, into which those of single experts are put.
        own = config.moe.router.num_experts // sizes.ep if config.moe is not None else 1
        largest = weight * (2 if config.is_gated else 1) * (4 if is_widened(run) else width)
        down = max(down, largest * (1 + 1 / own))
    if layer.has_experts:
        return stream + max(down, _experts_work(run, part, tokens)) + remade
    return stream + max(down, activation) + remade


def _experts_work(run: Run, part: ModelPart, tokens: float) -> float:
    """What the backward of experts holds at a time: gradients of rows as they come from where their tokens are; those
    inside of the experts, where rows times the router's weights are in float32; those of rows on their way back."""
    layer, width = part.layer, run.bytes_per_element
    assert layer is not None
    rows, features, weight = inner_sizes(run, layer, tokens)
    numbers, moved = rows * features, rows * layer.config.hidden_size * width
    wide = 4 * (width < 4)
    activation = numbers * (4 * width + wide if layer.config.is_gated else width + (3 * wide or 2 * width))
    if not part.is_trained:
        return max(2 * moved, activation + numbers * width)
    if splits_backward(run.schedule):
        # What came waits for the gradients of weights.
        return moved + max(moved, activation)
    # Gradients of all experts' weights are made before they are added. What the second products read is let go then,
    # and behind the activation what that has read.
    second, first = weight * width, weight * width * (2 if layer.config.is_gated else 1)
    inner = numbers * width
    return max(2 * moved, moved + inner + second, activation - inner, moved + first - inner)


def experts_bytes(run: Run, part: ModelPart) -> float:
    """What the forward of a layer of experts holds beside what it keeps: rows times the router's weights, in float32;
    or rows as experts gave them, as they came home, and in the order of tokens. And two hidden states."""
    layer, width = part.layer, run.bytes_per_element
    if layer is None or not layer.has_experts:
        return 0.0
    sizes = run.sizes
    tokens = run.micro_batch_size * layer.sequence / (sizes.cp if layer.is_cut_by_context else 1)
    rows, features, _ = inner_sizes(run, layer, tokens)
    travels = sizes.ep * sizes.etp > 1
    home = rows * layer.config.hidden_size * width * (2 + travels)
    shard = tokens / (sizes.tp if sizes.sequence_parallel else 1) * layer.config.hidden_size
    return max(home, rows * features * (width + 4 * (width < 4))) + 2 * shard * width


def _forward_work(run: Run, part: ModelPart) -> float:
    """What the forward of a layer holds of a stage that keeps nothing, which is a first one: beside messages what came
    in, what goes into its feed-forward network, the same before its norm, what is inside of it with a weight that is
    cast, and what it gives."""
    layer = part.layer
    if layer is None or not layer.repeats:
        return 0.0
    config, sizes, width = layer.config, run.sizes, run.bytes_per_element
    tokens = run.micro_batch_size * layer.tokens_on(sizes)
    rows, features, weight = inner_sizes(run, layer, tokens)
    shard = tokens / (sizes.tp if sizes.sequence_parallel else 1) * config.hidden_size
    inner = rows * features * (3 if config.is_gated else 2)
    return 3 * shard * stream_width(run, part) + (inner + shard + weight * run.is_mixed) * width


def drawing_bytes(run: Run, part: ModelPart) -> float:
    """What a layer that drops anything holds while it draws what."""
    layer = part.layer
    if layer is None or not layer.repeats:
        return 0.0
    config, sizes = layer.config, run.sizes
    tokens = run.micro_batch_size * layer.tokens_on(sizes)
    sp = sizes.tp if sizes.sequence_parallel else 1
    hidden = tokens / sp * config.hidden_size * (config.hidden_dropout > 0)
    features = tokens * config.ffn_hidden_size / sizes.tp * (config.ffn_dropout > 0 and not layer.has_experts)
    adapters = (_path_drawing_bytes(run, part, path, tokens) for path in part.adapters if path.has_dropout)
    return max(_drawn_bytes(max(hidden, features)), _attention_drawing_bytes(run, layer), *adapters)


def _drawn_bytes(numbers: float) -> float:
    return min(numbers, rng.MASK_BLOCK) * _DRAW_BYTES


def _path_drawing_bytes(run: Run, part: ModelPart, path: LoraAdapter, tokens: float) -> float:
    """The same of a path, beside what its layer keeps. One at the end of a feed-forward network draws when all else is
    made: what the linear gave is there, and what the network's norm did."""
    layer, tp, width = part.layer, run.sizes.tp, run.bytes_per_element
    assert layer is not None
    sp = tp if run.sizes.sequence_parallel else 1
    numbers = tokens * path.inputs / (sp if path.cuts_outputs else tp)
    if not path.name.endswith(".down"):
        return _drawn_bytes(numbers) - feed_forward_bytes(run, part)
    shard = tokens / sp * layer.config.hidden_size
    made = shard * (width + norm_input_width(run))
    again = run.recompute.recomputed_parts
    if ("moe" if layer.has_experts else "mlp") in again:
        # It is made in a backward, of a gradient.
        made += numbers * (width * (3 if layer.config.is_gated else 2) + 1) + shard * stream_width(run, part)
    return _drawn_bytes(numbers) + made


def _attention_drawing_bytes(run: Run, layer: Layer) -> float:
    """The same of one that drops weights of attention in tiles; those that are laid out need more in the backward."""
    if layer.config.attention_dropout == 0 or not is_shared(layer, run.sizes):
        return 0.0
    cp = run.sizes.cp if layer.is_cut_by_context else 1
    rows = run.micro_batch_size * layer.repeats * layer.sequence / cp * layer.config.num_attention_heads / run.sizes.tp
    tile = min(rows * max(layer.sequence, layer.memory) / cp, MOST_SCORES)
    return tile * (_DRAW_BYTES + 4) + rows * layer.config.head_dim * 4


def scores_bytes(run: Run, part: ModelPart) -> float:
    """What the backward of attention holds where scores are laid out: two gradients of them. Where weights are dropped
    those are in float32, the weights themselves are gone by then, and they may have been made again."""
    layer = part.layer
    if layer is None or not part.passes_gradient:
        return 0.0
    pairs = run.micro_batch_size * layer.repeats * layer.sequence**2 * layer.config.num_attention_heads / run.sizes.tp
    if layer.config.attention_dropout > 0 and not is_shared(layer, run.sizes):
        is_again = "core_attention" in run.recompute.recomputed_parts
        return pairs * (8 - run.bytes_per_element + is_again * pair_bytes(run))
    return 2 * pairs * run.bytes_per_element * lays_scores_out(layer, run.sizes, run.bytes_per_element)


def exchanged_bytes(run: Run, part: ModelPart) -> float:
    """What the backward of attention holds of keys and values of other ranks, and of gradients of them, in float32,
    when the feed-forward network is done.

    The bytes of a number are those that dry runs hold (rings and all-gathers of 2, 4 and 8 ranks, three precisions).
    """
    layer, sizes = part.layer, run.sizes
    outer = sizes.cp // sizes.cp_ulysses
    if layer is None or not part.passes_gradient or not layer.is_cut_by_context or sizes.cp == 1:
        return 0.0
    config, is_half = layer.config, run.is_half
    tokens = run.micro_batch_size * layer.repeats * layer.sequence / sizes.cp
    numbers = 2 * tokens * max(config.num_query_groups / sizes.tp, 1) * config.head_dim
    if outer == 1:
        # Where heads are exchanged: gradients of all that attention reads, and of what it gave, which came; in 16 bits
        # also in float32, beside copies of what the kernel reads.
        width, queries = run.bytes_per_element, tokens * config.num_attention_heads * config.head_dim / sizes.tp
        read = queries + numbers
        return (read + queries) * width + is_half * (read * (4 + width) + queries * width)
    # Bytes of each number, of keys and values as they come and go, and of what else of the layer is there then.
    if sizes.cp_exchange == "all_gather":
        own = (19 if run.is_mixed else 20) if is_half else 25
        return numbers * (own + (run.bytes_per_element + 4) * outer)
    own = (21 if run.is_mixed else 22) if is_half else 27
    # Of two ranks nothing comes while something goes.
    passed_on = (14 if is_half else 18) * (outer > 2)
    return numbers * (own + passed_on)


def inner_sizes(run: Run, layer: Layer, tokens: float) -> tuple[float, float, float]:
    """Rows and features of a feed-forward network on this rank, and the numbers of its largest weight for each."""
    config, sizes = layer.config, run.sizes
    if config.moe is None or not layer.has_experts:
        features = config.ffn_hidden_size / sizes.tp
        return tokens, features, features * config.hidden_size
    features = (config.moe.ffn_hidden_size or config.ffn_hidden_size) / sizes.etp
    rows = sent_rows(layer, sizes, run.micro_batch_size) * sizes.etp
    own = config.moe.router.num_experts // sizes.ep
    return rows, features, own * features * config.hidden_size

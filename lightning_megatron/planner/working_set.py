"""What a rank holds for a while beside what its microbatches keep: tensors of a backward, messages, the optimizer.

    a layer's backward     gradients inside of its feed-forward network, the largest weight's before it is added, and,
                           with sequence parallelism, a gathered gradient
    attention's dropout    where weights are laid out to be dropped: the draws of one sample, int64, three at a time
    the embedding's        the gradient of its whole matrix, and the same in float32 where gradients are; the layers of
                           the microbatch are gone by then
    the head's             logits, or their gradient beside that of the weight
    earlier batches        the sum of their gradients, where a step accumulates several and a schedule runs them
    the optimizer          the root of the second moments of all that the rank steps; of gradients in 16 bits a copy in
                           float32

A step's peak is at one of them. `dry_run` runs the code that these formulas describe; tests hold one to the other.
T tokens of a microbatch, H hidden, F feed-forward, V vocabulary, of this rank.
"""

from lightning_megatron.planner.activations import is_shared, logit_bytes, stage_bytes
from lightning_megatron.planner.anatomy import Layer, Piece, Stage
from lightning_megatron.planner.pipeline_load import has_pairs
from lightning_megatron.planner.run import Run
from lightning_megatron.transformer import cost

_SPLITTING = ("zb_h1", "zb_v")
# These schedules put the halves of backwards off that make weights' gradients.
_KEPT_FOR_WEIGHTS = 8 / 9
# of what a layer keeps, from the half for the input on: 32 H of 36 H a token for F = 4 H and GELU, inputs of products
# and gradients of their outputs
_BATCH_BYTES = 20
# of a token: its id and its label, int64, and its place in the loss mask, float32
_BOUND_BYTES = 8
# of a token, where its document has a number

_DRAW_BYTES = 24
# of each pair of tokens and head of one sample, while a mask is drawn


def work_bytes(
    run: Run,
    rank: int,
    kept: tuple[float, ...],
    activations: float,
    again: float,
    trained: tuple[int, int],
    unmade: float = 0.0,
) -> float:
    """The most that a pipeline rank holds beside weights, gradients and optimizer states.

    `activations` are those of all microbatches that it keeps, `kept` of each chunk; `again` is what full recomputation
    makes at a time; `trained` are its trained parameters, dense ones and those of experts; `unmade` bytes are not among
    the activations while a backward keeps all, but at its end, made by a forward beside it.
    """
    stages = run.stages[rank]
    batch = batch_bytes(run)
    held = activations + batch + _flying_bytes(run, rank)
    held += sum(trained) * run.gradient_bytes * run.sets_gradients_aside
    numbered = zip(kept, stages, _numbers(run, rank), strict=True)
    held += sum(count * received_bytes(run, stage) for count, stage, number in numbered if number)
    held += _put_off_bytes(run, rank, kept)
    if run.schedule.name == "gpipe":
        # Exponentials of the logits of the other microbatches, whose backwards come when all forwards are done.
        held += (kept[0] - 1) * logit_bytes(run, stages[0]) * 2 / 3
    # What a forward leaves of them that is through when the backward beside it comes to an end, or where no tokens are
    # waited for, to its start.
    through = logit_bytes(run, stages[-1]) * 2 / 3 * has_pairs(run.schedule, rank)
    held += 0.0 if unmade else through
    peaks = [batch + _optimizer_bytes(run, _stepped_parameters(run, *trained))]
    matrix = cost.vocabulary_parameters(run.model, run.sizes)
    for stage in stages:
        peaks.append(held + again + max((layer_work(run, piece) for piece in stage), default=0.0))
        peaks.append(held + again + max((_drawing_bytes(run, piece) for piece in stage), default=0.0))
        if logits := logit_bytes(run, stage):
            is_trained = any(piece.is_trained for piece in stage if piece.layer is None)
            peaks += [held + logits, held + logits / 3 + (matrix * run.bytes_per_element if is_trained else 0.0)]
        if places := [place for place, piece in enumerate(stage) if piece.embedded_tokens and piece.is_trained]:
            # A decoder's embedding stands behind the encoder's layers, and a LLaVA's behind the tower's: its backward
            # comes before theirs.
            behind = dict(list(stage.items())[places[-1] + 1 :])
            gone = 0.0 if run.schedule.name in _SPLITTING else stage_bytes(run, behind)
            made = unmade + through if unmade else 0.0
            peaks.append(held - gone + made + matrix * _gradient_width(run))
            peaks.append(batch + _adopting_bytes(run, matrix))
    return max(peaks)


def _put_off_bytes(run: Run, rank: int, kept: tuple[float, ...]) -> float:
    """What microbatches whose weight halves are put off keep, more or less than before their input halves.

    Under ZB-H1 those are as many as ranks stand before this one, when it holds the most.
    """
    if run.schedule.name != "zb_h1":
        return 0.0
    stage, num_put_off = run.stages[rank][0], min(rank, kept[0] - 1)
    logits = logit_bytes(run, stage) / run.software.logit_bytes * run.bytes_per_element
    return num_put_off * (logits - (1 - _KEPT_FOR_WEIGHTS) * stage_bytes(run, stage))


def _numbers(run: Run, rank: int) -> tuple[int, ...]:
    """The numbers of a pipeline rank's stages, its first chunk's first."""
    sizes = run.sizes
    return tuple(number for number in range(sizes.num_stages) if sizes.pp_rank_of(number) == rank)


def batch_bytes(run: Run) -> float:
    """A replica's batch, which is on the device all step long."""
    num_tokens = run.held_tokens or run.num_microbatches * run.micro_batch_size * run.anatomy.tokens
    each = _BATCH_BYTES + _BOUND_BYTES * run.texts.are_packed
    return float(num_tokens * each)


def received_bytes(run: Run, stage: Stage) -> float:
    """What a stage that is not the first keeps of each microbatch because it came by a message."""
    if run.recompute.granularity == "full":
        # That is the saved input of the first layer.
        return 0.0
    return _hidden_bytes(run, stage)


def _hidden_bytes(run: Run, stage: Stage) -> float:
    """A hidden state between stages; of a decoder with what its encoder gave."""
    sizes, texts = run.sizes, run.texts
    of_decoder = any(piece.layer is not None and piece.layer.memory for piece in stage)
    tokens = texts.decoder_sequence + texts.sequence if of_decoder else texts.sequence
    sp = sizes.tp if sizes.sequence_parallel else 1
    return run.micro_batch_size * tokens / sizes.cp / sp * run.model.hidden_size * run.bytes_per_element


def _flying_bytes(run: Run, rank: int) -> float:
    """Messages that were posted ahead, or are not known to have left; and the gradient that a backward starts from."""
    sizes = run.sizes
    if sizes.pp == 1:
        return 0.0
    at_ends = rank in (0, sizes.pp - 1)
    return (2 if at_ends else 3) * max(_hidden_bytes(run, stage) for stage in run.stages[rank])


def _stepped_parameters(run: Run, dense: int, experts: int) -> float:
    """Of the trained parameters of a rank those that its optimizer steps."""
    if run.optimizer.kind == "replicated":
        return float(dense + experts)
    return dense / (run.sizes.dp * run.sizes.cp) + experts / run.sizes.edp


def _optimizer_bytes(run: Run, num_stepped: float) -> float:
    """What the optimizer makes of all that a rank steps."""
    root = run.bytes_per_element if run.precision == "bf16-true" else 4
    return num_stepped * (root + (4 if run.is_mixed and run.optimizer.grad_dtype == "bfloat16" else 0))


def _adopting_bytes(run: Run, matrix: int) -> float:
    """What looks for weights that somebody changed makes of the largest: two masks, and the weight twice in float32."""
    if not run.is_mixed:
        return 0.0
    shared = run.sizes.dp * run.sizes.cp if run.optimizer.kind == "distributed" else 1
    return 10.0 * matrix / shared


def _is_widened(run: Run) -> bool:
    """Whether gradients are added up wider than products make them."""
    return run.is_mixed and run.optimizer.grad_dtype != "bfloat16"


def _gradient_width(run: Run) -> int:
    """Bytes of a gradient that autograd makes, and of what becomes of it."""
    return run.bytes_per_element + (4 if _is_widened(run) else 0)


def layer_work(run: Run, piece: Piece) -> float:
    """What the backward of a layer holds at a time beside what the layer kept: its feed-forward network's share."""
    layer = piece.layer
    if layer is None or not layer.repeats or not piece.passes_gradient:
        return 0.0
    config, sizes, width = layer.config, run.sizes, run.bytes_per_element
    tokens = run.micro_batch_size * layer.repeats * layer.sequence / (sizes.cp if layer.is_cut_by_context else 1)
    sp = sizes.tp if sizes.sequence_parallel else 1
    again = run.recompute.parts if run.recompute.granularity == "selective" else ()
    stream = tokens / sp * config.hidden_size * width
    rows, features, weight = inner_sizes(run, layer, tokens)
    inner = rows * features * width
    moved = rows * config.hidden_size * width if layer.has_experts else 0.0
    remade = 0.0
    if ("moe" if layer.has_experts else "mlp") in again:
        # Experts make what a gate gives once more, in their own backward.
        remade = inner * (3 if config.is_gated and not layer.has_experts else 2) + stream * ("norm" in again)
        if config.moe is not None and layer.has_experts:
            # What came to the experts, and their outputs before and after the router's weights.
            shared = tokens * config.moe.shared_ffn_hidden_size / sizes.tp * width
            remade += shared * (3 if config.is_gated else 2) + (moved + inner if piece.is_trained else 0.0)
    elif "activation" in again and not layer.has_experts:
        remade = inner
    gathered = tokens * config.hidden_size * width if sp > 1 else 0.0
    if piece.is_trained:
        down = gathered + inner + (weight * width if _is_widened(run) else 0.0)
    else:
        # No product keeps the features, and the weight is cast again.
        down = gathered + 2 * inner + (weight * width if run.is_mixed else 0.0)
    activation = (4 if config.is_gated else 1) * inner
    # Gradients of rows as they come from where their tokens are, behind the experts, and on their way back.
    return stream + max(down, activation) + remade + 3 * moved


def _drawing_bytes(run: Run, piece: Piece) -> float:
    """What a layer that drops weights of attention holds while it draws which; and what recomputation keeps of it."""
    layer = piece.layer
    if layer is None or not layer.repeats or layer.config.attention_dropout == 0 or is_shared(layer, run.sizes):
        return 0.0
    pairs = layer.sequence**2 * layer.config.num_attention_heads / run.sizes.tp
    streams = run.micro_batch_size * layer.repeats
    is_again = run.recompute.granularity == "selective" and "core_attention" in run.recompute.parts
    return pairs * (_DRAW_BYTES + streams * (1 + is_again * run.software.pair_bytes))


def inner_sizes(run: Run, layer: Layer, tokens: float) -> tuple[float, float, float]:
    """Rows and features of a feed-forward network on this rank, and the numbers of its largest weight for each."""
    config, sizes = layer.config, run.sizes
    if config.moe is None or not layer.has_experts:
        features = config.ffn_hidden_size / sizes.tp
        return tokens, features, features * config.hidden_size
    features = (config.moe.ffn_hidden_size or config.ffn_hidden_size) / sizes.etp
    rows = tokens / sizes.tp * config.moe.router.top_k * sizes.etp
    own = config.moe.router.num_experts // sizes.ep
    return rows, features, own * features * config.hidden_size

"""Every rule that crosses configurations, as one small function of the facts of a run; errors are listed together."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from lightning_megatron.context.balance import DynamicContextConfig, group_sizes
from lightning_megatron.context.config import ContextConfig
from lightning_megatron.mesh import Sizes
from lightning_megatron.models import BertConfig, GPTConfig, LlavaConfig, T5Config
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.pipeline.layout import layout_faults as stage_faults
from lightning_megatron.pipeline.registry import schedule_faults, spec_of
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.precision.fp8 import Fp8Config, engine_faults, expert_engine_faults
from lightning_megatron.precision.kernels import KernelConfig
from lightning_megatron.rules.limits import (
    MOST,
    MOST_MICROBATCHES,
    MOST_STAGES,
    MOST_TOKENS,
    limit_faults,
    model_limit_faults,
)
from lightning_megatron.transformer.config import LanguageModelConfig, TransformerConfig
from lightning_megatron.transformer.fp8_rules import fp8_faults, tile_faults
from lightning_megatron.transformer.recompute import RecomputeConfig


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of a run that are known before it starts."""

    sizes: Sizes
    """Ranks on each axis."""
    num_microbatches: int = 1
    """Microbatches of a step on each data-parallel rank."""
    microbatch_size: int = 0
    """Rows of a microbatch, where their number follows from the batch."""
    model: TransformerConfig | None = None
    """The architecture, where the module has it."""
    global_batch_size: int | None = None
    """Samples of a step over all data-parallel ranks, where the data module has it."""
    batch_unit: int | None = None
    """The greatest number that divides the sizes of all batches, where they grow."""
    sequence_length: int | None = None
    """Tokens of a sample, where the data module has it."""
    decoder_sequence_length: int | None = None
    """Tokens of a sample's decoder sequence, where there are an encoder and a decoder."""
    schedule: Schedule | None = None
    """Pipeline schedule of training steps, where there is one."""
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    """Activation checkpointing: what the backward recomputes."""
    kernels: KernelConfig = field(default_factory=KernelConfig)
    """Kernels in place of torch's own."""
    fp8: Fp8Config | None = None
    """FP8 recipe of linears; None: no FP8."""
    precision: str = "32-true"
    """Precision of the Trainer."""
    context: ContextConfig = field(default_factory=ContextConfig)
    """Communication of attention under context parallelism."""
    dynamic_context: DynamicContextConfig | None = None
    """Dynamic context parallelism: how microbatches are packed and sharded; None: not used."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Sharding over data-parallel ranks."""


def faults(facts: Facts) -> list[str]:
    """One sentence for each rule that the facts break; only for numbers above any run's, where there are such, as the
    other rules compute with them."""
    return _limits(facts) or [fault for rule in _RULES for fault in rule(facts)]


def _limits(facts: Facts) -> list[str]:
    sizes = facts.sizes
    stages = "pipeline_model_parallel_size x virtual_pipeline_model_parallel_size"
    return [
        *([] if facts.model is None else model_limit_faults(facts.model)),
        *limit_faults({"world size": sizes.world, "global_batch_size": facts.global_batch_size}, MOST),
        *limit_faults({stages: max(sizes.pp, 1) * max(sizes.vp, 1)}, MOST_STAGES),
        *limit_faults({"num_microbatches": facts.num_microbatches}, MOST_MICROBATCHES),
        *limit_faults(
            {
                "sequence_length": facts.sequence_length,
                "decoder_sequence_length": facts.decoder_sequence_length,
            },
            MOST_TOKENS,
        ),
    ]


def _sizes(facts: Facts) -> list[str]:
    return facts.sizes.faults()


def _cutting_sizes(facts: Facts) -> Sizes | None:
    """The sizes that cut a model, where they fit each other, in the smallest world that holds them."""
    sizes = facts.sizes
    world = math.lcm(sizes.pp * sizes.cp * sizes.tp, sizes.pp * sizes.ep * sizes.etp)
    alone = replace(sizes, world=world, context_groups=())
    return None if alone.faults() else alone


def _layout(facts: Facts) -> list[str]:
    sizes = _cutting_sizes(facts)
    return [] if facts.model is None or sizes is None else facts.model.layout_faults(sizes)


def _experts(facts: Facts) -> list[str]:
    if facts.model is None or facts.model.moe is not None:
        return []
    sizes = {"expert_model_parallel_size": facts.sizes.ep, "expert_tensor_parallel_size": facts.sizes.etp}
    return [f"{name} ({size}) cuts experts, and the model has none; use 1" for name, size in sizes.items() if size > 1]


def _stages(facts: Facts) -> list[str]:
    sizes = _cutting_sizes(facts)
    if not isinstance(facts.model, LanguageModelConfig) or sizes is None:
        return []
    return stage_faults(facts.model.num_staged_layers, True, True, sizes.num_stages, sizes.stage_layout)


# What users call the sizes of a schedule.
_FULL_NAMES = {
    "pp": "pipeline_model_parallel_size",
    "chunks": "virtual_pipeline_model_parallel_size",
    "microbatches": "num_microbatches",
    "group_size": "microbatch_group_size",
}


def _schedule(facts: Facts) -> list[str]:
    if facts.schedule is None or _cutting_sizes(facts) is None or facts.num_microbatches < 1:
        return []
    faults = [fault.partition(" ") for fault in schedule_faults(facts.schedule)]
    return [f"{_FULL_NAMES.get(thing, thing)} {rest}" for thing, _, rest in faults]


def _joint(facts: Facts) -> list[str]:
    if facts.schedule is None or not facts.schedule.is_overlapped:
        return []
    faults, recompute = [], facts.recompute
    is_selective = "moe" in recompute.recomputed_parts
    if recompute.granularity == "full" or is_selective:
        what = "granularity ('full')" if not is_selective else "part 'moe'"
        faults.append(
            f"recompute {what} would recompute layers of experts while overlap_expert_exchange runs a forward at the "
            "same time, and take its random state; leave one of them out"
        )
    if facts.model is not None and facts.model.moe is None:
        faults.append(
            "overlap_expert_exchange hides the dispatch of tokens to experts, and the model has none; leave it out"
        )
    is_one = facts.schedule.microbatches == 1 and not facts.microbatch_size
    if facts.schedule.pp == 1 and is_one and facts.dynamic_context is None:
        faults.append(
            "overlap_expert_exchange overlaps the forward of one microbatch with the backward of another, and "
            "num_microbatches is 1; use 2 or more, or leave it out"
        )
    if facts.fp8 is not None and facts.fp8.engine == "transformer_engine":
        faults.append(
            "overlap_expert_exchange and the fp8 engine 'transformer_engine', whose state is one for a process, do not "
            "go together; use the engine 'torch', or leave one of them out"
        )
    return faults


def _microbatches(facts: Facts) -> list[str]:
    faults = []
    if facts.num_microbatches < 1:
        faults.append(f"num_microbatches ({facts.num_microbatches}) must be at least 1")
    if facts.microbatch_size < 0:
        faults.append(
            f"microbatch_size ({facts.microbatch_size}) must be at least 1, or 0, which leaves it to num_microbatches"
        )
    if facts.microbatch_size > 0 and facts.num_microbatches > 1:
        faults.append(
            f"num_microbatches ({facts.num_microbatches}) and microbatch_size ({facts.microbatch_size}) both say how a "
            "batch is cut; leave one of them out"
        )
    return faults


def _batch(facts: Facts) -> list[str]:
    batch, count, name = facts.global_batch_size, facts.num_microbatches, "num_microbatches"
    if facts.microbatch_size:
        count, name = facts.microbatch_size, "microbatch_size"
    if batch is None or count < 1 or facts.sizes.faults():
        return []
    dp = facts.sizes.dp
    step = dp * count
    if batch >= 1 and batch % step == 0:
        return []
    below, above = max(batch, 0) // step * step, (max(batch, 0) // step + 1) * step
    fits = " or ".join(str(size) for size in (below, above) if size)
    return [
        f"global_batch_size ({batch}) must be a multiple of data-parallel size x {name} "
        f"({dp} x {count} = {step}); use {fits}"
    ]


def _growing_batch(facts: Facts) -> list[str]:
    unit = facts.batch_unit
    if unit is None or facts.sizes.faults() or facts.microbatch_size < 0:
        return []
    dp, rows = facts.sizes.dp, max(facts.microbatch_size, 1)
    if unit % (dp * rows) == 0:
        return []
    return [
        f"batch_ramp leads to batches that have {unit} as their greatest divisor, which must be a multiple of "
        f"data-parallel size x microbatch_size ({dp} x {rows} = {dp * rows}); choose first_size and "
        "step_size so"
    ]


def _sequence(facts: Facts) -> list[str]:
    if facts.model is None or facts.model.position != "learned":
        return []
    known = [("sequence_length", facts.sequence_length, facts.model.max_sequence_length)]
    if isinstance(facts.model, T5Config):
        limit = facts.model.max_decoder_sequence_length
        known.append(("decoder_sequence_length", facts.decoder_sequence_length, limit))
    return [
        f"{name} ({length}) must be at most the model's max_{name} ({longest}); shorten the samples or raise it"
        for name, length, longest in known
        if length is not None and length > longest
    ]


def _context(facts: Facts) -> list[str]:
    sizes = _cutting_sizes(facts)
    if sizes is None or sizes.pads_uneven:
        return []
    outer = sizes.cp // sizes.cp_ulysses
    # Under causal attention a rank has two chunks, which balances the work; without it a rank has one.
    causal_step = (2 * outer if outer > 1 else 1) * sizes.cp_ulysses
    step = sizes.cp if facts.model is not None and facts.model.sees_both_ways else causal_step
    return [
        *_uneven("sequence_length", facts.sequence_length, step, sizes),
        *_uneven("decoder_sequence_length", facts.decoder_sequence_length, causal_step, sizes),
    ]


def _uneven(name: str, length: int | None, step: int, sizes: Sizes) -> list[str]:
    if length is None or length < 1 or length % step == 0:
        return []
    fits = " or ".join(str(n) for n in (length // step * step, (length // step + 1) * step) if n)
    return [
        f"{name} ({length}) must be a multiple of {step}, by which context_parallel_size ({sizes.cp}) cuts sequences; "
        f'use {fits}, or ContextConfig(uneven="pad")'
    ]


def with_context_groups(sizes: Sizes, config: DynamicContextConfig, context: ContextConfig) -> Sizes:
    """The sizes with the groups that dynamic context parallelism needs; without, where its limits do not fit."""
    try:
        groups = group_sizes(sizes.dp * sizes.cp, config)
    except ValueError:
        return sizes
    return replace(sizes, context_groups=groups, context_groups_by_heads=context.comm_type == "all_to_all")


def _dynamic_context(facts: Facts) -> list[str]:
    config, sizes = facts.dynamic_context, facts.sizes
    if config is None or sizes.faults():
        return []
    faults = _dynamic_model(facts)
    try:
        largest = group_sizes(sizes.dp * sizes.cp, config)[-1]
    except ValueError as error:
        return faults + str(error).splitlines()
    if facts.num_microbatches != 1:
        faults.append(
            f"num_microbatches ({facts.num_microbatches}) must be 1 with dynamic_context, whose plan chooses how many "
            "there are; use 1, and DynamicContextConfig(min_microbatches=...) for more"
        )
    if facts.microbatch_size:
        faults.append(
            f"microbatch_size ({facts.microbatch_size}) must be 0 with dynamic_context, whose plan chooses what a "
            "microbatch holds; leave it out"
        )
    if facts.context.comm_type == "hierarchical":
        faults.append(
            "context comm_type ('hierarchical') is one of a single size, and dynamic_context cuts microbatches over "
            "several; use 'ring', 'all_gather' or 'all_to_all'"
        )
    if not sizes.pads_uneven:
        faults.append(
            "ContextConfig(uneven='refuse') refuses documents that a group does not divide, and dynamic_context "
            "chooses groups by cost alone; use uneven='pad'"
        )
    if facts.fp8 is not None and config.cost is None:
        faults.append(
            "dynamic_context measures costs by calls of a layer, which would count in the scales of fp8; give them: "
            "DynamicContextConfig(cost=CostModel(...))"
        )
    cap, longest = config.max_tokens_per_rank, facts.sequence_length
    if longest is not None and longest > cap * largest:
        faults.append(
            f"sequence_length ({longest}) must be at most max_tokens_per_rank ({cap}) x the largest group ({largest} "
            f"ranks) = {cap * largest}, because a document may be as long; set max_tokens_per_rank to "
            f"{-(-longest // largest)}, or cut the samples"
        )
    return faults + _dynamic_heads(facts, largest) + _dynamic_experts(facts)


def _dynamic_model(facts: Facts) -> list[str]:
    model = facts.model
    if not isinstance(model, LanguageModelConfig) or (
        isinstance(model, GPTConfig) and not isinstance(model, LlavaConfig)
    ):
        return []
    what = "and no images" if isinstance(model, LlavaConfig) else "of one stack that sees what came before"
    return [
        f"the model ({type(model).__name__}) must be a GPT's (GPTConfig) with dynamic_context, which spreads documents "
        f"{what} over the ranks; leave dynamic_context out: context_parallel_size cuts sequences of this model too"
    ]


def _dynamic_heads(facts: Facts, largest: int) -> list[str]:
    model, tp = facts.model, facts.sizes.tp
    if model is None or facts.context.comm_type != "all_to_all" or model.num_attention_heads % tp:
        return []
    heads = model.num_attention_heads // tp
    if heads % largest == 0:
        return []
    fits = ", ".join(str(1 << k) for k in range(heads.bit_length()) if heads % (1 << k) == 0)
    return [
        f"num_attention_heads / tensor_model_parallel_size ({heads}) must be a multiple of the largest group of "
        f"dynamic_context ({largest}) under ContextConfig(comm_type='all_to_all'); set max_group_size to one of "
        f"{fits}, or comm_type='ring'"
    ]


def _dynamic_experts(facts: Facts) -> list[str]:
    moe, sizes = None if facts.model is None else facts.model.moe, facts.sizes
    if moe is None or sizes.ep * sizes.etp == 1:
        return []
    faults = []
    if moe.dispatcher == "all_gather":
        faults.append(
            "dispatcher ('all_gather') of experts needs as many tokens on each rank, and dynamic_context gives ranks "
            "different documents; use 'all_to_all'"
        )
    if moe.capacity is not None and moe.capacity.pad_to_capacity:
        faults.append(
            "pad_to_capacity (True) of experts needs as many tokens on each rank, and dynamic_context gives ranks "
            "different documents; use pad_to_capacity=False"
        )
    return faults


# In these precisions the rest of a model may run with FP8 GEMMs.
_AROUND_FP8 = ("bf16-mixed", "bf16-true", "32-true", "transformer-engine")


def _fp8(facts: Facts) -> list[str]:
    if facts.fp8 is None:
        return []
    faults = engine_faults(facts.fp8)
    if facts.precision not in _AROUND_FP8:
        faults.append(
            f"precision ({facts.precision!r}) must be one of {', '.join(_AROUND_FP8)} with fp8; use 'bf16-mixed'"
        )
    if facts.fp8.param_gather == "float8" and not facts.optimizer.shards_parameters:
        faults.append(
            "fp8 param_gather ('float8') acts with OptimizerConfig(kind=\"distributed_parameters\") alone, which "
            f"gathers weights as they are used, and the kind is {facts.optimizer.kind!r}; leave it out"
        )
    if facts.fp8.engine == "transformer_engine" and facts.recompute.shard_saved_inputs:
        faults.append(
            "recompute shard_saved_inputs (True) is for layers that torch recomputes, and with the fp8 engine "
            "'transformer_engine' that engine does; use the engine 'torch', or leave shard_saved_inputs out"
        )
    sizes = _cutting_sizes(facts)
    if facts.model is not None and sizes is not None:
        faults += _fp8_model(facts.fp8, facts.model, sizes)
    return faults


def _fp8_model(fp8: Fp8Config, model: TransformerConfig, sizes: Sizes) -> list[str]:
    if isinstance(model, BertConfig) and model.norm_placement == "post":
        return [
            "norm_placement ('post') must be 'pre' for fp8, which is for layers whose norms stand before their "
            "linears; use BertConfig(norm_placement='pre'), or leave fp8 out"
        ]
    faults = fp8_faults(fp8, model, sizes)
    if model.latent is not None and fp8.engine == "transformer_engine":
        faults.append(
            "engine ('transformer_engine') must be 'torch' for fp8 with latent attention: the layers of "
            "that engine have none"
        )
    if model.moe is not None:
        faults += expert_engine_faults(fp8)
    if isinstance(model, LlavaConfig):
        faults += [f"vision: {fault}" for fault in tile_faults(fp8, model.vision, sizes)]
    return faults


def _tp_overlap(facts: Facts) -> list[str]:
    sizes, num_chunks, fuses = facts.sizes, facts.kernels.num_tp_overlap_chunks, facts.kernels.symmetric_memory
    if num_chunks == 1 and not fuses:
        return []
    name, value = ("symmetric_memory", True) if fuses else ("num_tp_overlap_chunks", num_chunks)
    option, faults = f"{name} ({value}) of KernelConfig", []
    if sizes.tp == 1 or not sizes.sequence_parallel:
        faults.append(
            f"{option} hides gathers and scatters of tokens, of which there are none with tensor_model_parallel_size "
            f"({sizes.tp}) and sequence_parallel ({sizes.sequence_parallel}); set sequence_parallel and a "
            "tensor_model_parallel_size of 2 or more, or leave it out"
        )
    if facts.kernels.compile_layers:
        faults.append(
            f"{option} computes while tokens are sent, and collectives in layers that are compiled wait at once; leave "
            f"compile_layers or {name} out"
        )
    if facts.fp8 is not None and fuses:
        faults.append(f"{option} multiplies without float8; leave it or fp8 out, or use num_tp_overlap_chunks")
    elif facts.fp8 is not None and facts.fp8.engine == "transformer_engine":
        faults.append(
            f"{option} is for this package's linears, and with fp8 engine ('transformer_engine') those of Transformer "
            "Engine run; use engine='torch', or leave num_tp_overlap_chunks out"
        )
    return faults


def _kernels(facts: Facts) -> list[str]:
    if not facts.kernels.compile_layers:
        return []
    faults, schedule = [], facts.schedule
    if facts.fp8 is not None:
        faults.append(
            "compile_layers of KernelConfig and fp8 do not go together: casts to float8 would break the graph of every "
            "layer at each of its linears; leave one of them out"
        )
    if schedule is not None and schedule.is_overlapped:
        faults.append(
            "overlap_expert_exchange runs a forward beside a backward, and compile_layers of KernelConfig may compile "
            "in that forward, where autograd would wait for the backward for ever; leave one of them out"
        )
    if schedule is None or schedule.pp < 2 or schedule_faults(schedule):
        return faults
    if spec_of(schedule.name).splits_backward:
        faults.append(
            f"schedule ({schedule.name!r}) puts off weight gradients, and a layer that is compiled computes them with "
            "the others; use another schedule, such as '1f1b' or 'interleaved', or leave compile_layers out"
        )
    return faults


def _offload(facts: Facts) -> list[str]:
    if not facts.recompute.offload:
        return []
    faults = []
    if facts.kernels.compile_layers:
        faults.append(
            "recompute offload (True) moves what autograd saves, and compile_layers of KernelConfig has a compiler "
            "save it; leave one of them out"
        )
    if facts.fp8 is not None and facts.fp8.engine == "transformer_engine":
        faults.append(
            "recompute offload (True) moves what torch saves, and the fp8 engine 'transformer_engine' has its own way; "
            "use the engine 'torch', or leave offload out"
        )
    return faults


def _shard_size(facts: Facts) -> list[str]:
    size, sizes = facts.optimizer.shard_size, facts.sizes
    if not size or sizes.faults():
        return []
    found = {"data-parallel x context-parallel size": sizes.dp * sizes.cp, "expert data-parallel size": sizes.edp}
    return [
        f"shard_size ({size}) must divide the {name} ({number}) where that is larger; use {_divisors(number)}"
        for name, number in found.items()
        if number > size and number % size
    ]


def _divisors(number: int) -> str:
    return ", ".join(str(one) for one in range(2, number) if number % one == 0) or "0 for all ranks"


def _sharded_parameters(facts: Facts) -> list[str]:
    if not facts.optimizer.shards_parameters:
        return []
    option, faults = f"optimizer kind ({facts.optimizer.kind!r})", []
    if facts.fp8 is not None and facts.fp8.engine == "transformer_engine":
        faults.append(
            f"{option} frees the weights of a layer after each use, and Transformer Engine holds them cast to float8 "
            "through a step; use kind \"distributed_gradients\", or Fp8Config(engine='torch')"
        )
    return faults


_RULES: tuple[Callable[[Facts], list[str]], ...] = (
    _sizes,
    _microbatches,
    _layout,
    _experts,
    _stages,
    _schedule,
    _joint,
    _batch,
    _growing_batch,
    _sequence,
    _context,
    _dynamic_context,
    _fp8,
    _tp_overlap,
    _kernels,
    _offload,
    _shard_size,
    _sharded_parameters,
)

"""What the certificate covers: models, layouts, and data that tries to break them.

The data has uneven loss masks, microbatches and a whole replica without a valid token, a sequence that sequence
parallelism must pad, and a vocabulary that tensor parallelism does not divide.
"""

import os
from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_megatron.context.balance import CostModel, DynamicContextConfig
from lightning_megatron.context.config import ContextConfig
from lightning_megatron.models import BertConfig, GPTConfig, LlavaConfig, T5Config, VisionConfig
from lightning_megatron.moe.capacity import ExpertCapacity
from lightning_megatron.moe.config import AuxLoss, MoEConfig, RouterConfig
from lightning_megatron.optim.config import OptimizerKind
from lightning_megatron.pipeline.ragged import Ragged
from lightning_megatron.pipeline.registry import ScheduleName
from lightning_megatron.precision.kernels import KernelConfig
from lightning_megatron.transformer.recompute import RecomputeConfig
from lightning_megatron.transformer.rotary import RopeScaling
from tests.harness.sample import WHOLE, pairs_of, sampled

NUM_STEPS = 3
BATCH = 24  # divides by every data-parallel size times number of microbatches below
SEQUENCE = 7  # 6 rows of 7 tokens do not divide by 4, nor 3 by 2: sequence parallelism pads
TOLERANCE = {"64-true": 1e-10, "32-true": 1e-5}

_SMALL: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_sequence_length": 16,
    # Larger than usual: with 0.02 a tiny model's gradients are so small that a wrong one would pass for rounding.
    "init_std": 0.1,
}
# No row cuts models with experts, or other ones than GPTs, into more than four stages.
_SHALLOW = _SMALL | {"num_layers": 4}

VARIANTS: dict[str, Any] = {
    "gpt2": GPTConfig(**_SMALL, vocab_size=128, activation="gelu_tanh"),
    "llama": GPTConfig(
        **_SMALL,
        vocab_size=128,
        num_query_groups=2,
        ffn_hidden_size=48,
        activation="swiglu",
        normalization="rmsnorm",
        position="rotary",
        add_bias_linear=False,
        tie_embeddings=False,
    ),
    "vocabulary-131": GPTConfig(**_SMALL, vocab_size=131, label_smoothing=0.1),
    "dropout": GPTConfig(**_SMALL, vocab_size=128, hidden_dropout=0.1, attention_dropout=0.1),
    "qwen-mistral": GPTConfig(
        **_SMALL,
        vocab_size=131,
        num_query_groups=2,
        head_dim=12,
        ffn_hidden_size=48,
        activation="swiglu",
        normalization="rmsnorm",
        position="rotary",
        rope_scaling=RopeScaling(kind="linear", factor=2.0),
        qk_norm=True,
        sliding_window=3,
        full_attention_layers=(1,),
        add_bias_linear=False,
        tie_embeddings=False,
    ),
    "packed": GPTConfig(
        **_SMALL,
        vocab_size=128,
        num_query_groups=2,
        activation="swiglu",
        normalization="rmsnorm",
        position="rotary",
        hidden_dropout=0.1,
        attention_dropout=0.1,
    ),
    # Coefficients and rates are far above the usual ones: what they do must stand out.
    "moe": GPTConfig(
        **_SHALLOW,
        vocab_size=128,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        moe=MoEConfig(
            router=RouterConfig(
                num_experts=8,
                aux_losses=(AuxLoss(coefficient=0.3), AuxLoss(scope="global", coefficient=0.2)),
                z_loss=0.1,
                bias_update_rate=2.0**-6,
            ),
            ffn_hidden_size=24,
            layer_freq=2,
            shared_expert_intermediate_size=16,
            shared_expert_gate=True,
        ),
    ),
    "moe top-1": GPTConfig(
        **_SHALLOW,
        vocab_size=128,
        num_query_groups=2,
        ffn_hidden_size=48,
        activation="swiglu",
        normalization="rmsnorm",
        # Not rotary: rows that begin with a token twice would have two equal weights, and rounding would drop one.
        position="learned",
        add_bias_linear=False,
        tie_embeddings=False,
        moe=MoEConfig(
            router=RouterConfig(
                num_experts=4, top_k=1, norm_topk_prob=False, aux_losses=(AuxLoss(coefficient=0.3),), z_loss=0.1
            ),
            layers=(1, 2, 3),
            capacity=ExpertCapacity(factor=1.0, pad_to_capacity=True),
            dispatcher="all_gather",
        ),
    ),
    "moe packed": GPTConfig(
        **_SHALLOW,
        vocab_size=128,
        num_query_groups=2,
        activation="swiglu",
        normalization="rmsnorm",
        position="rotary",
        hidden_dropout=0.1,
        attention_dropout=0.1,
        moe=MoEConfig(
            router=RouterConfig(
                num_experts=8,
                top_k=4,
                score_function="sigmoid",
                topk_scaling_factor=1.5,
                num_groups=4,
                group_topk=2,
                aux_losses=(AuxLoss(coefficient=0.3), AuxLoss(scope="global", coefficient=0.2)),
                bias_update_rate=2.0**-5,
                jitter=0.1,
            ),
            ffn_hidden_size=24,
            layers=(0, 3),
            shared_expert_intermediate_size=16,
            capacity=ExpertCapacity(factor=0.75, drop_policy="position"),
        ),
    ),
}
VARIANTS["bert"] = BertConfig(**_SHALLOW, vocab_size=131, hidden_dropout=0.1, attention_dropout=0.1)
# Encoders: padded rows, one of them empty, with and without a target of sentence order.
VARIANTS["bert pre-norm"] = BertConfig(
    **_SHALLOW,
    vocab_size=131,
    num_query_groups=2,
    activation="gelu_tanh",
    label_smoothing=0.1,
    norm_placement="pre",
    embedding_norm=False,
    tie_embeddings=False,
)
BERTS = ("bert", "bert pre-norm")
_SMALL_T5: dict[str, Any] = {
    **_SMALL,
    "head_dim": 6,
    "ffn_hidden_size": 48,
    "vocab_size": 131,
    "max_sequence_length": 10,
    "max_decoder_sequence_length": 7,
    "relative_buckets": 8,
    "relative_max_distance": 6,
}
VARIANTS["t5"] = T5Config(**(_SMALL_T5 | {"num_layers": 2}), hidden_dropout=0.1, attention_dropout=0.1, ffn_dropout=0.1)
VARIANTS["t5 v1.1 packed"] = T5Config(
    **(_SMALL_T5 | {"num_layers": 1}),
    num_decoder_layers=3,
    activation="geglu_tanh",
    tie_embeddings=False,
    scales_head=False,
    hidden_dropout=0.1,
)
# Encoders with decoders: rows that are padded in either, or hold several documents.
T5S = ("t5", "t5 v1.1 packed")
_TOWER = VisionConfig(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    image_size=4,
    patch_size=2,
    init_std=0.2,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
VARIANTS["llava"] = LlavaConfig.of(
    replace(VARIANTS["llama"], num_layers=4, vocab_size=131, hidden_dropout=0.1), vision=_TOWER, image_token=130
)
VARIANTS["llava frozen tower"] = replace(VARIANTS["llava"], vision=replace(_TOWER, attention_dropout=0.0))
VARIANTS["llava projector alone"] = VARIANTS["llava frozen tower"]
# Parts that are not trained.
FROZEN = {"llava frozen tower": ("vision",), "llava projector alone": ("vision", "language")}
# Variants that see: rows with none, one and two images, a microbatch without any, and a dp rank without any.
IMAGES = ("llava", *FROZEN)
# Variants whose rows hold several documents each, and padding.
PACKED = ("packed", "moe packed")
# Variants with experts.
EXPERTS = tuple(variant for variant, config in VARIANTS.items() if config.moe is not None)
# Experts whose bias is so low from the start that no token of the global batch goes to them; of the first all that a
# rank of ep4 has.
SHUNNED = {"moe": (6, 7), "moe, 16 bits": (0, 3)}
# Variants whose float32 adds nothing to that of the others.
IN_FLOAT64_ALONE = (
    *("qwen-mistral", "packed", "moe top-1", "moe packed", "bert pre-norm", "t5 v1.1 packed"),
    *FROZEN,
)


_KERNELS = KernelConfig()
_NOTHING = RecomputeConfig()
_RING = ContextConfig()
_GATHER = ContextConfig(comm_type="all_gather")
_HEADS = ContextConfig(comm_type="all_to_all")
_BOTH = ContextConfig(comm_type="hierarchical", ulysses_size=2)
_COST = CostModel(seconds_per_token=1.0, seconds_per_square=0.4, seconds_per_sent_token=0.1)
# Room for so few tokens that two ranks, or four, must share the longest documents.
_DYNAMIC = DynamicContextConfig(max_tokens_per_rank=6, cost=_COST)
_DYNAMIC_4 = DynamicContextConfig(max_tokens_per_rank=3, cost=_COST)
_OFFLOAD = RecomputeConfig(offload=True)
_SELECTIVE = RecomputeConfig(granularity="selective", parts=("core_attention", "norm", "activation"))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many processes, how they are cut, and the Trainer's arguments."""

    world: int
    tp: int = 1
    pp: int = 1
    sp: bool = False
    microbatches: int = 1
    accumulate: int = 1
    clip: float | None = None
    collective: bool = False
    vp: int = 1
    schedule: Literal["auto"] | ScheduleName = "auto"
    distributed: bool = False
    """The optimizer."""
    sharded: bool = False
    """Gradients between backwards."""
    params: Literal["whole", "gathered", "kept"] = "whole"
    """Between their uses: all, or shards that are gathered for each use, or once a step."""
    shard_size: int = 0
    """Ranks over which is sharded; the others hold copies."""
    offload: bool = False
    """Of what the optimizer steps, to host memory."""
    overlap: bool = False
    """Of gradient sums with backward, and of weights with forward where the optimizer is distributed."""
    rule: Literal["sgd", "adamw", "adamw, 16 bits", "muon"] = "sgd"
    recompute: RecomputeConfig = _NOTHING
    cp: int = 1
    ep: int = 1
    etp: int = 1
    joint: bool = False
    """A forward overlaps a backward."""
    context: ContextConfig = _RING
    dynamic: DynamicContextConfig | None = None
    """Context parallelism: plans every step."""
    num_steps: int = NUM_STEPS
    kernels: KernelConfig = _KERNELS

    @property
    def optimizer_kind(self) -> OptimizerKind:
        """What data-parallel ranks hold shards of."""
        if self.params != "whole":
            return "distributed_parameters"
        return "distributed_gradients" if self.sharded else "distributed" if self.distributed else "replicated"

    @property
    def num_stages(self) -> int:
        return self.pp * self.vp

    @property
    def num_batches(self) -> int:
        return self.num_steps * self.accumulate

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp * self.cp)


ONE_DEVICE = Layout(world=1)
LAYOUTS = {
    "one": ONE_DEVICE,
    "one m3": Layout(world=1, microbatches=3),
    "tp2": Layout(world=2, tp=2),
    "tp2+sp": Layout(world=2, tp=2, sp=True),
    "tp4+sp": Layout(world=4, tp=4, sp=True, microbatches=4),
    "pp2": Layout(world=2, pp=2, microbatches=2),
    "pp2 collective": Layout(world=2, pp=2, microbatches=3, collective=True),
    "pp4 m4": Layout(world=4, pp=4, microbatches=4),
    "pp4 m6": Layout(world=4, pp=4, microbatches=6),
    "dp2": Layout(world=2),
    "dp3": Layout(world=3, microbatches=2),
    "tp2 pp2": Layout(world=4, tp=2, pp=2, microbatches=3),
    "tp2 pp2 dp2": Layout(world=8, tp=2, pp=2, microbatches=2),
    "tp2+sp pp2 dp2": Layout(world=8, tp=2, sp=True, pp=2, microbatches=3),
    "accumulate 2": Layout(world=4, tp=2, pp=2, microbatches=2, accumulate=2),
    "accumulate 2, dp2": Layout(world=2, accumulate=2),
    "clip 0.05": Layout(world=4, tp=2, sp=True, pp=2, microbatches=3, clip=0.05),
    "clip 0.05, dp2": Layout(world=2, clip=0.05, microbatches=2),
    "vp2 pp2": Layout(world=2, pp=2, vp=2, microbatches=4),
    "vp2 pp2 tp2 dp2": Layout(world=8, tp=2, pp=2, vp=2, microbatches=3),
    "vp3 pp2": Layout(world=2, pp=2, vp=3, microbatches=3),
    "vp3 pp2 tp2+sp dp2": Layout(world=8, tp=2, sp=True, pp=2, vp=3, microbatches=4),
    "vp2 pp4 m4": Layout(world=4, pp=4, vp=2, microbatches=4),
    "vp2 pp4 m4 tp2+sp": Layout(world=8, tp=2, sp=True, pp=4, vp=2, microbatches=4),
    "vp2 pp4 m4 dp2": Layout(world=8, pp=4, vp=2, microbatches=4),
    "vp2 pp4 m8": Layout(world=4, pp=4, vp=2, microbatches=8),
    "vp2 pp4 m8 tp2": Layout(world=8, tp=2, pp=4, vp=2, microbatches=8),
    "vp2 pp4 m6 dp2": Layout(world=8, pp=4, vp=2, microbatches=6),
    "vp2 pp4 m12 dp2": Layout(world=8, pp=4, vp=2, microbatches=12),
    "ZB-H1 pp2": Layout(world=2, pp=2, microbatches=4, schedule="zb_h1"),
    "ZB-H1 pp2 tp2+sp dp2": Layout(world=8, tp=2, sp=True, pp=2, microbatches=4, schedule="zb_h1"),
    "ZB-H1 pp4": Layout(world=4, pp=4, microbatches=6, schedule="zb_h1"),
    "ZB-H1 pp4 tp2": Layout(world=8, tp=2, pp=4, microbatches=6, schedule="zb_h1"),
    "ZB-H1 pp4 dp2": Layout(world=8, pp=4, microbatches=6, schedule="zb_h1"),
    "ZB-V pp2": Layout(world=2, pp=2, vp=2, microbatches=4, schedule="zb_v"),
    "ZB-V pp2 tp2+sp dp2": Layout(world=8, tp=2, sp=True, pp=2, vp=2, microbatches=4, schedule="zb_v"),
    "ZB-V pp4": Layout(world=4, pp=4, vp=2, microbatches=8, schedule="zb_v"),
    "ZB-V pp4 tp2": Layout(world=8, tp=2, pp=4, vp=2, microbatches=6, schedule="zb_v"),
    "ZB-V pp4 dp2": Layout(world=8, pp=4, vp=2, microbatches=6, schedule="zb_v"),
    "DualPipeV pp2": Layout(world=2, pp=2, vp=2, microbatches=4, schedule="dualpipe_v"),
    "DualPipeV pp2 tp2+sp dp2": Layout(world=8, tp=2, sp=True, pp=2, vp=2, microbatches=4, schedule="dualpipe_v"),
    "DualPipeV pp2 dp2": Layout(world=4, pp=2, vp=2, microbatches=6, schedule="dualpipe_v"),
    "GPipe vp2 pp2": Layout(world=2, pp=2, vp=2, microbatches=3, schedule="gpipe"),
    "recompute full": Layout(world=1, microbatches=2, recompute=RecomputeConfig(granularity="full", num_layers=3)),
    "recompute full, tp2 pp2": Layout(
        world=4,
        tp=2,
        pp=2,
        microbatches=3,
        recompute=RecomputeConfig(granularity="full", method="block", num_layers=2, shard_saved_inputs=True),
    ),
    "recompute selective, tp2+sp pp2 vp2": Layout(
        world=4, tp=2, sp=True, pp=2, vp=2, microbatches=4, recompute=_SELECTIVE
    ),
    "recompute selective, ZB-H1 pp2 dp2": Layout(
        world=4, pp=2, microbatches=3, schedule="zb_h1", distributed=True, overlap=True, recompute=_SELECTIVE
    ),
    "dp4": Layout(world=4, microbatches=2),
    "dp2 tp2": Layout(world=4, tp=2, microbatches=2),
    "dp2 pp2 vp2": Layout(world=4, pp=2, vp=2, microbatches=3),
    "dp2 AdamW": Layout(world=2, rule="adamw"),
    "dp4 AdamW": Layout(world=4, microbatches=2, rule="adamw"),
    "dp2 tp2 AdamW overlap": Layout(world=4, tp=2, microbatches=2, overlap=True, rule="adamw"),
    "dp2 pp2 vp2 AdamW overlap": Layout(world=4, pp=2, vp=2, microbatches=3, overlap=True, rule="adamw"),
    "dp2 overlap": Layout(world=2, microbatches=2, overlap=True),
    "ZeRO dp2": Layout(world=2, distributed=True),
    "ZeRO dp2 AdamW overlap": Layout(world=2, microbatches=2, distributed=True, overlap=True, rule="adamw"),
    "ZeRO dp4 overlap": Layout(world=4, microbatches=3, distributed=True, overlap=True),
    "ZeRO dp4 AdamW clip 0.05": Layout(world=4, distributed=True, rule="adamw", clip=0.05),
    "ZeRO dp2 tp2+sp AdamW": Layout(world=4, tp=2, sp=True, microbatches=2, distributed=True, rule="adamw"),
    "ZeRO dp2 tp2 overlap": Layout(world=4, tp=2, microbatches=2, distributed=True, overlap=True),
    "ZeRO dp2 pp2 vp2 overlap": Layout(world=4, pp=2, vp=2, microbatches=4, distributed=True, overlap=True),
    "ZeRO dp2 pp2 vp2 AdamW": Layout(world=4, pp=2, vp=2, microbatches=3, distributed=True, rule="adamw"),
    "ZeRO dp2 tp2 ZB-H1 pp2 overlap": Layout(
        world=8, tp=2, pp=2, microbatches=3, schedule="zb_h1", distributed=True, overlap=True
    ),
    "ZeRO dp2 ZB-V pp2 overlap": Layout(
        world=4, pp=2, vp=2, microbatches=4, schedule="zb_v", distributed=True, overlap=True
    ),
    "ZeRO-2 dp4 AdamW clip 0.05": Layout(world=4, microbatches=2, sharded=True, rule="adamw", clip=0.05),
    "ZeRO-2 dp2 tp2+sp": Layout(world=4, tp=2, sp=True, microbatches=2, sharded=True, overlap=True),
    "ZeRO-2 dp2 pp2 vp2": Layout(world=4, pp=2, vp=2, microbatches=4, sharded=True, rule="adamw"),
    "ZeRO-2 dp2 ZB-H1 pp2 overlap": Layout(world=4, pp=2, microbatches=3, schedule="zb_h1", sharded=True, overlap=True),
    "ZeRO-2 dp2 accumulate 2": Layout(world=2, microbatches=2, accumulate=2, sharded=True),
    "ZeRO-2 dp3": Layout(world=3, microbatches=2, sharded=True),
    "ZeRO-2 dp2 ZB-V pp2 AdamW": Layout(
        world=4, pp=2, vp=2, microbatches=4, schedule="zb_v", sharded=True, overlap=True, rule="adamw"
    ),
    "ZeRO-2 cp2 dp2 clip 0.05": Layout(world=4, cp=2, microbatches=2, sharded=True, clip=0.05),
    "ZeRO hybrid dp4 AdamW overlap": Layout(
        world=4, microbatches=2, distributed=True, shard_size=2, overlap=True, rule="adamw"
    ),
    "ZeRO hybrid cp2 dp2": Layout(world=4, cp=2, distributed=True, shard_size=2, clip=0.05),
    "ZeRO-2 hybrid dp4 accumulate 2": Layout(world=4, accumulate=2, sharded=True, shard_size=2),
    "ZeRO-2 hybrid dp4 offload": Layout(
        world=4, microbatches=2, sharded=True, shard_size=2, offload=True, rule="adamw"
    ),
    "ZeRO-3 hybrid cp2 dp2 AdamW": Layout(world=4, cp=2, params="gathered", shard_size=2, rule="adamw"),
    "ZeRO-3 hybrid dp4 pp2": Layout(world=8, pp=2, microbatches=2, params="gathered", shard_size=2),
    "ZeRO-3 hybrid dp4 tp2+sp kept": Layout(world=8, tp=2, sp=True, microbatches=2, params="kept", shard_size=2),
    "Muon ZeRO hybrid dp4": Layout(world=4, microbatches=2, distributed=True, shard_size=2, rule="muon"),
    "ZeRO-3 dp4 AdamW clip 0.05": Layout(world=4, microbatches=2, params="gathered", rule="adamw", clip=0.05),
    "ZeRO-3 dp2 tp2+sp": Layout(world=4, tp=2, sp=True, microbatches=2, params="gathered", overlap=True),
    "ZeRO-3 dp2 pp2 vp2": Layout(world=4, pp=2, vp=2, microbatches=4, params="gathered", rule="adamw"),
    "ZeRO-3 dp2 pp2 vp2 kept": Layout(world=4, pp=2, vp=2, microbatches=4, params="kept", rule="adamw"),
    "ZeRO-3 dp2 ZB-H1 pp2 overlap": Layout(
        world=4, pp=2, microbatches=3, schedule="zb_h1", params="gathered", overlap=True
    ),
    "ZeRO-3 dp2 ZB-V pp2": Layout(world=4, pp=2, vp=2, microbatches=4, schedule="zb_v", params="gathered"),
    "ZeRO-3 dp2 pp2 collective": Layout(world=4, pp=2, microbatches=2, collective=True, params="gathered"),
    "ZeRO-3 dp2 accumulate 2": Layout(world=2, microbatches=2, accumulate=2, params="gathered"),
    "ZeRO-3 hybrid dp4 clip 0.05": Layout(world=4, microbatches=2, params="gathered", shard_size=2, clip=0.05),
    "ZeRO-3 dp2 recompute full": Layout(
        world=2,
        microbatches=2,
        params="gathered",
        recompute=RecomputeConfig(granularity="full", num_layers=2),
    ),
    "ZeRO dp2 accumulate 2": Layout(world=2, microbatches=2, accumulate=2, distributed=True, overlap=True),
    "offload": Layout(world=1, microbatches=3, offload=True, rule="adamw"),
    "offload tp2+sp pp2": Layout(world=4, tp=2, sp=True, pp=2, microbatches=3, offload=True),
    "offload dp2 clip 0.05": Layout(world=2, microbatches=2, offload=True, rule="adamw", clip=0.05),
    "offload cp2 pp2 vp2": Layout(world=4, cp=2, pp=2, vp=2, microbatches=4, offload=True),
    "offload ZeRO dp2 tp2 overlap": Layout(
        world=4, tp=2, microbatches=2, distributed=True, overlap=True, offload=True, rule="adamw"
    ),
    "offload ZeRO dp2 accumulate 2": Layout(world=2, accumulate=2, distributed=True, offload=True),
    "offload ZeRO-2 dp2 ZB-H1 pp2": Layout(
        world=4, pp=2, microbatches=3, schedule="zb_h1", sharded=True, overlap=True, offload=True
    ),
    "offload ZeRO-3 dp2 pp2 vp2": Layout(
        world=4, pp=2, vp=2, microbatches=4, params="gathered", offload=True, rule="adamw"
    ),
    "offload ZeRO-3 hybrid dp4 clip 0.05": Layout(
        world=4, microbatches=2, params="kept", shard_size=2, offload=True, clip=0.05
    ),
    "activations offloaded": Layout(world=1, microbatches=3, recompute=_OFFLOAD),
    "activations offloaded, tp2+sp": Layout(world=2, tp=2, sp=True, microbatches=2, recompute=_OFFLOAD),
    "activations offloaded, cp2": Layout(world=2, cp=2, recompute=_OFFLOAD),
    "activations offloaded, pp2 vp2": Layout(world=2, pp=2, vp=2, microbatches=4, recompute=_OFFLOAD),
    "activations offloaded, pp2 collective": Layout(world=2, pp=2, microbatches=3, collective=True, recompute=_OFFLOAD),
    "activations offloaded, ZB-V pp2 tp2": Layout(
        world=4, tp=2, pp=2, vp=2, microbatches=4, schedule="zb_v", recompute=_OFFLOAD
    ),
    "activations offloaded, ZeRO-3 dp2": Layout(world=2, microbatches=2, params="gathered", recompute=_OFFLOAD),
    "activations offloaded, full, ZeRO-3 dp2 ZB-H1 pp2": Layout(
        world=4,
        pp=2,
        microbatches=3,
        schedule="zb_h1",
        params="gathered",
        offload=True,
        recompute=RecomputeConfig(granularity="full", offload=True),
    ),
    "activations offloaded, selective, dp2": Layout(
        world=2,
        accumulate=2,
        offload=True,
        recompute=RecomputeConfig(granularity="selective", parts=("core_attention", "mlp"), offload=True),
    ),
    "Muon": Layout(world=1, rule="muon"),
    "Muon tp2": Layout(world=2, tp=2, rule="muon"),
    "Muon pp2 vp2": Layout(world=2, pp=2, vp=2, microbatches=3, rule="muon"),
    "Muon cp2 dp2 clip 0.05": Layout(world=4, cp=2, rule="muon", clip=0.05),
    "Muon ZeRO dp2 tp2+sp overlap": Layout(
        world=4, tp=2, sp=True, microbatches=2, distributed=True, overlap=True, rule="muon"
    ),
    "Muon ZeRO dp2 ZB-H1 pp2": Layout(
        world=4, pp=2, microbatches=3, schedule="zb_h1", distributed=True, overlap=True, rule="muon"
    ),
    "Muon ZeRO-3 dp2 tp2+sp": Layout(world=4, tp=2, sp=True, microbatches=2, params="gathered", rule="muon"),
    "Muon tp4 accumulate 2": Layout(world=4, tp=4, accumulate=2, rule="muon"),
    "cp2": Layout(world=2, cp=2),
    "cp2 all-gather": Layout(world=2, cp=2, context=_GATHER, microbatches=2),
    "cp2 all-to-all": Layout(world=2, cp=2, context=_HEADS, microbatches=2),
    "cp4": Layout(world=4, cp=4, microbatches=3),
    "cp4 all-gather": Layout(world=4, cp=4, context=_GATHER),
    "cp4 all-to-all": Layout(world=4, cp=4, context=_HEADS),
    "cp4 hierarchical": Layout(world=4, cp=4, context=_BOTH),
    "cp2 tp2": Layout(world=4, cp=2, tp=2),
    "cp2 tp2+sp all-to-all": Layout(world=4, cp=2, tp=2, sp=True, context=_HEADS, microbatches=2),
    "cp2 dp2": Layout(world=4, cp=2, microbatches=2),
    "cp2 dp2 all-gather accumulate 2": Layout(world=4, cp=2, context=_GATHER, microbatches=2, accumulate=2),
    "ZeRO cp2 dp2 AdamW overlap": Layout(
        world=4, cp=2, microbatches=2, distributed=True, overlap=True, rule="adamw", clip=0.05
    ),
    "cp2 pp2": Layout(world=4, cp=2, pp=2, microbatches=3),
    "cp2 pp2 collective": Layout(world=4, cp=2, pp=2, microbatches=2, collective=True),
    "cp2 pp2 vp2 tp2+sp": Layout(world=8, cp=2, pp=2, vp=2, tp=2, sp=True, microbatches=4),
    "cp2 ZB-V pp2 dp2": Layout(world=8, cp=2, pp=2, vp=2, microbatches=4, schedule="zb_v"),
    "recompute full, cp2 pp2": Layout(
        world=4, cp=2, pp=2, microbatches=3, recompute=RecomputeConfig(granularity="full", num_layers=2)
    ),
    "recompute selective, cp2 tp2+sp": Layout(world=4, cp=2, tp=2, sp=True, recompute=_SELECTIVE),
    "dynamic dp4 clip 0.05": Layout(world=4, dynamic=_DYNAMIC_4, clip=0.05),
    "dynamic dp2 cp2 accumulate 2": Layout(world=4, cp=2, dynamic=_DYNAMIC, accumulate=2),
    "dynamic dp2 cp2 all-to-all": Layout(world=4, cp=2, dynamic=_DYNAMIC_4, context=_HEADS),
    "dynamic dp2 pp2": Layout(world=4, pp=2, dynamic=_DYNAMIC),
    "dynamic dp2 pp2 ZB-H1": Layout(world=4, pp=2, dynamic=_DYNAMIC, schedule="zb_h1"),
    "dynamic dp2 cp2 pp2 vp2": Layout(world=8, cp=2, pp=2, vp=2, dynamic=_DYNAMIC, context=_GATHER),
    "dynamic dp2 cp2 pp2 ZB-V": Layout(world=8, cp=2, pp=2, vp=2, dynamic=_DYNAMIC, schedule="zb_v"),
    "dynamic ZeRO dp2 tp2+sp": Layout(
        world=4, tp=2, sp=True, dynamic=_DYNAMIC, distributed=True, overlap=True, rule="adamw"
    ),
    "dynamic dp2 recompute selective": Layout(world=2, dynamic=_DYNAMIC, recompute=_SELECTIVE),
    "ep2": Layout(world=2, ep=2),
    "ep4": Layout(world=4, ep=4, microbatches=2),
    "ep2 etp2": Layout(world=4, ep=2, etp=2, microbatches=3),
    "tp2 etp2": Layout(world=2, tp=2, etp=2),
    "tp2+sp ep2": Layout(world=2, tp=2, sp=True, ep=2, microbatches=2),
    "tp2+sp dp2 ep2 etp2": Layout(world=4, tp=2, sp=True, ep=2, etp=2, microbatches=2),
    "tp2+sp cp2 ep4": Layout(world=4, tp=2, sp=True, cp=2, ep=4),
    "cp2 ep2": Layout(world=2, cp=2, ep=2),
    "dp4 ep2 clip 0.05": Layout(world=4, ep=2, clip=0.05),
    "ZeRO dp4 ep4 AdamW overlap": Layout(world=4, ep=4, microbatches=3, distributed=True, overlap=True, rule="adamw"),
    "ZeRO dp4 ep2 overlap": Layout(world=4, ep=2, microbatches=2, distributed=True, overlap=True),
    "Muon ep2 etp2": Layout(world=4, ep=2, etp=2, microbatches=3, rule="muon"),
    "Muon tp2+sp ep2": Layout(world=2, tp=2, sp=True, ep=2, microbatches=2, rule="muon"),
    "ZeRO-2 dp4 ep2": Layout(world=4, ep=2, microbatches=2, sharded=True, overlap=True),
    "ZeRO-3 dp4 ep2": Layout(world=4, ep=2, microbatches=2, params="gathered", overlap=True),
    "ZeRO-3 hybrid dp4 ep2": Layout(world=4, ep=2, microbatches=2, params="gathered", shard_size=2),
    "ZeRO-3 joint DualPipe-V pp2 ep2": Layout(
        world=4, pp=2, vp=2, ep=2, microbatches=4, schedule="dualpipe_v", joint=True, params="gathered", overlap=True
    ),
    "offload ZeRO-3 dp4 ep2": Layout(world=4, ep=2, microbatches=2, params="gathered", offload=True, rule="adamw"),
    "activations offloaded, DualPipeV pp2 ep2 joint": Layout(
        world=4, pp=2, vp=2, ep=2, microbatches=4, schedule="dualpipe_v", joint=True, recompute=_OFFLOAD
    ),
    "Muon ZeRO dp4 ep2 overlap": Layout(world=4, ep=2, microbatches=2, distributed=True, overlap=True, rule="muon"),
    "ep2 accumulate 2": Layout(world=2, ep=2, microbatches=2, accumulate=2),
    "pp2 ep2": Layout(world=4, pp=2, ep=2, microbatches=3),
    "pp2 vp2 ep2": Layout(world=4, pp=2, vp=2, ep=2, microbatches=4),
    "ZB-V pp2 ep2": Layout(world=4, pp=2, vp=2, ep=2, microbatches=4, schedule="zb_v", distributed=True),
    "ZB-H1 pp2 tp2+sp ep4": Layout(world=8, pp=2, tp=2, sp=True, ep=4, microbatches=3, schedule="zb_h1"),
    "cp2 pp2 vp2 tp2+sp ep2 etp2": Layout(world=8, cp=2, pp=2, vp=2, tp=2, sp=True, ep=2, etp=2, microbatches=4),
    "recompute full, pp2 ep2": Layout(
        world=4, pp=2, ep=2, microbatches=3, recompute=RecomputeConfig(granularity="full", num_layers=2)
    ),
    "recompute selective, ep2": Layout(
        world=2, ep=2, microbatches=2, recompute=RecomputeConfig(granularity="selective", parts=("moe", "norm"))
    ),
    "ep2 m3 joint": Layout(world=2, ep=2, microbatches=3, joint=True),
    "pp2 ep2 joint": Layout(world=4, pp=2, ep=2, microbatches=4, joint=True),
    "ZeRO DualPipeV pp2 ep2 joint overlap": Layout(
        world=4, pp=2, vp=2, ep=2, microbatches=4, schedule="dualpipe_v", joint=True, distributed=True, overlap=True
    ),
    "ZeRO pp2 vp2 ep2 joint overlap": Layout(
        world=4, pp=2, vp=2, ep=2, microbatches=4, joint=True, distributed=True, overlap=True
    ),
    "dynamic dp4 ep2": Layout(world=4, ep=2, dynamic=_DYNAMIC_4),
}
# Rows of the table alone: shards of a kind under one more axis or schedule than the sample has.
OF_THE_TABLE = {
    *("ZeRO-2 dp3", "ZeRO-2 dp2 ZB-V pp2 AdamW", "ZeRO-2 cp2 dp2 clip 0.05"),
    *("ZeRO hybrid dp4 AdamW overlap", "ZeRO hybrid cp2 dp2"),
    *("ZeRO-2 hybrid dp4 accumulate 2", "ZeRO-2 hybrid dp4 offload"),
    *("ZeRO-3 hybrid cp2 dp2 AdamW", "ZeRO-3 hybrid dp4 pp2", "ZeRO-3 hybrid dp4 tp2+sp kept"),
    "Muon ZeRO hybrid dp4",
}
# Rows that have BERTs and T5s in addition.
WITH_ENCODERS = (
    *("one", "one m3", "tp2", "tp2+sp", "pp2", "pp2 collective", "pp4 m4", "vp2 pp2", "dp2", "cp2", "cp4 all-gather"),
    *("cp2 tp2+sp all-to-all", "tp2+sp pp2 dp2", "tp2 pp2 dp2", "ZB-V pp2", "ZeRO dp2 AdamW overlap"),
    *("recompute full, cp2 pp2", "Muon", "Muon tp2", "ZeRO-3 dp2 tp2+sp"),
)
# Rows that have models that see in addition.
WITH_IMAGES = (
    *("one", "one m3", "tp2", "tp2+sp", "pp2", "pp2 collective", "pp4 m4", "vp2 pp2", "dp2", "cp2", "cp4"),
    *("tp2+sp pp2 dp2", "tp2 pp2 dp2", "ZeRO dp2 AdamW overlap", "ZB-H1 pp2", "recompute full, cp2 pp2", "Muon"),
    *("Muon tp2", "ZeRO-3 dp2 tp2+sp"),
)
# Rows that have models with experts in addition.
WITH_EXPERTS = ("one", "one m3", "tp2", "tp2+sp", "pp2", "dp2", "cp2", "dynamic dp2 pp2", "Muon")


# In 16 bits: dropout on, an output layer tied over stages, and rates that a scheduler halves after every step.
HALF_VARIANT = "dropout"
HALF_EXPERTS = "moe, 16 bits"
# All models. Of the last one every token goes to the two experts that are not shunned: no rounding changes a choice.
CONFIGS = VARIANTS | {
    HALF_EXPERTS: GPTConfig(
        **_SMALL,
        vocab_size=128,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        moe=MoEConfig(
            router=RouterConfig(num_experts=4, norm_topk_prob=False, z_loss=0.1, bias_update_rate=2.0**-6),
            ffn_hidden_size=24,
            layer_freq=2,
        ),
    )
}


def config_of(variant: str, num_stages: int) -> Any:
    """The configuration of a variant on so many stages; GPTs have four layers, and eight on more than four stages."""
    config = CONFIGS[variant]
    return replace(config, num_layers=4) if isinstance(config, GPTConfig) and num_stages <= 4 else config


RATE_DECAY = 0.5
# By how much of itself a number changes at most where it is rounded to 16 bits.
HALF_ROUNDOFF = {"16-mixed": 2.0**-11, "bf16-mixed": 2.0**-8}
_NUM_LAYERS = _SHALLOW["num_layers"]
HALF_ROUNDINGS = {"one device": 4 * _NUM_LAYERS + 2, "float32": 20 * _NUM_LAYERS + 6}
# Of a value on its way through the model and back. From one device a layout differs in the sums that it cuts, two in a
# layer each way and one at each end; from float32 16 bits differ in all they round, ten in a layer and three at an end.
# Counted from 0: of float16, in which one gradient of one rank becomes infinite.
BAD_STEP = 1
HALF_LAYOUTS = {
    "16 bits, one m3": Layout(world=1, microbatches=3),
    "16 bits, dp2": Layout(world=2),
    "16 bits, ZeRO dp2": Layout(world=2, distributed=True, rule="adamw, 16 bits"),
    "16 bits, tp2+sp": Layout(world=2, tp=2, sp=True, microbatches=2),
    "16 bits, pp2": Layout(world=2, pp=2, microbatches=3, rule="adamw, 16 bits"),
    "16 bits, ZeRO-2 dp2 pp2": Layout(world=4, pp=2, microbatches=2, sharded=True, rule="adamw, 16 bits"),
    "16 bits, ZeRO-3 dp2 pp2": Layout(world=4, pp=2, microbatches=2, params="gathered", rule="adamw, 16 bits"),
    "16 bits, offload ZeRO-3 dp2": Layout(
        world=2, microbatches=2, params="gathered", offload=True, rule="adamw, 16 bits"
    ),
    "16 bits, ZeRO dp2 tp2": Layout(world=4, tp=2, microbatches=2, distributed=True),
    "16 bits, ZeRO dp2 pp2 vp2": Layout(world=4, pp=2, vp=2, microbatches=4, distributed=True, rule="adamw, 16 bits"),
    "16 bits, cp2": Layout(world=2, cp=2, microbatches=2),
    "16 bits, cp2 all-to-all dp2": Layout(world=4, cp=2, context=_HEADS, rule="adamw, 16 bits"),
    "16 bits, dynamic ZeRO dp2": Layout(world=2, distributed=True, dynamic=_DYNAMIC),
    "16 bits, recompute selective, ZeRO dp2 pp2": Layout(
        world=4, pp=2, microbatches=2, distributed=True, recompute=_SELECTIVE
    ),
    "16 bits, ZeRO dp2 ep2": Layout(world=2, ep=2, microbatches=2, distributed=True),
}


def half_variant(layout: Layout) -> str:
    """The model that a layout trains in 16 bits."""
    return HALF_VARIANT if layout.ep == 1 else HALF_EXPERTS


def batches(variant: str, dtype: torch.dtype, num_batches: int) -> list[dict[str, Any]]:
    """The first global batches of a variant."""
    config = CONFIGS[variant]
    if isinstance(config, T5Config):
        return [_of_two_stacks(variant, config, dtype, index) for index in range(num_batches)]
    generator = torch.Generator().manual_seed(20261121)
    made: list[dict[str, Any]] = []
    for index in range(num_batches):
        tokens = torch.randint(0, config.vocab_size, (BATCH, SEQUENCE + 1), generator=generator)
        # Row i keeps a share of its tokens that grows with i: dp ranks and microbatches hold uneven numbers.
        shares = torch.linspace(0.2, 1.0, BATCH).unsqueeze(1)
        mask = (torch.rand(BATCH, SEQUENCE, generator=generator) < shares).to(dtype)
        mask[: BATCH // 4] = 0  # the first microbatch of four and more has no valid token
        if index == 1:
            mask[: BATCH // 2] = 0  # the first of two replicas has none at all
        labels = tokens[:, 1:].clone()
        labels[-1, -1] = -100
        # The largest ids are the ones that padding of the vocabulary could touch.
        labels[-1, 0] = config.vocab_size - 1
        made.append({"tokens": tokens[:, :-1].contiguous(), "labels": labels, "loss_mask": mask})
        if variant in PACKED:
            made[-1]["segments"] = _segments(index)
        if isinstance(config, BertConfig):
            made[-1] |= _of_encoder(index, generator)
        if isinstance(config, LlavaConfig):
            made[-1] |= _with_images(config, made[-1], index, generator)
    return made


def _of_encoder(index: int, generator: torch.Generator) -> dict[str, Tensor]:
    """What a BERT reads besides: rows of 1 to SEQUENCE tokens and one of none, their types, and their order, which one
    in three does not ask for."""
    rows = torch.arange(BATCH)
    lengths = 1 + (rows + index) % SEQUENCE
    lengths[-2] = 0
    return {
        "padding_mask": torch.arange(SEQUENCE) < lengths.unsqueeze(1),
        "token_types": torch.randint(2, (BATCH, SEQUENCE), generator=generator),
        "sentence_order_labels": torch.tensor((-100, 0, 1))[rows % 3],
    }


def _of_two_stacks(variant: str, config: T5Config, dtype: torch.dtype, index: int) -> dict[str, Tensor]:
    """A global batch of a T5. Padded rows have 1 to all of their columns; of packed rows some lack the first document
    of the encoder, or of the decoder. In one row the encoder reads nothing."""
    generator = torch.Generator().manual_seed(20261121 + index)
    width, decoder_width = config.max_sequence_length, config.max_decoder_sequence_length
    rows = torch.arange(BATCH).unsqueeze(1)
    segments = []
    for columns, shift in ((torch.arange(width), 2), (torch.arange(decoder_width), 0)):
        if variant == "t5":
            own = torch.where(columns <= (5 * rows + index + shift) % len(columns), 0, -1)
        else:
            first = 1 + (rows + index + shift) % (len(columns) - 2)
            own = torch.where(columns < first, 0, torch.where(columns < len(columns) - rows % 2, 1, -1))
            own = own.masked_fill((rows % 5 == 1 + shift) & (own == 0), -1)
        segments.append(own)
    segments[0][-2] = -1
    shares = torch.linspace(0.2, 1.0, BATCH).unsqueeze(1)
    mask = (torch.rand(BATCH, decoder_width, generator=generator) < shares).to(dtype)
    mask[: BATCH // 4] = 0  # the first microbatch of four and more has no valid token
    if index == 1:
        mask[: BATCH // 2] = 0  # the first of two replicas has none at all
    read, shown, labels = (
        torch.randint(config.vocab_size, (BATCH, length), generator=generator)
        for length in (width, decoder_width, decoder_width)
    )
    labels[-1, -1] = -100
    labels[-1, 0] = config.vocab_size - 1
    return {
        "encoder_tokens": read,
        "decoder_tokens": shown,
        "labels": labels,
        "loss_mask": mask,
        "encoder_segments": segments[0],
        "decoder_segments": segments[1],
    }


def _with_images(config: LlavaConfig, batch: dict[str, Any], index: int, generator: torch.Generator) -> dict[str, Any]:
    """The batch with image tokens in front of its text and between, and its images."""
    counts = [row % 3 for row in range(BATCH)]
    # The first microbatch of four and more has none, the first of two dp ranks once, and all of them once.
    none = (BATCH // 4, BATCH // 2, BATCH)[index % 3]
    counts[:none] = [0] * none
    length = SEQUENCE + 2 * config.features_per_image
    rows: dict[str, Any] = {}
    for name, padding in (("tokens", 0), ("labels", -100), ("loss_mask", 0.0)):
        rows[name] = torch.full((BATCH, length), padding, dtype=batch[name].dtype)
        rows[name][:, -SEQUENCE:] = batch[name].clamp(max=config.image_token - 1)
    for row, count in enumerate(counts):
        for image in range(count):
            # A token of text lies between the second and the first.
            first = 1 + row % 2 + image * (config.features_per_image + 1)
            rows["tokens"][row, first : first + config.features_per_image] = config.image_token
    # One that is a label by mistake.
    rows["labels"][-2, -2] = config.image_token
    side = config.vision.image_size
    values = torch.randn(sum(counts), 3, side, side, generator=generator, dtype=batch["loss_mask"].dtype)
    return {**rows, "images": Ragged(values, counts)}


def _segments(index: int) -> Tensor:
    """The documents of each row of a batch: of 1 to SEQUENCE tokens, some with padding after, one row of padding."""
    rows = []
    for row in range(BATCH):
        lengths = torch.tensor([1 + (row + index) % SEQUENCE, 1 + row % 3, 1 + row % 2, SEQUENCE])
        segments = torch.arange(len(lengths)).repeat_interleave(lengths)[:SEQUENCE].clone()
        segments[SEQUENCE - row % 3 :] = -1
        rows.append(segments)
    rows[-2] = torch.full((SEQUENCE,), -1)
    return torch.stack(rows)


Cell = tuple[str, str]
"""A variant and a precision."""

CELLS = [
    (variant, precision)
    for variant in VARIANTS
    for precision in TOLERANCE
    if precision == "64-true" or variant not in IN_FLOAT64_ALONE
]


def cells_of(layout: str) -> list[Cell]:
    """The models and precisions that a row of the certificate has.

    Rows of expert parallelism have models with experts alone, and few others have them. Dynamic context parallelism has
    the models whose documents and random draws could get lost on their way.
    """
    own = LAYOUTS[layout]
    if own.ep * own.etp > 1:
        variants = EXPERTS
    elif layout in WITH_EXPERTS:
        variants = tuple(VARIANTS)
    else:
        variants = tuple(variant for variant in VARIANTS if variant not in EXPERTS)
    if layout not in WITH_ENCODERS:
        variants = tuple(variant for variant in variants if variant not in (*BERTS, *T5S))
    if layout not in WITH_IMAGES:
        variants = tuple(variant for variant in variants if variant not in IMAGES)
    if own.dynamic is not None:
        variants = tuple(variant for variant in variants if variant in (HALF_VARIANT, *PACKED))
    # Many ranks take long, and what float32 adds shows on few.
    is_large = own.world > 4
    return [cell for cell in CELLS if cell[0] in variants and not (is_large and cell[1] == "32-true")]


def sampled_cells() -> dict[str, list[Cell]]:
    """The cells that every run of the tests sees, by layout.

    Each two settings that a layout sets meet in one of them, where they meet in the table, and so do each family of
    models and each setting; but rules of optimizers and clipping meet those of `OF_OPTIMIZERS` alone. Each model,
    precision and size comes. Of sizes a pair knows whether they are above 1; numbers of microbatches differ in whether
    there are several and whether stages divide them.
    """
    layouts = [layout for layout in LAYOUTS if layout not in OF_THE_TABLE or WHOLE in os.environ]
    cells = [(layout, cell) for layout in layouts for cell in cells_of(layout)]
    chosen: dict[str, list[Cell]] = {}
    for layout, cell in sampled(cells, _pairs, _cost):
        chosen.setdefault(layout, []).append(cell)
    return chosen


def sampled_half_layouts() -> list[str]:
    """The layouts in 16 bits that every run of the tests sees: each setting and each optimizer comes."""
    return sampled(list(HALF_LAYOUTS), lambda name: [*_settings_of(HALF_LAYOUTS[name]).items()])


# What a step does with gradients that are whole. Their norm, which clipping goes by, is a quantity of each cell.
OF_OPTIMIZERS = {"rule", "clip", "accumulate", "distributed", "overlap", "offload", "dp above 1"}


def _pairs(cell: tuple[str, Cell]) -> list[Hashable]:
    layout, (variant, precision) = LAYOUTS[cell[0]], cell[1]
    settings = _settings_of(layout) | {"family": _family(variant)}
    sizes = {axis: getattr(layout, axis) for axis in AXES}
    # Muon puts whole matrices together of what ranks hold of them.
    reads_parts = layout.rule == "muon"
    # Where a saved tensor waits is nothing to what computed it.
    met_apart = {"clip", "offload", "activations offloaded", *(() if reads_parts else ("rule",))}
    all_but_optimizers = {name: value for name, value in settings.items() if name not in met_apart}
    optimizers = {name: value for name, value in settings.items() if name in OF_OPTIMIZERS}
    met = [*pairs_of(all_but_optimizers), *pairs_of(optimizers)]
    return [*met, *settings.items(), *sizes.items(), variant, precision]


AXES = ("tp", "pp", "cp", "vp", "ep", "etp", "dp")


def _settings_of(layout: Layout) -> dict[str, Hashable]:
    """What a layout sets off its defaults."""
    sizes = {axis: getattr(layout, axis) for axis in AXES}
    settings: dict[str, Hashable] = {f"{axis} above 1": True for axis, size in sizes.items() if size > 1}
    own = {field.name: getattr(layout, field.name) for field in fields(layout)}
    settings |= {
        name: value
        for name, value in own.items()
        if value != getattr(ONE_DEVICE, name) and name not in ("world", "microbatches", "recompute", *sizes)
    }
    if layout.microbatches > 1:
        settings["microbatches"] = "uneven" if layout.microbatches % layout.pp else "even"
    if layout.recompute.granularity != "none":
        settings["recompute"] = layout.recompute.granularity
    if layout.recompute.offload:
        settings["activations offloaded"] = True
    if layout.dynamic is not None:
        settings["dynamic"] = True
    return settings


def _family(variant: str) -> str:
    """What a model has in common with others that settings of a layout could do harm to."""
    families = {"BERT": BERTS, "T5": T5S, "LLaVA": IMAGES, "experts": EXPERTS}
    alone = variant if variant in (HALF_VARIANT, *PACKED) else "dense"
    return next((family for family, variants in families.items() if variant in variants), alone)


def _cost(cell: tuple[str, Cell]) -> float:
    """A cell takes about this long: ranks by microbatches, and what a run costs besides."""
    layout = LAYOUTS[cell[0]]
    # Dynamic context parallelism makes a microbatch of few documents.
    microbatches = BATCH if layout.dynamic else layout.microbatches * layout.accumulate
    return layout.world * (8 + microbatches)

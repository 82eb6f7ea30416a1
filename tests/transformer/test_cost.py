"""The cost formulas agree with what is built, counted and saved for backward."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.models.gpt import gpt_parts
from lightning_megatron.moe.capacity import ExpertCapacity
from lightning_megatron.moe.config import AuxLoss, MoEConfig, RouterConfig
from lightning_megatron.tensor.norm import RMSNorm
from lightning_megatron.transformer import cost
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.latent_config import LatentConfig
from lightning_megatron.transformer.recompute import RecomputeConfig
from tests.transformer.saved_activations import expert_saved_bytes, saved_bytes

GPT3 = GPTConfig(num_layers=96, hidden_size=12288, num_attention_heads=96, max_sequence_length=2048, vocab_size=51200)
GPT_1T = GPTConfig(
    num_layers=128, hidden_size=25600, num_attention_heads=160, max_sequence_length=2048, vocab_size=51200
)
SMALL = GPTConfig(num_layers=3, hidden_size=64, num_attention_heads=8, max_sequence_length=128, vocab_size=131)
LLAMA = replace(
    SMALL,
    num_query_groups=2,
    ffn_hidden_size=96,
    activation="swiglu",
    normalization="rmsnorm",
    add_bias_linear=False,
    position="rotary",
    tie_embeddings=False,
)
LATENT = LatentConfig(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
VARIANTS = {
    "gpt2": SMALL,
    "llama": LLAMA,
    "qkv bias": replace(LLAMA, add_qkv_bias=True, vocab_multiple=16),
    "head norms": replace(LLAMA, qk_norm=True),
    "two more tokens": replace(LLAMA, num_mtp_layers=2),
    "latents": replace(LLAMA, num_query_groups=8, head_dim=12, latent=LATENT),
    # Values of another size are padded in the products that torch counts.
    "latents of one size": replace(LLAMA, num_query_groups=8, head_dim=12, latent=replace(LATENT, v_head_dim=12)),
    "latents, queries of none": replace(LLAMA, num_query_groups=8, head_dim=12, latent=replace(LATENT, q_lora_rank=0)),
    "sinks": replace(LLAMA, attention_sinks=True, attention_softcap=2.0),
    "sandwich": replace(LLAMA, norm_placement="sandwich", normalization="zero_centered_rmsnorm"),
    "outputs and all heads": replace(
        LLAMA, num_query_groups=4, norm_placement="output", qk_norm=True, qk_norm_across_heads=True
    ),
}

SHARED = MoEConfig(
    router=RouterConfig(num_experts=8, top_k=2),
    ffn_hidden_size=48,
    shared_expert_intermediate_size=80,
    shared_expert_gate=True,
    layer_freq=2,
    expert_gemm="sequential",
)
EXPERTS = {
    "dense width": replace(LLAMA, moe=MoEConfig(router=RouterConfig(num_experts=4), expert_gemm="sequential")),
    "shared": replace(LLAMA, moe=SHARED),
    "plain mlp": replace(
        LLAMA, activation="gelu", moe=replace(SHARED, shared_expert_gate=False, layer_freq=1, layers=(1,))
    ),
}
MIXTRAL_8X7B = GPTConfig(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=14336,
    vocab_size=32000,
    activation="swiglu",
    normalization="rmsnorm",
    position="rotary",
    add_bias_linear=False,
    tie_embeddings=False,
    moe=MoEConfig(router=RouterConfig(num_experts=8)),
)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_parameters_by_formula_are_those_that_are_built(variant: str, tp: int) -> None:
    config, sizes = VARIANTS[variant], Sizes(world=tp, tp=tp)
    model = GPTModel(config, mesh=Mesh.imagine(0, sizes), seed=1)

    def num(part: str) -> int:
        return sum(p.numel() for p in model.get_submodule(part).parameters())

    assert num("layers.1") == cost.layer_parameters(config, sizes)
    positions = config.max_sequence_length * config.hidden_size if config.position == "learned" else 0
    assert num("embedding") == cost.vocabulary_parameters(config, sizes) + positions
    assert num("final_norm") == cost.norm_parameters(config)
    assert num("head") == (0 if config.tie_embeddings else cost.vocabulary_parameters(config, sizes))
    if tp == 1 and config.vocab_multiple == 1:
        assert sum(p.numel() for p in model.parameters()) == cost.model_parameters(config)


LAYOUTS_OF_EXPERTS = [
    Sizes(),
    Sizes(world=4, ep=4),
    Sizes(world=4, ep=2, etp=2),
    Sizes(world=4, tp=2),
    Sizes(world=4, tp=4, sequence_parallel=True, ep=2),
]


@pytest.mark.parametrize("variant", EXPERTS)
@pytest.mark.parametrize("sizes", LAYOUTS_OF_EXPERTS, ids=["one", "ep4", "ep2 etp2", "tp2", "tp4 sp ep2"])
def test_parameters_of_layers_of_experts_by_formula_are_those_that_are_built(variant: str, sizes: Sizes) -> None:
    config = EXPERTS[variant]
    model = GPTModel(config, mesh=Mesh.imagine(0, sizes), seed=1)
    for layer in range(config.num_layers):
        built = sum(p.numel() for p in model.get_submodule(f"layers.{layer}").parameters())
        assert built == cost.layer_parameters(config, sizes, layer=layer)
    if sizes.world == 1:
        assert sum(p.numel() for p in model.parameters()) == cost.model_parameters(config)


def test_the_parameters_of_a_token_are_those_that_move_its_logits() -> None:
    # float64 and every router the same: the choice of one token is that of all.
    config = EXPERTS["shared"]
    model = GPTModel(config, seed=1).double()
    model(torch.zeros(1, 1, dtype=torch.long)).sum().backward()
    idle = 0
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            assert parameter.grad is not None
            idle += int((parameter.grad.flatten(1) == 0).all(1).sum()) * parameter[0].numel()
    assert idle > 0
    assert cost.active_parameters(config) == cost.model_parameters(config) - idle
    assert cost.active_parameters(LLAMA) == cost.model_parameters(LLAMA)


def test_mixtral_has_its_published_sizes() -> None:
    assert cost.model_parameters(MIXTRAL_8X7B) == 46_702_792_704  # the released weights, counted
    assert cost.active_parameters(MIXTRAL_8X7B) == pytest.approx(12.9e9, rel=2e-3)  # arXiv 2401.04088, section 3


@pytest.mark.parametrize(("config", "expected"), [(GPT3, 175e9), (GPT_1T, 1.008e12)], ids=["175B", "1T"])
def test_the_known_models_have_their_known_sizes(config: GPTConfig, expected: float) -> None:
    assert cost.model_parameters(config) == pytest.approx(expected, rel=0.01)


def test_flops_are_those_of_the_paper_less_recomputation() -> None:
    layers, hidden, sequence, vocabulary, batch = 128, 25600, 2048, 51200, 3
    paper = (
        96 * batch * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden))
    )
    logits = 6 * batch * sequence * hidden * vocabulary
    expected = (paper - logits) * 3 / 4 + logits
    assert cost.training_flops(GPT_1T, batch=batch, sequence=sequence, is_causal=False) == pytest.approx(expected)
    causal = cost.training_flops(GPT_1T, batch=batch, sequence=sequence)
    attention = 3 * 128 * cost.layer_attention_flops(GPT_1T, batch=batch, sequence=sequence, is_causal=True)
    assert causal == pytest.approx(expected - attention)
    per_token = cost.training_flops(GPT_1T, batch=1, sequence=sequence) / sequence
    assert per_token * batch * sequence == pytest.approx(causal)


@pytest.mark.parametrize("variant", ["gpt2", "llama", "latents of one size", "two more tokens"])
def test_flops_by_formula_are_those_counted(variant: str) -> None:
    # With attention dropout attention is matrix products that torch counts (it knows no count of the CPU's kernel).
    config = replace(VARIANTS[variant], attention_dropout=0.1)
    model = GPTModel(config, seed=1)
    tokens = torch.zeros(2, 128, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens).backward()
    formula = cost.training_flops(config, batch=2, sequence=128, is_causal=False)
    assert counter.get_total_flops() == pytest.approx(formula, rel=0.02)
    assert cost.training_flops(config, batch=2, sequence=128) < 0.95 * formula  # the tolerance tells the two apart


@pytest.mark.parametrize("variant", EXPERTS)
def test_flops_of_experts_by_formula_are_those_counted(variant: str) -> None:
    config = replace(EXPERTS[variant], attention_dropout=0.1)
    model = GPTModel(config, seed=1)
    tokens = torch.zeros(2, 128, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens).backward()
    formula = cost.training_flops(config, batch=2, sequence=128, is_causal=False)
    assert counter.get_total_flops() == formula
    dense = cost.training_flops(replace(config, moe=None), batch=2, sequence=128, is_causal=False)
    assert abs(dense / formula - 1) > 0.02


def test_stages_balanced_by_cost_see_which_layers_have_experts() -> None:
    config = EXPERTS["shared"]
    first, second, third = (part.cost for part in gpt_parts(config, Mesh.single()) if part.symbol == "t")
    assert first == third != second
    # Router, two experts of 48 features, 80 shared ones and their gate instead of 96.
    assert first - second == 2 * 128 * 64 * (8 + 1 + 3 * (2 * 48 + 80 - 96))


@pytest.mark.parametrize("window", [1, 5, 127, 128, 500])
def test_attention_flops_count_the_pairs_that_see_each_other(window: int) -> None:
    pairs = sum(min(place + 1, window) for place in range(128))
    formula = cost.layer_attention_flops(SMALL, batch=3, sequence=128, is_causal=True, window=window)
    # The formula leaves out half of the diagonal, as it does without a window.
    assert formula == pytest.approx(4 * 3 * 64 * (pairs - min(window, 128) / 2))


def test_training_flops_know_which_layers_have_a_window() -> None:
    plain = cost.training_flops(LLAMA, batch=2, sequence=128)
    windowed = replace(LLAMA, sliding_window=16, full_attention_layers=(1,))
    one, other = (cost.layer_attention_flops(LLAMA, batch=2, sequence=128, is_causal=True, window=w) for w in (0, 16))
    assert plain - cost.training_flops(windowed, batch=2, sequence=128) == 3 * 2 * (one - other) > 0


# Kept activations, on fake tensors


def test_a_layer_of_the_largest_model_saves_at_most_34_sbh_over_t() -> None:
    sizes = Sizes(world=8, tp=8, sequence_parallel=True)
    saved = saved_bytes(GPT_1T, sizes, 1, 2048, torch.bfloat16)
    unit = 2048 * 25600 / 8
    assert 32 * unit < saved <= 34 * unit
    formula = cost.layer_activation_bytes(GPT_1T, sizes, batch=1, sequence=2048, bytes_per_element=2)
    assert saved == pytest.approx(formula, rel=1e-4)


LAYOUTS = [Sizes(), Sizes(world=4, tp=4), Sizes(world=4, tp=4, sequence_parallel=True)]


@pytest.mark.matrix
@pytest.mark.parametrize("sizes", LAYOUTS, ids=["one", "tp4", "tp4 sp"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("variant", ["gpt2", "llama", "llama full heads", "llama one group", "sandwich", "output"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_saved_bytes_by_formula_are_those_saved(sizes: Sizes, dropout: float, variant: str, dtype: torch.dtype) -> None:
    config: TransformerConfig = {
        "gpt2": SMALL,
        "llama": LLAMA,
        "llama full heads": replace(LLAMA, num_query_groups=8),
        "llama one group": replace(LLAMA, num_query_groups=1),
        "sandwich": replace(LLAMA, norm_placement="sandwich"),
        "output": replace(LLAMA, norm_placement="output"),
    }[variant]
    # Layer norm, because the formula counts a fused RMS norm and the one of torch on CPU saves more.
    sizes_of_layer = {"hidden_size": 256, "head_dim": 32, "ffn_hidden_size": 512, "normalization": "layernorm"}
    config = replace(config, **sizes_of_layer, hidden_dropout=dropout)
    for sequence in (128, 127):
        formula = cost.layer_activation_bytes(
            config, sizes, batch=3, sequence=sequence, bytes_per_element=dtype.itemsize
        )
        # What is left are norm weights and the angles of rotary positions.
        assert saved_bytes(config, sizes, 3, sequence, dtype) == pytest.approx(formula, rel=0.02)


@pytest.mark.parametrize("sizes", LAYOUTS, ids=["one", "tp4", "tp4 sp"])
@pytest.mark.parametrize("window", [100, 64, 50, 16])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_saved_bytes_with_a_window_by_formula_are_those_saved(sizes: Sizes, window: int, groups: int) -> None:
    sizes_of_layer = {"hidden_size": 256, "head_dim": 32, "ffn_hidden_size": 512, "normalization": "layernorm"}
    config = replace(LLAMA, **sizes_of_layer, num_query_groups=groups, sliding_window=window)
    mask_bytes = 4 * (128 * 128 if window >= 64 else 2 * window * window)
    formula = cost.layer_activation_bytes(config, sizes, batch=3, sequence=128, bytes_per_element=4, window=window)
    saved = saved_bytes(config, sizes, 3, 128, torch.float32)
    assert saved - mask_bytes == pytest.approx(formula, rel=0.02)


@pytest.mark.parametrize("sizes", LAYOUTS, ids=["one", "tp4", "tp4 sp"])
@pytest.mark.parametrize("value_dim", [24, 32])
def test_saved_bytes_with_latents_by_formula_are_those_saved(
    sizes: Sizes, value_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fused norm saves its input and a statistic, where the RMS norm of torch on CPU saves more.
    monkeypatch.setattr(RMSNorm, "forward", lambda norm, x: F.layer_norm(x, norm.weight.shape, norm.weight))
    latent = LatentConfig(
        q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=value_dim
    )
    config = replace(
        LLAMA,
        latent=latent,
        num_query_groups=8,
        hidden_size=256,
        head_dim=32,
        ffn_hidden_size=512,
        normalization="layernorm",
    )
    formula = cost.layer_activation_bytes(config, sizes, batch=3, sequence=128, bytes_per_element=4)
    assert saved_bytes(config, sizes, 3, 128, torch.float32) == pytest.approx(formula, rel=0.005)


@pytest.mark.parametrize("sizes", LAYOUTS, ids=["one", "tp4", "tp4 sp"])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_saved_bytes_with_head_norms_by_formula_are_those_saved(
    sizes: Sizes, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fused norm saves its input and a statistic, where the RMS norm of torch on CPU saves more.
    monkeypatch.setattr(RMSNorm, "forward", lambda norm, x: F.layer_norm(x, norm.weight.shape, norm.weight))
    sizes_of_layer = {"hidden_size": 256, "head_dim": 32, "ffn_hidden_size": 512, "normalization": "layernorm"}
    config = replace(LLAMA, **sizes_of_layer, num_query_groups=groups, qk_norm=True)
    formula = cost.layer_activation_bytes(config, sizes, batch=3, sequence=128, bytes_per_element=4)
    assert saved_bytes(config, sizes, 3, 128, torch.float32) == pytest.approx(formula, rel=0.02)


def test_attention_never_lays_out_its_weights_without_dropout() -> None:
    sizes = Sizes()
    short, long = (saved_bytes(SMALL, sizes, 1, length, torch.bfloat16) for length in (1024, 4096))
    assert long == 4 * short
    dropping = replace(SMALL, attention_dropout=0.1)
    saved = saved_bytes(dropping, sizes, 1, 512, torch.bfloat16)
    formula = cost.layer_activation_bytes(dropping, sizes, batch=1, sequence=512, bytes_per_element=2)
    assert saved == pytest.approx(formula, rel=0.02)
    assert saved > 5 * saved_bytes(SMALL, sizes, 1, 512, torch.bfloat16)


# Kept activations of experts, on ranks that are threads


def experts(**changes: object) -> MoEConfig:
    """Experts in turn, so that all are equally busy."""
    options = {"ffn_hidden_size": 96} | changes
    router = {"num_experts": 8, "routing_type": "round_robin"} | options.pop("router", {})  # type: ignore[operator]
    return MoEConfig(router=RouterConfig(**router), **options)  # type: ignore[arg-type]


MOE_CONFIGS = {
    "plain": experts(),
    "top 1": experts(router={"top_k": 1, "norm_topk_prob": False}, ffn_hidden_size=0),
    "many": experts(router={"num_experts": 64, "top_k": 4}),
    "losses": experts(router={"num_experts": 64, "aux_losses": (AuxLoss(), AuxLoss(scope="global")), "z_loss": 0.1}),
    "sigmoid": experts(router={"num_experts": 64, "score_function": "sigmoid", "aux_losses": (AuxLoss(),)}),
    "shared": experts(shared_expert_intermediate_size=64),
    "gate": experts(shared_expert_intermediate_size=64, shared_expert_gate=True),
    "padded": experts(capacity=ExpertCapacity(factor=1.5, pad_to_capacity=True)),
    "gathered": experts(dispatcher="all_gather"),
}
MOE_LAYOUTS = {
    "one": Sizes(),
    "tp2": Sizes(world=2, tp=2),
    "tp2 sp ep2": Sizes(world=2, tp=2, sequence_parallel=True, ep=2),
    "ep2 etp2": Sizes(world=4, ep=2, etp=2),
}
# Layer norm, because the formula counts a fused RMS norm and the one of torch on CPU saves more.
WIDE = replace(LLAMA, hidden_size=256, head_dim=32, ffn_hidden_size=512, normalization="layernorm")


@pytest.mark.parametrize("layout", MOE_LAYOUTS)
@pytest.mark.parametrize("variant", MOE_CONFIGS)
def test_saved_bytes_of_experts_by_formula_are_those_saved(layout: str, variant: str) -> None:
    config, sizes = replace(WIDE, moe=MOE_CONFIGS[variant]), MOE_LAYOUTS[layout]
    dtype = torch.float32 if layout == "tp2" else torch.bfloat16
    formula = cost.layer_activation_bytes(config, sizes, batch=3, sequence=127, bytes_per_element=dtype.itemsize)
    assert expert_saved_bytes(config, sizes, 3, 127, dtype) == pytest.approx(formula, rel=0.015)


# Where tp ranks share no experts, the first has the tokens that stay.
@pytest.mark.parametrize("layout", ["one", "tp2 sp ep2", "ep2 etp2"])
def test_saved_bytes_of_experts_that_drop_choices_by_formula_are_those_saved(layout: str) -> None:
    config, sizes = replace(WIDE, moe=experts(capacity=ExpertCapacity(factor=0.5))), MOE_LAYOUTS[layout]
    formula = cost.layer_activation_bytes(config, sizes, batch=3, sequence=128, bytes_per_element=2)
    assert expert_saved_bytes(config, sizes, 3, 128, torch.bfloat16) == pytest.approx(formula, rel=0.015)


@pytest.mark.parametrize("layout", MOE_LAYOUTS)
def test_saved_bytes_of_a_choice_more_by_formula_are_those_saved(layout: str) -> None:
    few, many = (replace(WIDE, moe=experts(router={"top_k": top_k})) for top_k in (2, 4))
    sizes = MOE_LAYOUTS[layout]
    formula = partial(cost.layer_activation_bytes, sizes=sizes, batch=3, sequence=128, bytes_per_element=2)
    saved = partial(expert_saved_bytes, sizes=sizes, batch=3, sequence=128, dtype=torch.bfloat16)
    # Masks, which are not counted, are a thousandth of it, and the indices of a way a hundredth.
    assert saved(many) - saved(few) == pytest.approx(formula(many) - formula(few), rel=2e-3)


@pytest.mark.parametrize("activation", ["geglu_tanh", "gelu", "relu"])
def test_saved_bytes_of_experts_of_any_activation_by_formula_are_those_saved(activation: Any) -> None:
    config = replace(WIDE, moe=MOE_CONFIGS["plain"], activation=activation)
    formula = cost.layer_activation_bytes(config, batch=3, sequence=127, bytes_per_element=2)
    assert expert_saved_bytes(config, Sizes(), 3, 127, torch.bfloat16) == pytest.approx(formula, rel=0.015)


@pytest.mark.parametrize("parts", [("moe",), ("norm",), ("moe", "norm"), ("mlp",)], ids=str)
def test_saved_bytes_of_recomputed_experts_by_formula_are_those_saved(parts: tuple[str, ...]) -> None:
    config = replace(WIDE, moe=MOE_CONFIGS["gate"])
    recompute = RecomputeConfig(granularity="selective", parts=parts)  # type: ignore[arg-type]
    formula = cost.layer_activation_bytes(config, batch=3, sequence=127, bytes_per_element=2, recompute=recompute)
    assert expert_saved_bytes(config, Sizes(), 3, 127, torch.bfloat16, recompute) == pytest.approx(formula, rel=0.015)


def test_a_dense_layer_between_layers_of_experts_saves_what_a_dense_one_saves() -> None:
    config = replace(WIDE, moe=replace(MOE_CONFIGS["plain"], layer_freq=2))
    by_formula = partial(cost.layer_activation_bytes, batch=3, sequence=127, bytes_per_element=2)
    assert by_formula(config, layer=1) == by_formula(WIDE) != by_formula(config, layer=0)

"""What FP8 asks of an architecture on a mesh: tiles that divide, and layers that are left over."""

from lightning_megatron.mesh import Sizes
from lightning_megatron.precision.fp8 import Fp8Config
from lightning_megatron.transformer.config import TransformerConfig

_TP = "tensor_model_parallel_size"


def fp8_faults(fp8: Fp8Config, config: TransformerConfig, sizes: Sizes) -> list[str]:
    """Every rule that FP8 breaks in this architecture on that many ranks, one sentence each."""
    faults = tile_faults(fp8, config, sizes)
    num_bf16 = fp8.num_first_layers_bf16 + fp8.num_last_layers_bf16
    if num_bf16 >= config.num_layers:
        faults.append(
            f"fp8 num_first_layers_bf16 + num_last_layers_bf16 ({fp8.num_first_layers_bf16} + "
            f"{fp8.num_last_layers_bf16}) must be below num_layers ({config.num_layers}): no layer would be left for "
            "fp8; lower them, or leave fp8 out"
        )
    return faults


def tile_faults(fp8: Fp8Config, config: TransformerConfig, sizes: Sizes) -> list[str]:
    """Lengths of this architecture that FP8's tiles do not divide, one sentence each."""
    tp, moe, tile = sizes.tp, config.moe, fp8.tile
    rows = config.num_query_groups * (config.heads_per_group + 2) * config.head_dim
    heads = config.num_attention_heads * config.head_dim
    # What is cut, and over how many ranks; a length that tp does not divide is another rule's.
    lengths = [("hidden_size", config.hidden_size, "", 1)]
    if config.latent is None:
        lengths += [
            ("num_attention_heads x head_dim", heads, _TP, tp),
            ("the rows of the query-key-value weight", rows, _TP, tp),
        ]
    else:
        latent, num_heads = config.latent, config.num_attention_heads
        lengths += [
            ("q_lora_rank", latent.q_lora_rank, "", 1),
            ("kv_lora_rank", latent.kv_lora_rank, "", 1),
            ("kv_lora_rank + qk_rope_head_dim", latent.kv_lora_rank + latent.qk_rope_head_dim, "", 1),
            ("num_attention_heads x head_dim", heads, _TP, tp),
            (
                "num_attention_heads x (qk_nope_head_dim + v_head_dim)",
                num_heads * (latent.qk_nope_head_dim + latent.v_head_dim),
                *(_TP, tp),
            ),
            ("num_attention_heads x v_head_dim", num_heads * latent.v_head_dim, _TP, tp),
        ]
    if any(not config.has_experts(layer) for layer in range(config.num_layers)):
        lengths.insert(1, ("ffn_hidden_size", config.ffn_hidden_size, _TP, tp))
    if moe is not None:
        features = moe.ffn_hidden_size or config.ffn_hidden_size
        lengths.append(("ffn_hidden_size of an expert", features, "expert_tensor_parallel_size", sizes.etp))
        lengths.append(("shared_expert_intermediate_size", moe.shared_expert_intermediate_size, _TP, tp))
    if config.has_cross_attention and fp8.engine == "torch":
        # The other engine leaves cross attention alone.
        pairs = 2 * config.num_query_groups * config.head_dim
        lengths.append(("the rows of the key-value weight of cross attention", pairs, _TP, tp))
    faults = []
    for name, length, axis, ranks in lengths:
        step = tile * ranks
        if length % ranks == 0 and length % step:
            over = "" if ranks == 1 else f" x {axis} ({tile} x {ranks} = {step})"
            fits = " or ".join(str(n) for n in (length // step * step, (length // step + 1) * step) if n)
            faults.append(
                f"{name} ({length}) must be a multiple of {tile}{over} for fp8, whose products work in tiles of "
                f"{tile}; use {fits}, or leave fp8 out"
            )
    return faults

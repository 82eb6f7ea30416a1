"""Common parts of models with experts: a gated decoder with experts, their names, and the router's fields.

Files hold each expert's matrices apart; transformers 5 holds those of a layer in two tensors, and writes them so with
`save_original_format=False`. Names tell the two formats of files apart. We write the first, which every version reads.
"""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lightning_megatron.hf import gated_decoder
from lightning_megatron.hf.blocks import each, gate_and_up_in_rows, gate_and_up_of_each
from lightning_megatron.hf.config_reader import NOTHING, ConfigReader, unwritten_faults
from lightning_megatron.hf.family import ParamMapping
from lightning_megatron.models.gpt import GPTConfig
from lightning_megatron.moe.config import AuxLoss, MoEConfig, RouterConfig

# Layers with experts, in the modules of transformers 5.
_TOGETHER = "model.layers.{}.mlp"


# Fields of MoEConfig and of RouterConfig that are translated, or change nothing that a model gives in evaluation.
_OF_LAYERS = frozenset(("router", "layer_freq", "layers", "ffn_hidden_size", "dispatcher", "expert_gemm"))
_OF_ROUTER = frozenset(
    (
        "num_experts",
        "top_k",
        "norm_topk_prob",
        "num_groups",
        "aux_losses",
        "z_loss",
        "jitter",
        "num_sinkhorn_iterations",
        "dtype",
    )
)


def rows_apart(block: str, gate: str, up: str, down: str) -> tuple[ParamMapping, ...]:
    """Mappings of files with a tensor for each matrix of an expert; `block` is the name of `mlp` of dense layers."""
    expert = f"model.layers.{{}}.{block}.experts.{{}}"
    return (
        ParamMapping("layers.{}.moe.router.weight", (f"model.layers.{{}}.{block}.gate.weight",)),
        ParamMapping(
            "layers.{}.moe.experts.up", (f"{expert}.{gate}.weight", f"{expert}.{up}.weight"), gate_and_up_of_each
        ),
        ParamMapping("layers.{}.moe.experts.down", (f"{expert}.{down}.weight",), each),
    )


ROWS_TOGETHER = (
    ParamMapping("layers.{}.moe.router.weight", (f"{_TOGETHER}.gate.weight",)),
    ParamMapping("layers.{}.moe.experts.up", (f"{_TOGETHER}.experts.gate_up_proj",), gate_and_up_in_rows),
    ParamMapping("layers.{}.moe.experts.down", (f"{_TOGETHER}.experts.down_proj",)),
)
"""Rows of files with all experts of a layer in two tensors."""

QWEN_DEFAULTS = {
    **gated_decoder.DEFAULTS,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "max_position_embeddings": 32768,
    "norm_topk_prob": False,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""Values that transformers takes for fields which a config.json of Qwen2-MoE or Qwen3-MoE leaves out."""


def moe_from_hf(
    reader: ConfigReader,
    *,
    num_experts: int,
    norm_topk_prob: bool,
    jitter: float = 0.0,
    router: Mapping[str, Any] = NOTHING,
    **own: Any,
) -> dict[str, Any]:
    """Field `moe` of a GPTConfig; `router` and `own` are further fields of its router and its layers."""
    top_k, coefficient = reader.take("num_experts_per_tok"), reader.take("router_aux_loss_coef", 0.0)
    if not reader.take("output_router_logits", False):
        # Without these logits transformers takes no balance loss, whatever its coefficient.
        coefficient = 0.0
    if top_k == 1 and norm_topk_prob:
        reader.faults.append(
            "num_experts_per_tok (1) must be at least 2 where the weights of a token's experts are made to sum up to "
            "1: a single weight is always 1, and the router learns nothing"
        )
        return {}
    try:
        made = RouterConfig(
            num_experts=num_experts,
            top_k=top_k,
            norm_topk_prob=norm_topk_prob,
            aux_losses=(AuxLoss(coefficient=coefficient),) if coefficient else (),
            jitter=jitter,
            **router,
        )
        return {"moe": MoEConfig(router=made, **own)}
    except ValueError as error:
        reader.faults += str(error).splitlines()
        return {}


def moe_to_hf(moe: MoEConfig) -> dict[str, Any]:
    """Fields of a config.json from a MoEConfig, less those that a family alone has."""
    written: dict[str, Any] = {
        "num_experts_per_tok": moe.router.top_k,
        "output_router_logits": bool(moe.router.aux_losses),
    }
    if moe.router.aux_losses:
        # Without one transformers' own stays, which counts for nothing.
        written["router_aux_loss_coef"] = math.fsum(loss.coefficient for loss in moe.router.aux_losses)
    return written


def layers_from_hf(reader: ConfigReader) -> tuple[int, ...]:
    """The layers with experts of a Qwen; none named: all."""
    num_layers, step = reader.take("num_hidden_layers"), reader.take("decoder_sparse_step")
    dense = reader.take_list("mlp_only_layers", int)
    if step < 1:
        reader.faults.append(f"decoder_sparse_step ({step}) must be at least 1, which gives all layers experts")
        return ()
    layers = tuple(layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense)
    if not layers:
        reader.faults.append(
            f"decoder_sparse_step ({step}) and mlp_only_layers ({dense}) leave none of {num_layers} layers with "
            "experts; give a model without experts the model_type that has none"
        )
    return () if len(layers) == num_layers else layers


def layers_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Fields of a config.json of a Qwen for the layers with experts."""
    dense = [layer for layer in range(config.num_layers) if not config.has_experts(layer)]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


# Values of fields of routers and their layers; a plan of Sinkhorn's is made in training alone.
_NEEDED: Mapping[str, tuple[Any, ...]] = {
    "score_function": ("softmax",),
    "routing_type": ("top_k", "sinkhorn"),
    "topk_scaling_factor": (1.0,),
    "bias_update_rate": (0.0,),
    "shared_expert_intermediate_size": (0,),
    "capacity": (None,),
}


def moe_faults(config: GPTConfig, **own: tuple[Any, ...]) -> list[str]:
    """Faults of experts, or of a router, that these models do not have; settings of training alone pass.

    `own` are the values that a family's models may have of a field, none named: all.
    """
    moe = config.moe
    if moe is None:
        return ["moe (None) must be there: its layers have experts"]
    router = moe.router
    values = {field.name: getattr(one, field.name) for one in (moe, router) for field in fields(one)}
    needed = {**_NEEDED, "group_topk": (router.num_groups,), **own}
    faults = [
        f"moe {name} ({values[name]!r}) must be {' or '.join(map(repr, fits))}"
        for name, fits in needed.items()
        if fits and values[name] not in fits
    ]
    lost = unwritten_faults(moe, {*needed, *_OF_LAYERS}) + unwritten_faults(router, {*needed, *_OF_ROUTER})
    return faults + [f"moe {fault}" for fault in lost]

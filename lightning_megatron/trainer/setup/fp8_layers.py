"""The strategy's use of FP8: the linears of the models' transformer layers, or of the layers of networks that are not
this package's, get the configured FP8 GEMM."""

from collections.abc import Mapping

import torch
from torch import nn

from lightning_megatron.any_module.cut_model import CutModel, cut_of
from lightning_megatron.any_module.layer_linears import linears_of
from lightning_megatron.any_module.plan import ModelPlan
from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Mesh, NewGroup
from lightning_megatron.pipeline.module import PipelineModule
from lightning_megatron.precision.fp8 import Fp8Config
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.transformer.fp8_layers import (
    Fp8Layers,
    chosen_names,
    tile_faults,
    use_torch,
    use_transformer_engine,
)
from lightning_megatron.transformer.layer import PreNormLayer


def use_fp8(
    config: Fp8Config,
    module: nn.Module,
    plan: ModelPlan,
    pipelined: Mapping[str, PipelineModule],
    mesh: Mesh,
    device: torch.device,
    new_group: NewGroup,
    *,
    frees_weights: bool = False,
) -> Fp8Layers:
    """The layers that multiply in FP8 from here on, with casts of weights that last no longer than those where it
    `frees_weights`.

    Collective over the world; raises ConfigurationError, on all ranks of a model replica, where the models cannot.
    """
    faults = []
    own = {name: model for name, model in pipelined.items() if not isinstance(model, CutModel)}
    # As nothing is cut of a module that holds a model of this package, nothing else of it multiplies in FP8.
    others = {} if own else linears_of_networks(module, plan, config)
    modules = [child for model in own.values() for child in model.modules()]
    has_layers = bool(others) or any(isinstance(child, PreNormLayer) for child in modules)
    if not any(collectives.gather_objects(has_layers, mesh.pp)):
        faults.append(
            "fp8 is asked for, and the module holds no model with transformer layers whose norms stand before their "
            "linears (such as GPTModel, or BertModel with norm_placement='pre'), nor a network with a list of layers "
            f"that hold an nn.Linear, beside num_first_layers_bf16 ({config.num_first_layers_bf16}) and "
            f"num_last_layers_bf16 ({config.num_last_layers_bf16}) of them; build one in configure_model, name the "
            'layers of a network with plan=ModelPlan(layers=("net.layers",)), or leave fp8 out'
        )
    if others and config.engine == "transformer_engine":
        faults.append(
            "fp8 engine 'transformer_engine' runs the layers of this package's models, each linear with the norm in "
            f"front of it, and {type(module).__name__} holds another network; use Fp8Config(engine='torch')"
        )
    # Every rank raises, also where a stage has other layers: the others would wait for it.
    found = collectives.gather_objects(tile_faults(modules, config, others), mesh.pp)
    if faults := faults + sorted({fault for tiles in found for fault in tiles}):
        raise ConfigurationError(faults)
    models = {name: (model, model.part_names) for name, model in own.items()}
    if config.engine == "torch":
        replicas = mesh.axis("dp+cp")
        layers = use_torch(models, config, tp=mesh.tp, replicas=replicas, pp=mesh.pp, device=device, others=others)
        if frees_weights:
            layers.cast_anew()
        return layers
    stage = ranks_of_stage(mesh)
    return use_transformer_engine(models, config, stage=new_group(stage) if len(stage) > 1 else None)


def ranks_of_stage(mesh: Mesh) -> tuple[int, ...]:
    """Global ranks with the stages of this one: pp varies slowest, so that they follow each other."""
    size = mesh.world.size // mesh.pp.size
    start = mesh.global_rank // size * size
    return tuple(range(start, start + size))


def linears_of_networks(module: nn.Module, plan: ModelPlan, config: Fp8Config) -> dict[str, nn.Module]:
    """The linears in the layers of this rank, by name, of the networks of a module, but for the layers that stay as
    they are."""
    found: dict[str, nn.Module] = {}
    for prefix, network in module.named_children():
        cut = cut_of(network)
        layers = plan.layers_in(prefix, network)[0] if cut is None else cut.part_names
        held = set(layers) if cut is None else {part for stage in cut.mesh.own_stages for part in cut.parts_of(stage)}
        for layer in chosen_names(layers, config):
            if layer in held:
                found |= {f"{prefix}.{name}": linear for name, linear in linears_of(network, layer)}
    return found

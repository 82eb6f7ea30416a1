"""The strategy's use of FP8: the linears of the models' transformer layers get the configured FP8 GEMM."""

from collections.abc import Mapping

import torch

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Mesh, NewGroup
from lightning_megatron.pipeline.module import PipelineModule
from lightning_megatron.precision.fp8 import Fp8Config, device_faults
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.transformer.fp8_layers import Fp8Layers, tile_faults, use_torch, use_transformer_engine
from lightning_megatron.transformer.layer import PreNormLayer


def use_fp8(
    config: Fp8Config,
    pipelined: Mapping[str, PipelineModule],
    mesh: Mesh,
    device: torch.device,
    new_group: NewGroup,
) -> Fp8Layers:
    """The layers that multiply in FP8 from here on. Collective over the world; raises ConfigurationError, on all ranks
    of a model replica, where the device or the models cannot."""
    faults = device_faults(device)
    modules = [child for model in pipelined.values() for child in model.modules()]
    has_layers = any(isinstance(child, PreNormLayer) for child in modules)
    if not any(collectives.gather_objects(has_layers, mesh.pp)):
        faults.append(
            "fp8 is asked for, and the module holds no model with transformer layers whose norms stand before their "
            "linears (such as GPTModel, or BertModel with norm_placement='pre'); build one in configure_model, or "
            "leave fp8 out"
        )
    # Every rank raises, also where a stage has other layers: the others would wait for it.
    tiles = [fault for found in collectives.gather_objects(tile_faults(modules), mesh.pp) for fault in found]
    if faults := faults + sorted(set(tiles)):
        raise ConfigurationError(faults)
    models = {name: (model, model.part_names) for name, model in pipelined.items()}
    if config.engine == "torch":
        return use_torch(models, config, tp=mesh.tp, replicas=mesh.axis("dp+cp"), pp=mesh.pp, device=device)
    ranks = range(mesh.world.size)
    stage = tuple(rank for rank in ranks if Mesh.imagine(rank, mesh.sizes).pp.rank == mesh.pp.rank)
    return use_transformer_engine(models, config, stage=new_group(stage) if len(stage) > 1 else None)

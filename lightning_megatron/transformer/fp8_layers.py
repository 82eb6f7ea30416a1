"""FP8 in the layers of a built model: which linears use it, which engine multiplies, and what is updated between steps.

Runs at set-up, once the model is on its device. Chosen are the linears of transformer layers, and the matrices of their
experts, but for those of the first and last layers that the configuration leaves alone, counted over the full model
and not over a stage; in a model with several stacks (encoder, decoder) over each of them. Routers and gates never are.
Linears of other networks are handed in by whoever knows their layers; torch's engine alone multiplies them. Both
engines leave parameters, their names and shards as they are.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis
from lightning_megatron.moe.experts import Experts
from lightning_megatron.moe.grouped_gemm_fp8 import GroupedFp8Gemm
from lightning_megatron.precision import fp8
from lightning_megatron.precision.cast import E4M3, E5M2
from lightning_megatron.precision.fp8 import Fp8Config
from lightning_megatron.precision.gemm import Fp8Gemm
from lightning_megatron.precision.scaling import (
    AmaxHistory,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Scaling,
    WeightCast,
)
from lightning_megatron.sharding import shard_of
from lightning_megatron.tensor.gemm import TORCH_GEMM
from lightning_megatron.tensor.linear import ParallelLinear
from lightning_megatron.tensor.whole_linear import lend_gemm, take_gemm_back
from lightning_megatron.transformer.latent_attention import LatentAttention
from lightning_megatron.transformer.layer import PreNormLayer
from lightning_megatron.transformer.te_layers import TELayer


def chosen_names(part_names: Sequence[str], config: Fp8Config) -> Iterator[str]:
    """Names of the parts that are not among the first or last ones of their stack, which stay as they are."""
    for name in part_names:
        stack = name.rpartition(".")[0]
        layers = [part for part in part_names if part.rpartition(".")[0] == stack]
        index = layers.index(name)
        if config.num_first_layers_bf16 <= index < len(layers) - config.num_last_layers_bf16:
            yield name


def chosen_layers(model: nn.Module, part_names: Sequence[str], config: Fp8Config) -> Iterator[tuple[str, PreNormLayer]]:
    """The transformer layers on this rank that are to multiply in FP8, with their names.

    `part_names` are those of the full model's parts in order, of all stages.
    """
    chosen = set(chosen_names(part_names, config))
    for name, module in model.named_modules():
        if isinstance(module, PreNormLayer) and name in chosen:
            yield name, module


# --- torch's engine ---------------------------------------------------------------------------------------------------


class _Matrix(NamedTuple):
    """A weight that is to multiply in FP8."""

    name: str
    axes: tuple[Axis, Axis, Axis]
    """Axes that cut its input, itself and the gradient of its output; of size 1 where they are unsharded."""
    module: ParallelLinear | Experts | nn.Linear
    gemm: Literal["gemm", "up_gemm", "down_gemm"]
    """Attribute of the module by which the weight multiplies."""

    @property
    def weight(self) -> Tensor:
        """The weight on this rank."""
        if isinstance(self.module, Experts):
            return self.module.up if self.gemm == "up_gemm" else self.module.down
        return self.module.weight

    def use(self, x: Scaling, weight: Scaling, gradient: Scaling) -> Fp8Gemm | GroupedFp8Gemm:
        """Lets it multiply in FP8, cast by these."""
        if isinstance(self.module, Experts):
            grouped = GroupedFp8Gemm(len(self.module.up), x=x, weight=weight, gradient=gradient)
            setattr(self.module, self.gemm, grouped)
            return grouped
        gemm = Fp8Gemm(x=x, weight=weight, gradient=gradient)
        if isinstance(self.module, nn.Linear):
            lend_gemm(self.module, gemm)
        else:
            self.module.gemm = gemm
        return gemm

    def leave(self) -> None:
        """Lets it multiply as before."""
        if isinstance(self.module, nn.Linear):
            take_gemm_back(self.module)
        elif isinstance(self.module, Experts):
            setattr(self.module, self.gemm, self.module.gemm)
        else:
            self.module.gemm = TORCH_GEMM


class TorchFp8Layers:
    """Linears that hold an `Fp8Gemm`, and experts that hold a `GroupedFp8Gemm` for each of their matrices."""

    def __init__(
        self,
        matrices: Sequence[_Matrix],
        gemms: Sequence[Fp8Gemm | GroupedFp8Gemm],
        history: AmaxHistory | None,
        axes: Sequence[Axis],
        pp: Axis,
        config: Fp8Config,
    ) -> None:
        self._matrices, self._gemms, self._history, self._axes, self._pp = matrices, gemms, history, axes, pp
        self._config = config

    def context(self) -> AbstractContextManager[None]:
        """Context that a call of the model runs in."""
        return nullcontext()

    def weight_casts(self, root: nn.Module) -> dict[nn.Parameter, WeightCast]:
        """Casts by which weights are gathered in float8, where that is configured; none of weights that something else
        in `root` reads."""
        if self._config.param_gather == "full":
            return {}
        casts, owners = dict[nn.Parameter, WeightCast](), {matrix.module for matrix in self._matrices}
        for matrix, gemm in zip(self._matrices, self._gemms, strict=True):
            weight, scaling = matrix.weight, gemm.weight_scaling
            # A parametrized weight is computed, and what it is computed from is no factor of a product.
            if isinstance(scaling, CurrentScaling) and isinstance(weight, nn.Parameter):
                num_tensors = len(weight) if isinstance(matrix.module, Experts) else 1
                casts[weight] = WeightCast(scaling, matrix.axes[1], num_tensors)
        others = {one for module in root.modules() if module not in owners for one in module.parameters(recurse=False)}
        # Generation multiplies queries by it.
        others |= {one.key_value_up.weight for one in root.modules() if isinstance(one, LatentAttention)}
        return {weight: one for weight, one in casts.items() if weight not in others}

    def cast_anew(self) -> None:
        """Casts weights in each GEMM, because the weights are freed after it, and holds no casts in between."""
        for gemm in self._gemms:
            gemm.cast_anew()

    def end_step(self) -> None:
        """Updates scales and drops cached casts, once the optimizer has changed the weights. Collective over the ranks
        of a stage."""
        for gemm in self._gemms:
            gemm.forget()
        if self._history is not None:
            self._history.end_step(self._agree)

    def _agree(self, amaxes: Tensor) -> Tensor:
        for axis in self._axes:
            amaxes = collectives.all_reduce(amaxes, axis, "max")
        return amaxes

    def release(self) -> None:
        """Lets the layers multiply as they did before."""
        for matrix in self._matrices:
            matrix.leave()

    def state_dict(self) -> dict[str, Tensor]:
        """State that later steps depend on, by names of the unsplit model, of all stages. Collective over pp."""
        if self._history is None:
            return {}
        stages = collectives.gather_objects(self._history.state_dict(), self._pp)
        return {name: past for stage in stages for name, past in stage.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads the state of this rank's layers, as far as it is there."""
        if self._history is not None:
            self._history.load_state_dict(state)


def tile_faults(
    modules: Iterable[nn.Module], config: Fp8Config, others: Mapping[str, nn.Module] = MappingProxyType({})
) -> list[str]:
    """Reasons why weights of the transformer layers among `modules`, and of `others`, linears by name, cannot multiply
    in FP8, for models whose configuration nobody saw before they were built."""
    of_layers = [module for layer in modules if isinstance(layer, PreNormLayer) for module in layer.modules()]
    named = [*(("a weight of this rank", one) for one in of_layers), *others.items()]
    # The first of each shape.
    shapes: dict[tuple[int, ...], str] = {}
    for name, module in named:
        for weight in _weights(module):
            shapes.setdefault(tuple(weight.flatten(0, -2).shape), name)
    tile = config.tile
    return [
        f"{shapes[rows, columns]} ({rows} x {columns}) must have multiples of {tile} both ways for fp8, whose "
        f"products work in tiles of {tile}; change the model's sizes or tensor_model_parallel_size, or leave fp8 out"
        for rows, columns in sorted(shapes)
        if rows % tile or columns % tile
    ]


def use_torch(
    models: Mapping[str, tuple[nn.Module, Sequence[str]]],
    config: Fp8Config,
    *,
    tp: Axis,
    replicas: Axis,
    pp: Axis,
    device: torch.device,
    others: Mapping[str, nn.Module] = MappingProxyType({}),
) -> TorchFp8Layers:
    """Lets torch multiply the chosen linears of these models (with the names of all their parts) in FP8, and `others`:
    linears of networks that are not ours, by name.

    `replicas` is dp+cp: amaxes of delayed scaling are all-reduced over it and over tp at the end of each step, those of
    current scaling over tp alone, in each cast of a tensor that tp cuts.
    """
    matrices = [
        matrix
        for prefix, (model, part_names) in models.items()
        for name, layer in chosen_layers(model, part_names, config)
        for inner, module in layer.named_modules()
        for matrix in _matrices(f"{prefix}.{name}.{inner}", module)
    ]
    matrices += [_of_linear(name, linear) for name, linear in others.items()]
    gradient_dtype = E5M2 if config.format == "hybrid" else E4M3
    names = [f"{name}.{tensor}" for name, *_ in matrices for tensor in ("input", "weight", "gradient")]
    dtypes = [E4M3, E4M3, gradient_dtype]
    history = None
    if config.scaling == "delayed":
        history = AmaxHistory(names, dtypes * len(matrices), config, device)

    def scaling(slot: int, axis: Axis) -> Scaling:
        dtype, agree = dtypes[slot % len(dtypes)], _agreement(axis)
        if config.scaling == "mxfp8":
            return BlockScaling(dtype)
        if history is None:
            return CurrentScaling(dtype, config.margin, agree)
        return DelayedScaling(dtype, config.margin, agree, history, slot)

    slots = itertools.count()
    gemms = [matrix.use(*(scaling(next(slots), axis) for axis in matrix.axes)) for matrix in matrices]
    return TorchFp8Layers(matrices, gemms, history, (tp, replicas), pp, config)


def _weights(module: nn.Module) -> tuple[Tensor, ...]:
    """The weights of a module, without its children, that multiply in FP8; of experts that of the first."""
    if isinstance(module, (ParallelLinear, nn.Linear)):
        return (module.weight,)
    return (module.up[0], module.down[0]) if isinstance(module, Experts) else ()


def _matrices(name: str, module: nn.Module) -> Iterator[_Matrix]:
    """Weights of a module, without its children, that are to multiply in FP8."""
    if isinstance(module, ParallelLinear):
        yield _of_linear(name, module)
    elif isinstance(module, Experts):
        etp = module.axes.etp
        # Ranks of etp have the same tokens. Ranks of ep have tokens of other experts, which are scaled separately.
        alone = Axis.alone(etp.ranks[etp.rank])
        yield _Matrix(f"{name}.up", (alone, etp, etp), module, "up_gemm")
        yield _Matrix(f"{name}.down", (etp, etp, alone), module, "down_gemm")


def _of_linear(name: str, module: nn.Module) -> _Matrix:
    if isinstance(module, ParallelLinear):
        return _Matrix(name, (module.input_axis, module.tp, module.gradient_axis), module, "gemm")
    assert isinstance(module, nn.Linear)
    alone = Axis.alone(0)
    # Ranks that have terms of its weight's gradient, and the whole weight, run it on parts of one tensor.
    parts = shard_of(module.weight).partial or alone
    return _Matrix(name, (parts, alone, parts), module, "gemm")


def _agreement(axis: Axis) -> Callable[[Tensor], Tensor]:
    return partial(collectives.all_reduce, axis=axis, op="max")


# --- Transformer Engine's ---------------------------------------------------------------------------------------------


class EngineFp8Layers:
    """Transformer layers whose linears Transformer Engine runs. Its amaxes are its own."""

    def __init__(self, layers: Sequence[TELayer], config: Fp8Config, stage: ProcessGroup | None) -> None:
        self._layers, self._config, self._stage = layers, config, stage

    def context(self) -> AbstractContextManager[None]:
        return fp8.autocast(self._config, self._stage)

    def end_step(self) -> None:
        for layer in self._layers:
            layer.forget()

    def release(self) -> None:
        for layer in self._layers:
            layer.give_back()

    def weight_casts(self, root: nn.Module) -> dict[nn.Parameter, WeightCast]:
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        pass


Fp8Layers = TorchFp8Layers | EngineFp8Layers
"""The layers of a rank's model that multiply in FP8."""


def use_transformer_engine(
    models: Mapping[str, tuple[nn.Module, Sequence[str]]], config: Fp8Config, *, stage: ProcessGroup | None
) -> EngineFp8Layers:
    """Lets Transformer Engine run the chosen layers of these models; `stage` are the ranks that agree on amaxes.

    Raises ImportError, naming the extra, where it is not installed.
    """
    layers = [
        TELayer(layer, config.tile)
        for model, part_names in models.values()
        for _, layer in list(chosen_layers(model, part_names, config))
    ]
    return EngineFp8Layers(layers, config, stage)

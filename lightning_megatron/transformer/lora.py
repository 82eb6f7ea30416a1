"""LoRA: the weights of a model are frozen, and chosen linears of its layers get an adapter that is trained.

    add_lora(model, LoraConfig(rank=16, alpha=32))    # before training, on every rank
    with merged_lora(model):                          # after it: inside, a model like the one that came
        ...

A fused linear (query-key-value, gate and up) has one A for all that it makes, and a B with the rows of its weight.
In layers of experts attention and the shared expert get adapters; the experts and their router stay frozen. Layers
that never run (`TransformerConfig.idle_parts`) get none.
Source: Hu et al., arXiv 2106.09685, sections 4.1 and 4.2.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import nn

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.moe.experts import Experts
from lightning_megatron.sharding import sharded_parameters
from lightning_megatron.tensor.linear import ParallelLinear
from lightning_megatron.tensor.lora_adapter import LoRAAdapter, lora_adapter_for
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.init import initialise
from lightning_megatron.transformer.layer import ExpertLayer, PreNormLayer
from lightning_megatron.transformer.linears import DOWN, LINEAR_NAMES, PROJECTION, QKV, UP, name_in_layer

LoraScaling = Literal["rank", "root_of_rank"]

DEFAULT_TARGETS: tuple[str, ...] = (QKV, PROJECTION, UP, DOWN)
"""All linears of a dense layer."""


@config_dataclass
class LoraConfig:
    """LoRA adapters of frozen weights. Raises ValueError that lists all faults at once."""

    rank: int = 16
    """Rank of the adapters: features between A and B."""
    alpha: float = 32.0
    """Numerator of the adapter's scale: its output is multiplied by alpha / rank, or by alpha / sqrt(rank)."""
    scaling: LoraScaling = "rank"
    """Denominator of the adapter's scale: the rank, or its root, which keeps large ranks from learning too slowly
    (Kalajdzievski, arXiv 2312.03732, section 3)."""
    dropout: float = 0.0
    """Dropout probability of the adapter's input."""
    targets: tuple[str, ...] = DEFAULT_TARGETS
    """Linears that get an adapter, in every layer that has them. shared: the shared expert of a mixture of experts;
    cross_attention: a decoder's attention to the encoder. In a model of transformers as it is, the last parts of
    modules' names, such as q_proj; left as they are, all linears but the head and those that peft takes for experts."""

    def __post_init__(self) -> None:
        if faults := self.faults():
            raise ValueError("\n".join(faults))

    def faults(self) -> list[str]:
        """Every rule that this configuration breaks, one sentence each."""
        faults = []
        if not self.targets:
            faults.append("lora targets are empty; name some linears, or leave targets or lora out")
        if self.scaling not in get_args(LoraScaling):
            faults.append(f"lora scaling ({self.scaling!r}) must be one of {_listed(get_args(LoraScaling))}")
        if self.rank < 1:
            faults.append(f"lora rank ({self.rank}) must be at least 1; 8 to 64 are usual")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            faults.append(f"lora alpha ({self.alpha}) must be above 0; once or twice the rank is usual")
        if not 0.0 <= self.dropout < 1.0:
            faults.append(f"lora dropout ({self.dropout}) must be at least 0 and below 1")
        return faults

    def unknown_targets(self) -> list[str]:
        """Errors of targets that no layer of this package has, one sentence each."""
        all_targets = _listed(LINEAR_NAMES)
        return [
            f"lora target {target!r} is one of experts or a router, which stay frozen; targets may be {all_targets}"
            if target.startswith(("experts", "router", "moe"))
            else f"lora target {target!r} is unknown; targets may be {all_targets}"
            for target in self.targets
            if target not in LINEAR_NAMES
        ]

    @property
    def scale(self) -> float:
        """Factor of B A x."""
        return self.alpha / (self.rank if self.scaling == "rank" else math.sqrt(self.rank))


def add_lora(model: nn.Module, config: LoraConfig, *, seed: int | None = None) -> None:
    """Freezes every parameter of a model and adds the adapters, of this rank's layers and slices.

    Initial values depend on seed (torch's, where none is given) and names alone. Raises ValueError where the layers of
    the model have no linear of a target's name, or have adapters already, and where the model is none of this package.
    """
    if unknown := config.unknown_targets():
        raise ValueError("\n".join(unknown))
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, ParallelLinear) and not _is_idle(name, model)
    }
    if any(linear.lora is not None for linear in linears.values()):
        raise ValueError("the model has low-rank paths already; merge those first (merge_lora), or build it anew")
    chosen = {name: linear for name, linear in linears.items() if name_in_layer(name) in config.targets}
    if not linears and any(True for _ in model.parameters()) and not any(True for _ in sharded_parameters(model)):
        raise ValueError(
            f"the model ({type(model).__name__}) has no linears of this package, beside which low-rank paths stand; "
            "lora is for its models, such as GPTModel"
        )
    offered = {name_in_layer(name) for name in linears}
    missing = [target for target in config.targets if target not in offered | _elsewhere(model)]
    # A stage may hold no layer at all.
    if linears and missing:
        frozen = "" if not any(isinstance(x, Experts) for x in model.modules()) else ", and experts that stay frozen"
        raise ValueError(
            f"the model has no linear named {_listed(missing)} for lora; its layers have {_listed(sorted(offered))}"
            f"{frozen}; name targets among them"
        )
    model.requires_grad_(False)
    seed = torch.initial_seed() if seed is None else seed
    for name, linear in chosen.items():
        linear.lora = lora_adapter_for(
            linear, rank=config.rank, scale=config.scale, dropout=config.dropout, name=name
        ).train(linear.training)
        initialise(linear.lora, seed, prefix=f"{name}.lora.")


@torch.no_grad()
def merge_lora(model: nn.Module) -> None:
    """Merges the adapters into the weights and removes them; the weights stay frozen."""
    for linear, path in _paths(model):
        linear.weight.add_(path.product().to(linear.weight.dtype))
        linear.lora = None


@contextmanager
def merged_lora(model: nn.Module) -> Iterator[None]:
    """Inside the block the adapters are merged into the weights; after it all is as before.

    The former weights are in host memory meanwhile, so that they are restored bit by bit.
    """
    before = [(linear, path, linear.weight.detach().to("cpu", copy=True)) for linear, path in _paths(model)]
    merge_lora(model)
    try:
        yield
    finally:
        with torch.no_grad():
            for linear, path, weight in before:
                linear.weight.copy_(weight)
                linear.lora = path


def _paths(model: nn.Module) -> list[tuple[ParallelLinear, LoRAAdapter]]:
    linears = [module for module in model.modules() if isinstance(module, ParallelLinear)]
    return [(linear, linear.lora) for linear in linears if isinstance(linear.lora, LoRAAdapter)]


def _elsewhere(model: nn.Module) -> set[str]:
    """Targets in layers of a kind that the model has on other stages alone."""
    config = _config_of(model)
    if config is None:
        return set()
    held = {isinstance(x, ExpertLayer) for x in model.modules() if isinstance(x, PreNormLayer)}
    rooms = {"mlp"} if config.has_dense_layers and False not in held else set()
    if config.moe is not None and config.moe.shared_expert_intermediate_size and True not in held:
        rooms.add("shared")
    if config.has_cross_attention:
        rooms.add("cross_attention")
    return {target for target in LINEAR_NAMES if target.partition(".")[0] in rooms}


def _is_idle(name: str, model: nn.Module) -> bool:
    """Whether a linear is in a layer that never runs."""
    config = _config_of(model)
    return config is not None and any(name.startswith(f"{part}.") for part in config.idle_parts)


def _config_of(model: nn.Module) -> TransformerConfig | None:
    config = getattr(model, "config", None)
    return config if isinstance(config, TransformerConfig) else None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))

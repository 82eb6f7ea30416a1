"""Trained weights of a built module, which the planner otherwise takes from a recipe's file.

Every rank describes its own stage and slices; together they describe the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_megatron.models import LlavaModel
from lightning_megatron.models.llava import PARTS
from lightning_megatron.planner.trainable import Trainable
from lightning_megatron.tensor.linear import ParallelLinear
from lightning_megatron.tensor.lora_adapter import LoRAAdapter
from lightning_megatron.transformer.lora import LoraConfig

_LANGUAGE, _ELSEWHERE = PARTS[-1], ""


@dataclass(frozen=True, kw_only=True)
class TrainedWeights:
    """Trained and frozen parts of a LLaVA on one rank; all other weights go by the empty name."""

    trained: frozenset[str]
    """Parts with trained weights, apart from LoRA adapters."""
    frozen: frozenset[str]
    """Parts with frozen weights, apart from layers that never run."""
    adapters: frozenset[tuple[str, int, float]]
    """Name of the linear in its layer, rank and dropout of each LoRA adapter."""
    without_adapter: frozenset[str]
    """Names of linears without an adapter, in layers that run."""


def trained_weights(module: nn.Module) -> TrainedWeights:
    """Trained weights of this rank."""
    owners: dict[nn.Parameter, str] = {}
    idle: set[nn.Parameter] = set()
    for model in (child for child in module.modules() if isinstance(child, LlavaModel)):
        for name, parameter in model.named_parameters():
            first = name.partition(".")[0]
            owners[parameter] = first if first in PARTS else _LANGUAGE
            if any(name.startswith(f"{part}.") for part in model.config.idle_parts):
                idle.add(parameter)
    adapters, without_adapter, adapter_parameters = set(), set(), set()
    for name, linear in module.named_modules():
        if not isinstance(linear, ParallelLinear) or linear.weight in idle:
            continue
        own = ".".join(name.split(".")[-2:])
        if not isinstance(linear.lora, LoRAAdapter):
            without_adapter.add(own)
        else:
            adapters.add((own, linear.lora.a.shape[0], linear.lora.dropout))
            adapter_parameters |= {parameter for parameter in linear.lora.parameters() if parameter.requires_grad}
    parts: dict[bool, set[str]] = {True: set(), False: set()}
    for parameter in module.parameters():
        if parameter not in adapter_parameters and parameter not in idle:
            parts[parameter.requires_grad].add(owners.get(parameter, _ELSEWHERE))
    return TrainedWeights(
        trained=frozenset(parts[True]),
        frozen=frozenset(parts[False]),
        adapters=frozenset(adapters),
        without_adapter=frozenset(without_adapter),
    )


def trained_of_ranks(ranks: Sequence[TrainedWeights]) -> Trainable:
    """Trained weights of all ranks together. Raises ValueError for what the planner cannot express."""
    trained = frozenset[str]().union(*(rank.trained for rank in ranks))
    frozen = frozenset[str]().union(*(rank.frozen for rank in ranks))
    adapters = frozenset[tuple[str, int, float]]().union(*(rank.adapters for rank in ranks))
    kinds = {(rank, dropout) for _, rank, dropout in adapters}
    if len(kinds) > 1 or (adapters and trained):
        raise ValueError(
            "LoRA adapters are mixed with weights that are trained, or differ in rank or dropout: the planner knows "
            "those of one LoraConfig"
        )
    if kinds:
        [(rank, dropout)] = kinds
        targets = tuple(sorted({name for name, _, _ in adapters}))
        without_adapter = frozenset[str]().union(*(rank.without_adapter for rank in ranks))
        if mixed := [name for name in targets if name in without_adapter]:
            raise ValueError(
                f"{', '.join(mixed)} has LoRA adapters in some layers and none in others: the planner knows those of "
                "a LoraConfig, which stand in every layer"
            )
        return Trainable(lora=LoraConfig(rank=rank, dropout=dropout, targets=targets))
    if _ELSEWHERE in frozen or trained & frozen:
        raise ValueError(
            "weights are frozen that are no whole part of a LLaVA and have no LoRA adapters beside them: the planner "
            "knows no others"
        )
    return Trainable(frozen=tuple(part for part in PARTS if part in frozen))

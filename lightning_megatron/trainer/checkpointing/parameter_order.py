"""The order in which the unsplit module has its parameters, known to every rank.

torch numbers an optimizer's parameters; a checkpoint names them, in this order, so that one device can number them.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from lightning_megatron.pipeline.module import PipelineModule
from lightning_megatron.trainer.setup import pipelined_models


def in_module_order(names: Iterable[str], module: nn.Module) -> list[str]:
    """The names of parameters, of this rank and of others, as `module.named_parameters()` has them on one device.

    Those of one part of a pipelined model are in that order already, for one rank has them all.
    """
    # A rank has every module outside the pipelined models, so that positions among its own modules compare.
    positions = {name: position for position, (name, _) in enumerate(module.named_modules())}
    parts = {name: _part_order(model) for name, model in pipelined_models.pipelined_modules(module).items()}

    def key(name: str) -> tuple[int, int]:
        for model, order in parts.items():
            prefix = f"{model}." if model else ""
            if name.startswith(prefix):
                inside = name.removeprefix(prefix)
                part = max((part for part in order if inside.startswith(f"{part}.")), key=len, default="")
                return positions[model], order.get(part, -1)
        return positions[name.rpartition(".")[0]], -1

    return sorted(names, key=key)


def _part_order(model: PipelineModule) -> dict[str, int]:
    """The position of each part among a model's modules: parts in one container follow each other."""
    tree: dict[str, Any] = {}
    for part in model.part_names:
        node = tree
        for step in part.split("."):
            node = node.setdefault(step, {})
    return {name: position for position, name in enumerate(_leaves(tree, ""))}


def _leaves(tree: dict[str, Any], prefix: str) -> Iterable[str]:
    for step, below in tree.items():
        if below:
            yield from _leaves(below, f"{prefix}{step}.")
        else:
            yield f"{prefix}{step}"

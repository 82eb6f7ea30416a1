"""The order in which the unsplit module has its parameters, known to every rank.

torch numbers an optimizer's parameters; a checkpoint names them, in this order, so that one device can number them.
"""

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from lightning_megatron.any_module.cut_model import CutModel
from lightning_megatron.any_module.pipelined_modules import pipelined_modules
from lightning_megatron.comm.collectives import merge_objects
from lightning_megatron.mesh import Axis
from lightning_megatron.pipeline.module import PipelineModule

TensorNames = Collection[tuple[str, ...]]
"""Names of all tensors of a rank, in the order that its module has them, for each of the ranks that differ."""


def names_on_ranks(module: nn.Module, world: Axis) -> TensorNames:
    """Names of the tensors of all ranks. Collective.

    A rank has every tensor of its stages, but its optimizer may step only some of them.
    """
    own = [tuple(module.state_dict(keep_vars=True))]
    return merge_objects(own, world, lambda lists: list(dict.fromkeys(names for one in lists for names in one)))


def in_module_order(names: Iterable[str], module: nn.Module, on_ranks: TensorNames) -> list[str]:
    """The names of tensors, of this rank and of others, as the state of `module` has them on one device.

    `on_ranks` is what `names_on_ranks` gives.
    """
    # A rank has every module outside the pipelined models, and of a cut network all modules without some weights.
    # Positions among its own modules compare therefore.
    positions = {name: position for position, (name, _) in enumerate(module.named_modules())}
    models = pipelined_modules(module).items()
    parts = {name: _part_order(model) for name, model in models if not isinstance(model, CutModel)}
    inside: dict[str, dict[str, int]] = {}

    def key(name: str) -> tuple[int, int, int]:
        for model, order in parts.items():
            prefix = f"{model}." if model else ""
            if name.startswith(prefix):
                within = name.removeprefix(prefix)
                part = max((part for part in order if within.startswith(f"{part}.")), key=len, default="")
                return positions[model], order.get(part, -1), place(name, f"{prefix}{part}." if part else prefix)
        parent = name.rpartition(".")[0]
        return positions[parent], -1, place(name, f"{parent}." if parent else "")

    def place(name: str, prefix: str) -> int:
        """Position of a name among those with the prefix."""
        if prefix not in inside:
            having = [[one for one in on_rank if one.startswith(prefix)] for on_rank in on_ranks]
            # A rank that has a tied weight alone does not know its place.
            longest = max(having, key=len) if having else []
            inside[prefix] = {one: position for position, one in enumerate(longest)}
        return inside[prefix].get(name, -1)

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

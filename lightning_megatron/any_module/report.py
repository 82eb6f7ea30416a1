"""What a plan makes of a network, in words: stages, cut linears and experts, what stays whole, what a rank holds."""

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from lightning_megatron.any_module.around_layers import removable
from lightning_megatron.any_module.cut_experts import expert_faults, expert_modules, expert_weights, shared_experts
from lightning_megatron.any_module.layer_list import other_lists
from lightning_megatron.any_module.plan import ModelPlan
from lightning_megatron.any_module.tensor_styles import (
    BY_INPUTS,
    EMBEDDING,
    cut_by,
    is_by_outputs,
    matching,
    pattern_of,
    reason_of_whole,
)
from lightning_megatron.mesh import Sizes
from lightning_megatron.pipeline.layout import assign_alike
from lightning_megatron.pipeline.module import PipelineModule
from lightning_megatron.sharding import Shard, sharded_parameters


def report_of(module: nn.Module, name: str, plan: ModelPlan, sizes: Sizes) -> str:
    """A text for a network, the child `name` of `module`, over `sizes.tp`, `sizes.ep` and `sizes.num_stages` ranks.

    Raises ValueError where the layers are fewer than the stages.
    """
    network = module.get_submodule(name)
    layers, _ = plan.layers_in(name, network)
    styles = plan.styles_in(name, network)
    cut = {one: style for one, _, style in cut_by(network, styles, sizes.tp)} if sizes.tp > 1 else {}
    blocks = [_layers(network, layers, plan, sizes)]
    if sizes.tp > 1:
        blocks.append(_linears(network, styles, cut, sizes.tp))
    if sizes.ep > 1 or (sizes.tp > 1 and any(True for _ in expert_modules(network))):
        blocks.append(_experts(network, sizes))
    readers = plan.readers_in(module, name, layers) if layers and sizes.num_stages > 1 else {}
    if isinstance(network, PipelineModule) and sizes.num_stages > 1:
        blocks.append(
            [f"parameters: {_num_parameters(network):,}; what each rank holds lightning-megatron plan forecasts"]
        )
    else:
        blocks.append(_held(network, layers, cut, removable(network, layers, readers, cut), sizes))
    return "\n".join(line for block in blocks for line in block)


def _layers(network: nn.Module, layers: Sequence[str], plan: ModelPlan, sizes: Sizes) -> list[str]:
    if isinstance(network, PipelineModule):
        return [f"layers: {len(network.layer_names)}, which the model gives to stages by itself"]
    if not layers:
        return ["layers: no list of like modules was found; name one with ModelPlan(layers=...)"]
    kinds = ", ".join(dict.fromkeys(type(network.get_submodule(layer)).__name__ for layer in layers))
    how = "named by the plan" if plan.layers else "the list of like modules with most parameters"
    lists = ", ".join(dict.fromkeys(layer.rpartition(".")[0] for layer in layers))
    lines = [f"layers: {len(layers)} of {kinds} in {lists} ({how})"]
    if sizes.num_stages > 1:
        own = enumerate(_stages(layers, sizes))
        lines += [f"  stage {stage}: {layers[part.start]} to {layers[part.stop - 1]}" for stage, part in own]
        lines += _uncut_lists(network, layers)
    return lines


def _uncut_lists(network: nn.Module, layers: Sequence[str]) -> list[str]:
    """Lines about lists that stages do not cut, and that hold more than a hundredth of the network."""
    counts = {name: _num_parameters(child) for name, child in other_lists(network, layers).items()}
    return [
        f"  not cut: {name}, of {count:,} parameters; where the forward runs it by itself in front of the layers or "
        "behind them, ModelPlan(layers=...) names both lists, in their order"
        for name, count in counts.items()
        if 100 * count > _num_parameters(network)
    ]


def _num_parameters(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _stages(layers: Sequence[str], sizes: Sizes) -> tuple[range, ...]:
    return assign_alike(len(layers), sizes.num_stages, sizes.stage_layout)


def _linears(network: nn.Module, styles: Mapping[str, str], cut: Mapping[str, str], size: int) -> list[str]:
    groups: dict[tuple[str, str], int] = {}
    # Whose lines come later.
    experts = {found for found, _ in expert_modules(network)}
    for found, _, style in matching(network, styles):
        if found in experts:
            continue
        what = style if found in cut else f"whole: {reason_of_whole(network, styles, found, size)}"
        key = (pattern_of(found), what)
        groups[key] = groups.get(key, 0) + 1
    named = {found for found, _, _ in matching(network, styles)}
    built = {name.rpartition(".")[0] for name in _built_cut(network)}
    for found, child in network.named_modules():
        if found in built:
            key = (pattern_of(found), f"cut by itself: a {type(child).__name__}")
            groups[key] = groups.get(key, 0) + 1
        elif isinstance(child, nn.Linear) and found not in named:
            key = (pattern_of(found), "whole: no style")
            groups[key] = groups.get(key, 0) + 1
        elif found not in named and _is_other_matrix(child):
            key = (pattern_of(found), f"whole: a {type(child).__name__}, and nn.Linear alone is cut")
            groups[key] = groups.get(key, 0) + 1
    if not groups:
        return ["tensor parallel: the network has no linears"]
    width = max(len(pattern) for pattern, _ in groups)
    return [
        "tensor parallel:",
        *(f"  {pattern:{width}}  {what} ({count})" for (pattern, what), count in groups.items()),
        *([] if cut or built else ["  nothing is cut, and a run over these ranks is refused"]),
    ]


def _built_cut(network: nn.Module) -> dict[str, Shard]:
    """Shards of the weights that the package's layers build in part on each rank of tp, by name."""
    return {
        name: shard
        for name, _, shard in sharded_parameters(network)
        if shard.axis is not None and shard.axis.name in ("tp", "etp")
    }


def _is_other_matrix(module: nn.Module) -> bool:
    """Whether a module multiplies by a matrix as a linear does, and is none of torch's: GPT-2's Conv1D."""
    weight = module._parameters.get("weight")
    is_known = isinstance(module, (nn.Linear, nn.Embedding))
    return weight is not None and weight.dim() == 2 and not is_known and not any(True for _ in module.children())


def _experts(network: nn.Module, sizes: Sizes) -> list[str]:
    groups: dict[tuple[str, int], int] = {}
    for name, module in expert_modules(network):
        key = (pattern_of(name), module.num_experts)
        groups[key] = groups.get(key, 0) + 1
    if not groups:
        return ["experts: the network has none as transformers' models have them"]
    if faults := expert_faults(network, sizes):
        return [f"experts: {fault}" for fault in faults]
    axis, size = ("ep", sizes.ep) if sizes.ep > 1 else ("tp", sizes.tp)
    return [
        f"experts: {name}, {each} each, "
        + (f"{each // size} a rank of {axis}" if each % size == 0 else f"whole: {axis} ({size}) does not divide them")
        + f" ({count})"
        for (name, each), count in groups.items()
    ]


def _held(
    network: nn.Module,
    layers: Sequence[str],
    cut: Mapping[str, str],
    readers: Mapping[str, Collection[int]],
    sizes: Sizes,
) -> list[str]:
    """Parameters of the network, and of the rank that holds most."""
    everywhere = range(len(layers) + 1)
    stages = _stages(layers, sizes) if layers else (everywhere,)
    by_rank: list[set[int]] = [set() for _ in range(sizes.pp)]
    for stage, own in enumerate(stages):
        by_rank[sizes.pp_rank_of(stage)] |= {*own, *([len(layers)] if stage == len(stages) - 1 else [])}
    held, on_all = [0] * sizes.pp, 0
    cut_experts = shared_experts(network, sizes.tp if sizes.ep == 1 else 1)
    experts = {weight for module in cut_experts for _, weight in expert_weights(module)}
    num_parts = sizes.tp if sizes.ep == 1 else sizes.ep
    built = _built_cut(network)
    for name, weight in network.named_parameters():
        owner = name.rpartition(".")[0]
        style = cut.get(owner, "")
        is_cut = is_by_outputs(style) or style == EMBEDDING or (style in BY_INPUTS and weight.dim() > 1)
        is_cut |= name in built
        count = weight.numel() // (sizes.tp if is_cut else num_parts if weight in experts else 1)
        layer = next((index for index, layer in enumerate(layers) if name.startswith(f"{layer}.")), None)
        read = next((found for one, found in readers.items() if name.startswith(f"{one}.")), everywhere)
        users = {layer} if layer is not None else set(read)
        is_held = [not users.isdisjoint(own) for own in by_rank]
        held = [total + count * own for total, own in zip(held, is_held, strict=True)]
        on_all += count * (layer is None and all(is_held))
    whole = _num_parameters(network)
    lines = [f"parameters: {whole:,}, of which a rank holds at most {max(held):,}"]
    if sizes.num_stages > 1:
        lines.append(f"  {on_all:,} of them stand around the layers, and are on every stage")
    return lines

"""An optimizer's state as pieces by parameter name, and preparation of a torch optimizer to load them.

Tensors of a parameter's shape (moments) are sharded as the parameter. Scalars (step) are saved unsharded, and so are
tensors of other shapes (row and column means) of unsharded parameters. The rest is plain data: hyperparameters of each
param group with the NAMES of its parameters, and states that are no tensors. Each rank knows only the names of its own
stages; `merge_rest` joins what all ranks know.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.checkpoint.state import Piece, Slot, split_optimizer_name
from lightning_megatron.checkpoint.tensor_entry import TensorEntry
from lightning_megatron.comm.collectives import merge_objects
from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import shard_of

Rest = dict[str, Any]
"""{"groups": [{"params": [name, ...], hyperparameter: value, ...}, ...], "state": {name: {state key: plain value}}}"""

# Keys of a param group that an optimizer on another mesh has by itself.
_LOCAL_KEYS = ("params", "param_names")
# Those by which torch chooses the kernels of a step.
_KERNELS = ("foreach", "fused")


def pieces_of_optimizer(
    optimizer: Optimizer, names: Mapping[Tensor, str | Slot], index: int = 0
) -> tuple[dict[str, list[Piece]], Rest]:
    """Pieces of this rank's optimizer state, which share its memory, and the rest as this rank knows it.

    `names` gives each parameter's name in the unsplit model or, where the optimizer steps master weights, their slot;
    `index` tells several optimizers of one module apart.
    """
    pieces: dict[str, list[Piece]] = {}
    rest: Rest = {"groups": [], "state": {}}
    for group, slots in _groups(optimizer, names):
        hyperparameters = {key: value for key, value in group.items() if key not in _LOCAL_KEYS}
        # What the strategy chose for where it steps is nothing to another run.
        hyperparameters |= {key: optimizer.defaults[key] for key in _KERNELS if key in group}
        rest["groups"].append({"params": [slot.name for slot in slots], **hyperparameters})
        for stepped, slot in zip(group["params"], slots, strict=True):
            for key, value in optimizer.state.get(stepped, {}).items():
                if not isinstance(key, str) or "." in key:
                    raise ValueError(f"{_title(optimizer)} keeps {key!r} for {slot.name!r}; the key must have no dots")
                if isinstance(value, Tensor):
                    pieces[f"optimizer.{index}.{slot.name}.{key}"] = _state_pieces(optimizer, stepped, slot, key, value)
                else:
                    rest["state"].setdefault(slot.name, {})[key] = value
    return pieces, rest


def merge_rest(rest: Rest, world: Axis) -> Rest:
    """The merged rest of all ranks of the axis, on each of them.

    Raises ValueError where ranks disagree about a hyperparameter or a state.
    """
    merged = merge_objects(_PartlyMerged(world.rank, rest), world, _merged)
    if merged.fault:
        raise ValueError(merged.fault)
    return merged.rest


@dataclass(frozen=True)
class _PartlyMerged:
    """The merged rest of some ranks, the first of them, and the first fault that was found."""

    rank: int
    rest: Rest
    fault: str = ""


def _merged(parts: list[_PartlyMerged]) -> _PartlyMerged:
    first = parts[0]
    try:
        if faults := [part.fault for part in parts if part.fault]:
            raise ValueError(faults[0])
        counts = {part.rank: len(part.rest["groups"]) for part in parts}
        if len(set(counts.values())) > 1:
            raise ValueError(
                f"an optimizer has {list(counts.values())} param groups on ranks {', '.join(map(str, counts))}; every "
                "rank must make the same groups in the same order, empty ones too"
            )
        by_rank = [{part.rank: part.rest["groups"][index] for part in parts} for index in range(counts[first.rank])]
        groups = [_merged_group(index, one) for index, one in enumerate(by_rank)]
        state: dict[str, Any] = {}
        for name, values in (item for part in parts for item in part.rest["state"].items()):
            if not _same(state.setdefault(name, values), values):
                raise ValueError(f"ranks disagree about the optimizer's state of {name!r}: {state[name]} and {values}")
    except ValueError as error:
        return _PartlyMerged(first.rank, first.rest, str(error))
    return _PartlyMerged(first.rank, {"groups": groups, "state": state})


def rebuild_optimizer(
    optimizer: Optimizer,
    names: Mapping[Tensor, str | Slot],
    rest: Rest,
    entries: Mapping[str, TensorEntry],
    index: int = 0,
) -> dict[str, list[Piece]]:
    """Prepares the optimizer for loading: takes over saved groups, makes zero states, and returns their pieces.

    `rest` and `entries` come from the checkpoint. A parameter that has no state there gets none. Raises ValueError
    when groups do not hold the same parameters.
    """
    saved_groups = rest["groups"]
    groups = list(_groups(optimizer, names))
    if len(groups) != len(saved_groups):
        raise ValueError(
            f"the checkpoint has {len(saved_groups)} param groups of optimizer {index}, {_title(optimizer)} has "
            f"{len(groups)}; make the groups that it was saved with"
        )
    shapes = _saved_states(entries, index)
    template: dict[str, Any] = {"state": {}, "param_groups": []}
    position = 0
    for number, ((group, slots), saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if strangers := sorted({slot.name for slot in slots} - set(saved["params"])):
            raise ValueError(
                f"param group {number} of optimizer {index} did not hold {_some(strangers)} when the checkpoint was "
                "saved; make the groups that it was saved with. Where on_load_checkpoint renames trained weights, "
                "go on from the file that `lightning-megatron checkpoint consolidate` writes: it numbers their states"
            )
        positions = []
        for stepped, slot in zip(group["params"], slots, strict=True):
            state = _blank_state(stepped, slot, shapes.get(slot.name, {})) | rest["state"].get(slot.name, {})
            if state and slot.states != "elsewhere":
                template["state"][position] = state
            positions.append(position)
            position += 1
        own = {key: group[key] for key in _KERNELS if key in group}
        template["param_groups"].append({**saved, **own, "params": positions})
    optimizer.load_state_dict(template)
    return pieces_of_optimizer(optimizer, names, index)[0]


def _groups(optimizer: Optimizer, names: Mapping[Tensor, str | Slot]) -> Iterator[tuple[dict[str, Any], list[Slot]]]:
    for number, group in enumerate(optimizer.param_groups):
        slots = []
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(
                    f"param group {number} of {_title(optimizer)} holds a parameter of shape {tuple(parameter.shape)} "
                    "that is not the module's; a checkpoint names states by the module's parameters"
                )
            name = names[parameter]
            slots.append(name if isinstance(name, Slot) else Slot.full(name, parameter))
        yield group, slots


def _state_pieces(optimizer: Optimizer, stepped: Tensor, slot: Slot, key: str, value: Tensor) -> list[Piece]:
    if value.shape == stepped.shape and slot.states == "as the part":
        return slot.pieces(value)
    if value.numel() == 1 or slot.is_unsharded:
        return [Piece.unsharded(value)]
    global_shape = shard_of(slot.parameter).global_shape
    raise ValueError(
        f"{_title(optimizer)} keeps {key!r} of shape {tuple(value.shape)} for {slot.name!r}, whose part here is "
        f"{tuple(stepped.shape)} of {global_shape}; a state of a cut parameter must be a scalar "
        "or have the parameter's shape, or another mesh could not read it"
    )


def _saved_states(entries: Mapping[str, TensorEntry], index: int) -> dict[str, dict[str, TensorEntry]]:
    """Saved entries of each parameter name, by state key."""
    states: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        parts = split_optimizer_name(name)
        if parts is not None and parts[0] == index:
            states.setdefault(parts[1], {})[parts[2]] = entry
    return states


def _blank_state(stepped: Tensor, slot: Slot, saved: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Zeros, padding included, for the saved state; torch moves and converts them as it would the state."""
    # States of a whole weight have the shapes that they were saved with, whatever that of its part.
    global_shape = None if slot.states == "whole" else shard_of(slot.parameter).global_shape
    return {
        key: torch.zeros(stepped.shape if entry.shape == global_shape else entry.shape, dtype=entry.dtype)
        for key, entry in saved.items()
    }


def _merged_group(index: int, by_rank: dict[int, dict[str, Any]]) -> dict[str, Any]:
    first = min(by_rank)
    merged = dict(by_rank[first])
    for rank, group in by_rank.items():
        for key in sorted(merged.keys() | group.keys() - {"params"}):
            if key != "params" and not _same(merged.get(key), group.get(key)):
                raise ValueError(
                    f"param group {index} has {key} = {merged.get(key)!r} on rank {first} and {group.get(key)!r} on "
                    f"rank {rank}; every rank must make the same groups in the same order, empty ones too"
                )
    merged["params"] = list(dict.fromkeys(name for group in by_rank.values() for name in group["params"]))
    return merged


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal, through containers that may hold tensors."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _title(optimizer: Optimizer) -> str:
    return type(optimizer).__qualname__


def _some(names: list[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")

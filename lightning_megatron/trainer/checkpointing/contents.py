"""What of a run goes into a checkpoint, of whatever kind: this rank's pieces of tensors, and values that are none.

Lightning asks every rank for a dictionary and hands it to the strategy. Tensors under the module's names become pieces,
each under its name in the unsplit model; optimizer states come from the optimizers themselves.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.checkpoint import LoadReport, Piece, Slot, StatesPlace, merge_rest, pieces_of_optimizer
from lightning_megatron.checkpoint.optimizer import Rest
from lightning_megatron.checkpoint.state import OTHER_STATES
from lightning_megatron.checkpoint.torch_index import OPTIMIZERS
from lightning_megatron.comm.collectives import all_reduce
from lightning_megatron.mesh import Axis
from lightning_megatron.optim.data_parallel_comm import DataParallelComm
from lightning_megatron.sharding import without_values
from lightning_megatron.trainer.checkpointing.parameter_order import in_module_order, names_on_ranks

# Keys of Lightning's dictionary.
WEIGHTS = "state_dict"
OPTIMIZER_STATES = "optimizer_states"
_CALLBACKS = "callbacks"
# Where the states of a stepped weight are, by whether this rank owns it.
_STATES: Mapping[bool | None, StatesPlace] = {None: "as the part", True: "whole", False: "elsewhere"}


@dataclass(frozen=True)
class MasterSlots:
    """Weights that optimizers step in place of parameters, or whole where ranks hold parts, as slices of parameters."""

    slots: Mapping[Tensor, Slot] = field(default_factory=dict)
    """Slice of a parameter that each stepped weight is, and where its states are."""
    lowered: frozenset[str] = frozenset()
    """Names of the parameters that are narrower than their master weights, wherever those are."""
    sharded: frozenset[str] = frozenset()
    """Names of the parameters whose values are in master weights alone, wherever those are."""
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """What this rank had of parameters that are whole again, by name, without values."""

    @property
    def saved(self) -> frozenset[str]:
        """Names of the parameters in whose place their master weights are saved."""
        return self.lowered | self.sharded

    def before_whole(self, module: pl.LightningModule, stepped: Set[Tensor]) -> "MasterSlots":
        """These, and the parameters of a module that optimizers step as slices that are all of what this rank has.

        They hold no weight that is not stepped: those of the module are about to become whole.
        """
        parts = {name: without_values(one) for name, one in module.named_parameters()} | dict(self.parts)
        own = {one: name for name, one in module.named_parameters() if one in stepped}
        slots: dict[Tensor, Slot] = {one: Slot.full(name, parts[name]) for one, name in own.items()}
        held = {one: slot for one, slot in self.slots.items() if one in stepped or slot.name in self.saved}
        slots |= {one: replace(slot, parameter=without_values(slot.parameter)) for one, slot in held.items()}
        return replace(self, slots=slots, parts=parts)

    @staticmethod
    def of(dp_comm: DataParallelComm) -> "MasterSlots":
        """Master weights of a fit that runs or has ended."""
        weights = dp_comm.master_weights
        slots = {
            shard.tensor: Slot(
                shard.param.name,
                shard.param.parameter,
                shard.range.start,
                shard.range.end,
                _STATES[dp_comm.owned.owns(shard.tensor)],
            )
            for shard in (*dp_comm.gradients.param_shards, *(() if weights is None else weights.frozen_shards))
        }
        if weights is None:
            # All others are stepped as they are.
            return MasterSlots({one: slot for one, slot in slots.items() if slot.states != "as the part"})
        return MasterSlots(slots, frozenset(weights.lowered_names()), frozenset(weights.sharded_names()))


@dataclass(frozen=True)
class Contents:
    """Lightning's dictionary as this rank's pieces of tensors, and all values that are no tensors of the module."""

    pieces: Mapping[str, Piece | list[Piece]]
    meta: Mapping[str, Any]

    @staticmethod
    def of(
        checkpoint: Mapping[str, Any],
        module: pl.LightningModule,
        optimizers: Iterable[Optimizer],
        master_slots: MasterSlots,
        world: Axis,
    ) -> "Contents":
        """The contents of a dictionary that Lightning made. Collective over the world.

        Weights that have master weights are those.
        """
        live = live_of(module)
        # A tied weight is saved under all of its names, and has master weights under the first.
        first_names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        own = {s.name: (master, s) for master, s in master_slots.slots.items() if s.name in master_slots.saved}
        # A weight whose master weights are all on other data-parallel ranks is written by those.
        elsewhere = master_slots.saved - own.keys()
        pieces: dict[str, Piece | list[Piece]] = {}
        meta: dict[str, Any] = {}
        for key, value in checkpoint.items():
            if key == OPTIMIZER_STATES:
                continue
            if key == WEIGHTS or is_state_of(value, live):
                prefix = "" if key == WEIGHTS else f"{key}."
                tensors = {name: tensor for name, tensor in value.items() if isinstance(tensor, Tensor)}
                for name, tensor in tensors.items():
                    is_live = name in live and tensor.data_ptr() == live[name].data_ptr()
                    first_name = first_names.get(live[name], name) if is_live else name
                    if is_live and first_name in own:
                        master, slot = own[first_name]
                        pieces[prefix + name] = slot.pieces(master)
                    elif not (is_live and first_name in elsewhere):
                        like = live.get(name, tensor)
                        # A callback may have a copy of the part.
                        part = master_slots.parts.get(first_names.get(like, name), like)
                        is_part = part.shape == tensor.shape != like.shape
                        pieces[prefix + name] = Piece.all_like(part if is_part else like, tensor)
                if key != WEIGHTS:
                    meta.setdefault(OTHER_STATES, []).append(key)
                continue
            meta[key] = value
        if OPTIMIZER_STATES in checkpoint:
            names = names_of(module, master_slots)
            meta[OPTIMIZERS] = []
            for index, optimizer in enumerate(optimizers):
                moments, rest = pieces_of_optimizer(optimizer, names, index)
                pieces |= moments
                meta[OPTIMIZERS].append(merged_rest(rest, module, world))
        return Contents(pieces, meta)


def merged_rest(own: Rest, module: pl.LightningModule, world: Axis) -> Rest:
    """What all ranks know of an optimizer besides tensors, its parameters in the order of one device. Collective."""
    rest = merge_rest(own, world)
    # Where every rank steps all parameters, each has them in the order in which the user gave them.
    is_apart = [group["params"] for group in rest["groups"]] != [group["params"] for group in own["groups"]]
    if int(all_reduce(torch.tensor(int(is_apart)), world, "max")):
        on_ranks = names_on_ranks(module, world)
        for group in rest["groups"]:
            group["params"] = in_module_order(group["params"], module, on_ranks)
    return rest


def live_of(module: pl.LightningModule) -> dict[str, Tensor]:
    """Parameters (that carry their shard) and persistent buffers, by name."""
    state = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def names_of(module: pl.LightningModule, master_slots: MasterSlots) -> dict[Tensor, str | Slot]:
    """Name, or slice of a named parameter, of each tensor that an optimizer may step."""
    names: dict[Tensor, str | Slot] = {parameter: name for name, parameter in module.named_parameters()}
    return names | dict(master_slots.slots)


def is_state_of(value: Any, live: Mapping[str, Tensor]) -> bool:
    """Whether a value is tensors under the module's names, as the weights that an averaging callback saves."""
    return (
        isinstance(value, dict) and bool(value) and all(n in live and isinstance(t, Tensor) for n, t in value.items())
    )


def require_as_many(saved: Sequence[Any], optimizers: Sequence[Optimizer]) -> None:
    """Raises ValueError where the module has more or fewer optimizers than the checkpoint."""
    if len(optimizers) != len(saved):
        raise ValueError(
            f"the checkpoint has {len(saved)} optimizers, the module has {len(optimizers)}; "
            "return the optimizers that it was saved with, and leave all of its optimizer_states in on_load_checkpoint"
        )


def warn_of_misfits(report: LoadReport, path: str) -> None:
    """Warns of what did not fit and was left as it was."""
    for line in report.faults():
        rank_zero_warn(f"checkpoint {path}, loaded with strict_loading=False: {line}")


def copies_of(live: Mapping[str, Tensor], master_slots: MasterSlots) -> dict[str, Tensor]:
    """Copies of this rank's tensors, to be loaded: with strict_loading off, what the checkpoint lacks must come back as
    it is. As wide as master weights."""
    return {
        name: tensor.detach().to(torch.float32 if name in master_slots.lowered else tensor.dtype, copy=True)
        for name, tensor in live.items()
    }


def name_classes(checkpoint: dict[str, Any]) -> None:
    """Names the classes under which callbacks have their states: no class is loaded as plain data."""
    if states := checkpoint.get(_CALLBACKS):
        checkpoint[_CALLBACKS] = {str(key) if isinstance(key, type) else key: state for key, state in states.items()}


def know_classes(checkpoint: dict[str, Any], callbacks: Iterable[pl.Callback]) -> None:
    """Puts the classes of the callbacks that there are in place of their names, as they were before the save."""
    states = checkpoint.get(_CALLBACKS, {})
    for callback in callbacks:
        # Lightning says that it is a text; users give their class.
        key: Any = callback.state_key
        if isinstance(key, type) and str(key) in states:
            states[key] = states.pop(str(key))

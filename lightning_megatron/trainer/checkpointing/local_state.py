"""All that one rank holds, as tensors and plain data, and back: only the same rank of the same mesh can resume from it.

    sets/{key}/{name}            weights, and further sets of tensors under the module's names, as Lightning's
                                 dictionary has them: this rank's part with its padding
    master weights/{name}          those of this rank, where a weight is narrower
    optimizer.{i}.{name}.{key}   states

No tensor is gathered, and none is cut.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron import checkpoint as directory
from lightning_megatron.checkpoint import Slot, TensorEntry
from lightning_megatron.checkpoint.optimizer import Rest
from lightning_megatron.mesh import Mesh
from lightning_megatron.trainer.checkpointing.contents import (
    OPTIMIZER_STATES,
    WEIGHTS,
    MasterSlots,
    is_state_of,
    live_of,
    names_of,
)
from lightning_megatron.trainer.checkpointing.hook_dictionary import SavedOptimizers
from lightning_megatron.trainer.checkpointing.hyper_parameters import plain_hyper_parameters

# Keys of the metadata.
_SETS = "local_sets"
_RESTS = "local_optimizers"


@dataclass(frozen=True)
class LocalState:
    """State that one rank saved."""

    tensors: Mapping[str, Tensor]
    meta: Mapping[str, Any]

    @staticmethod
    def of(
        checkpoint: Mapping[str, Any],
        module: pl.LightningModule,
        optimizers: Iterable[Optimizer],
        master_slots: MasterSlots,
    ) -> "LocalState":
        """State in Lightning's dictionary; tensors share memory with the run."""
        live, names = live_of(module), names_of(module, master_slots)
        tensors: dict[str, Tensor] = {}
        meta: dict[str, Any] = {_SETS: [], _RESTS: []}
        for key, value in checkpoint.items():
            if key == WEIGHTS or is_state_of(value, live):
                tensors |= {f"sets/{key}/{name}": one for name, one in value.items() if isinstance(one, Tensor)}
                meta[_SETS].append(key)
            elif key != OPTIMIZER_STATES:
                meta[key] = value
        tensors |= dict(_master_weights(master_slots))
        for index, optimizer in enumerate(optimizers):
            tensors |= dict(_states(optimizer, names, index))
            meta[_RESTS].append(directory.pieces_of_optimizer(optimizer, names, index)[1])
        plain = plain_hyper_parameters(meta)
        return LocalState({name: tensor.detach() for name, tensor in tensors.items()}, plain)

    @staticmethod
    def read(path: Path) -> "LocalState":
        """State that was saved at the path, every byte of it checked.

        Raises ValueError, OSError or RuntimeError where it is not there or not as it was written.
        """
        meta = directory.read_meta(path)
        tensors = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in directory.read_entries(path).items()}
        directory.load(path, tensors, world=Mesh.single().world)
        return LocalState(tensors, meta)

    def misfits(self, module: pl.LightningModule) -> list[str]:
        """Names of the module's tensors that it does not have, or has in another shape."""
        saved = self._set(WEIGHTS)
        return [
            name
            for name, tensor in live_of(module).items()
            if tensor.numel() and (name not in saved or saved[name].shape != tensor.shape)
        ]

    def dictionary(self, module: pl.LightningModule) -> dict[str, Any]:
        """Lightning's dictionary, with this state instead of the optimizers'."""
        live = live_of(module)
        checkpoint = {key: value for key, value in self.meta.items() if key not in (_SETS, _RESTS)}
        for key in self.meta[_SETS]:
            checkpoint[key] = {name: one.to(live.get(name, one).dtype) for name, one in self._set(key).items()}
        # A tensor without elements is never written.
        checkpoint[WEIGHTS] |= {name: tensor.detach() for name, tensor in live.items() if not tensor.numel()}
        checkpoint[OPTIMIZER_STATES] = SavedOptimizers(self, self.meta[_RESTS])
        return checkpoint

    def load_optimizers(
        self,
        rests: Sequence[Rest],
        module: pl.LightningModule,
        optimizers: Iterable[Optimizer],
        master_slots: MasterSlots,
    ) -> None:
        """Fills the optimizers, with the param groups of `rests`, and the master weights, which are there by now."""
        names, optimizers = names_of(module, master_slots), list(optimizers)
        if len(optimizers) != len(rests):
            raise ValueError(
                f"the local checkpoint has {len(rests)} optimizers, the module has {len(optimizers)}; "
                "return the optimizers that it was saved with"
            )
        entries = {name: TensorEntry(tuple(one.shape), one.dtype, ()) for name, one in self.tensors.items()}
        with torch.no_grad():
            for index, (optimizer, rest) in enumerate(zip(optimizers, rests, strict=True)):
                directory.rebuild_optimizer(optimizer, names, rest, entries, index)
                self._fill(_states(optimizer, names, index))
            self._fill(_master_weights(master_slots))

    def _fill(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named:
            saved = self.tensors[name]
            assert saved.shape == tensor.shape, name
            tensor.copy_(saved)

    def _set(self, key: str) -> dict[str, Tensor]:
        prefix = f"sets/{key}/"
        return {name.removeprefix(prefix): one for name, one in self.tensors.items() if name.startswith(prefix)}


def _master_weights(master_slots: MasterSlots) -> Iterator[tuple[str, Tensor]]:
    for master, slot in master_slots.slots.items():
        if slot.name in master_slots.saved:
            yield f"master weights/{slot.name}", master


def _states(optimizer: Optimizer, names: Mapping[Tensor, str | Slot], index: int) -> Iterator[tuple[str, Tensor]]:
    for group in optimizer.param_groups:
        for stepped in group["params"]:
            owner = names[stepped]
            name = owner if isinstance(owner, str) else owner.name
            for key, value in optimizer.state.get(stepped, {}).items():
                if isinstance(value, Tensor):
                    yield f"optimizer.{index}.{name}.{key}", value

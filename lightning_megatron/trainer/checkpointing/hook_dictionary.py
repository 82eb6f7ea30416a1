"""What the hooks `on_save_checkpoint` and `on_load_checkpoint` find in Lightning's dictionary, and what is taken back.

They run on every rank, between Lightning and the checkpoint, and see what a rank has. A hook that loads is shown what
does not fit too, unsharded, so that it can rename, resize or put back what it left out; then all must fit. Of
optimizers it may edit the param groups; states are read and written slice by slice, when no hook looks.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_megatron.checkpoint import LoadReport, Piece
from lightning_megatron.checkpoint.optimizer import Rest
from lightning_megatron.comm.collectives import merge_objects
from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import shard_of
from lightning_megatron.trainer.checkpointing.contents import OPTIMIZER_STATES, live_of

_ON_SAVE = (
    "on_save_checkpoint cannot read checkpoint['optimizer_states']: each rank's part is written from the optimizers "
    "themselves after it. Read self.optimizers() instead, which has what this rank holds"
)
_ON_LOAD = (
    "on_load_checkpoint cannot read the 'state' of checkpoint['optimizer_states'], which is read once the optimizers "
    "exist; it may edit the 'param_groups'. Change states in on_train_start, by self.optimizers()"
)


class UnreadStates(Mapping[Any, Any]):
    """Stands for what a hook cannot read; raises RuntimeError, which says why, once it does."""

    def __init__(self, why: str) -> None:
        self._why = why

    def _refuse(self) -> NoReturn:
        raise RuntimeError(self._why)

    def __getitem__(self, key: Any) -> Any:
        self._refuse()

    def __iter__(self) -> Iterator[Any]:
        self._refuse()

    def __len__(self) -> int:
        self._refuse()


def unread_optimizer() -> dict[str, Any]:
    """The state of an optimizer in the dictionary that is to be saved."""
    return {"state": UnreadStates(_ON_SAVE), "param_groups": UnreadStates(_ON_SAVE)}


def require_unchanged_optimizers(checkpoint: Mapping[str, Any], num_optimizers: int) -> None:
    """Raises ValueError where a hook has put other optimizer states into a dictionary, which would not be saved."""
    states = checkpoint.get(OPTIMIZER_STATES)
    if states is None:
        return
    is_list = isinstance(states, list) and all(isinstance(one, dict) for one in states)
    is_own = is_list and all(
        isinstance(one.get(key), UnreadStates) for one in states for key in ("state", "param_groups")
    )
    if is_own and len(states) == num_optimizers:
        return
    raise ValueError(
        "on_save_checkpoint changed checkpoint['optimizer_states'], but each rank's part is written from the "
        "optimizers themselves; to save weights alone delete the key, or use save_weights_only=True"
    )


class SavedOptimizers(list[dict[str, Any]]):
    """Optimizers of a loaded dictionary: param groups with the names of their parameters, and states yet to be read."""

    def __init__(self, source: Any, rests: Sequence[Rest]) -> None:
        super().__init__({"param_groups": rest["groups"], "state": UnreadStates(_ON_LOAD)} for rest in rests)
        self.source = source
        """Where the states are read from."""
        self._states = [rest["state"] for rest in rests]

    @property
    def rests(self) -> list[Rest]:
        """What each optimizer has besides tensors, with the param groups as a hook left them."""
        if len(self) != len(self._states):
            raise ValueError(f"on_load_checkpoint left {len(self)} of {len(self._states)} optimizer_states; leave all")
        return [{"groups": one["param_groups"], "state": state} for one, state in zip(self, self._states, strict=True)]


def has_load_hook(module: pl.LightningModule) -> bool:
    """Whether the module has a hook `on_load_checkpoint`."""
    return is_overridden("on_load_checkpoint", module)


def show_misfits(
    weights: dict[str, Any], report: LoadReport, read: Callable[[Collection[str]], Mapping[str, Tensor]]
) -> None:
    """Puts into the weights of a rank what does not fit as the checkpoint has it, by `read`, for a hook to see."""
    for name in (*report.missing, *report.misshapen):
        weights.pop(name, None)
    weights |= read((*report.unexpected, *report.misshapen))


def fitted(weights: Mapping[str, Any], module: pl.LightningModule, world: Axis, *, strict: bool) -> dict[str, Any]:
    """This rank's part of the weights that `on_load_checkpoint` left, unsharded or as the rank has them. Collective.

    With `strict` raises ValueError, on all ranks, where they are not those of the module.
    """
    live, own = live_of(module), set(module.state_dict(keep_vars=True))
    of_any = merge_objects(own, world, _union)
    found = {
        name: _cut(value, live[name]) if name in live and isinstance(value, Tensor) else value
        for name, value in weights.items()
        # A stage has only some of the names.
        if name in own or name not in of_any
    }
    shapes = {n: (tuple(one.shape), tuple(live[n].shape)) for n, one in found.items() if n in live}
    misshapen = {n: f"{there} there, {here} asked for" for n, (there, here) in shapes.items() if there != here}
    # Each stage knows its own, and all raise together.
    all_misfits = merge_objects((live.keys() - found.keys(), found.keys() - own, misshapen), world, _merged)
    missing, unexpected, misshapen = all_misfits
    report = LoadReport(
        missing=tuple(sorted(missing)),
        unexpected=tuple(sorted(unexpected)),
        misshapen=dict(sorted(misshapen.items())),
    )
    if strict and (faults := report.faults()):
        head = f"on_load_checkpoint of {type(module).__name__} left weights that are not those of the module:"
        raise ValueError("\n  ".join([head, *faults]))
    return found


def _cut(value: Tensor, live: Tensor) -> Tensor:
    """This rank's part of a tensor that is not cut yet; the tensor as it is where it is this rank's."""
    if value.shape == live.shape or tuple(value.shape) != tuple(shard_of(live).global_shape):
        return value
    part = torch.zeros(live.shape, dtype=value.dtype, device=value.device)
    for piece in Piece.all_like(live, part):
        piece.tensor.copy_(piece.box.of(value))
    return part


def _merged(found: list[tuple[set[str], set[str], dict[str, str]]]) -> tuple[set[str], set[str], dict[str, str]]:
    """What any rank misses, has beyond its own, and has in another shape."""
    shapes = {name: text for *_, misshapen in found for name, text in misshapen.items()}
    return _union([missing for missing, *_ in found]), _union([unexpected for _, unexpected, _ in found]), shapes


def _union(sets: list[set[str]]) -> set[str]:
    return set().union(*sets)

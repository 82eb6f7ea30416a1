"""A LightningModule from a checkpoint: what `LightningModule.load_from_checkpoint` does, on a mesh too.

Of a directory it reads the weights alone, and gives the constructor the dataclasses that its annotations name.
"""

import inspect
import os
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar, get_type_hints

import lightning.pytorch as pl
import torch

from lightning_megatron.checkpoint import read_meta
from lightning_megatron.comm.raise_on_all_ranks import read_on_first_rank
from lightning_megatron.mesh import Mesh, ambient, ambient_mesh
from lightning_megatron.trainer.checkpointing import checkpoint_dict, single_file
from lightning_megatron.trainer.checkpointing.contents import MasterSlots
from lightning_megatron.trainer.checkpointing.hook_dictionary import fitted, has_load_hook
from lightning_megatron.trainer.checkpointing.hyper_parameters import rebuilt
from lightning_megatron.trainer.checkpointing.single_file import FileIO
from lightning_megatron.trainer.setup import model_checks, pipelined_models

_Module = TypeVar("_Module", bound=pl.LightningModule)


def load_from_checkpoint(
    cls: type[_Module],
    /,
    checkpoint_path: str | os.PathLike[str],
    map_location: torch.device | str | None = None,
    *,
    mesh: Mesh | None = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    **kwargs: Any,
) -> _Module:
    """A module of the class with the weights of the checkpoint, a directory or a file, or this rank's part on a mesh.

    It may be a module's own method too: `load_from_checkpoint = classmethod(lightning_megatron.load_from_checkpoint)`
    in the body of the class. The constructor gets the hyper-parameters that `save_hyperparameters` saved, overridden by
    `kwargs`; then `configure_model` and `on_load_checkpoint` are called. With no mesh it is the full module, or the
    part of the mesh that a running strategy set up; every rank of the mesh calls it. Weights are read on
    `map_location`, on the CPU if there is none. Without `strict`, or `strict_loading` of the module, what does not fit
    is left, with a warning. `weights_only=False` lets a file, never a directory, run code. Raises ValueError where the
    path is no checkpoint, or does not fit.
    """
    if not (isinstance(cls, type) and issubclass(cls, pl.LightningModule)):
        raise ValueError(
            f"the first argument of load_from_checkpoint ({cls!r}) must be the class of a LightningModule, and the "
            "second the path: load_from_checkpoint(MyModule, 'step=4.ckpt')"
        )
    path, io = os.fspath(checkpoint_path), FileIO()
    mesh = mesh if mesh is not None else ambient_mesh()
    meta: Mapping[str, Any]
    if single_file.is_file(path, mesh.world):
        meta = single_file.read(path, io, weights_only)
    else:
        meta = read_on_first_rank(partial(read_meta, path), mesh.world)
    module = cls(**_arguments(cls, meta, kwargs))
    if strict is None:
        strict = module.strict_loading
    with ambient(mesh):
        module.configure_model()
        pipelined_models.cut_plain_networks(module, mesh)
        model_checks.require_own_mesh(module, mesh)
        if map_location is not None:
            module.to(map_location)
        checkpoint = checkpoint_dict.load(
            path, module, MasterSlots(), mesh, mesh.world, io, weights_only, strict=strict
        )
        module.on_load_checkpoint(checkpoint)
        weights = checkpoint["state_dict"]
        if has_load_hook(module):
            weights = fitted(weights, module, mesh.world, strict=strict)
        module.load_state_dict(weights, strict=strict)
    return module


def _arguments(cls: type[pl.LightningModule], meta: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the constructor."""
    saved = dict(meta.get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {}))
    parameters = inspect.signature(cls.__init__).parameters
    name = meta.get(cls.CHECKPOINT_HYPER_PARAMS_NAME)
    if isinstance(name, str) and name in parameters and parameters[name].kind != inspect.Parameter.VAR_KEYWORD:
        # save_hyperparameters(an argument) saves what is in it.
        saved = {name: saved}
    takes_all = any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    # Those with an underscore are notes of LightningCLI to itself.
    saved = {key: value for key, value in saved.items() if not key.startswith("_") and (takes_all or key in parameters)}
    try:
        hints = get_type_hints(cls.__init__)
    except NameError:
        # An annotation names what is imported for type checkers only: then arguments are plain data.
        hints = {}
    missing = [
        name
        for name, parameter in list(parameters.items())[1:]
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        and name not in saved.keys() | given.keys()
    ]
    if missing:
        raise ValueError(
            f"{cls.__name__} needs {', '.join(missing)}, which the checkpoint does not have; give them by name, or "
            "save them: self.save_hyperparameters() in the constructor"
        )
    return {key: rebuilt(hints.get(key), value) for key, value in saved.items() if key not in given} | dict(given)

"""Hyper-parameters in a checkpoint: plain data of what `save_hyperparameters` saved, compared with those of a module.

Their classes come from the module's own constructor, by the annotations of its parameters; no name in a checkpoint is
ever imported.
"""

import os
import types
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn

KEYS = (pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, pl.LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY)
"""Keys of Lightning's dictionary with the hyper-parameters of the module and of the data module."""
# The class of the container, as OmegaConf has one of its own: the module's constructor says what it takes.
_CLASSES = (pl.LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE, pl.LightningDataModule.CHECKPOINT_HYPER_PARAMS_TYPE)


def plain_hyper_parameters(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Lightning's dictionary with its hyper-parameters as plain data: dataclasses and mappings are dictionaries."""
    return {key: plain(value) if key in KEYS else value for key, value in checkpoint.items() if key not in _CLASSES}


def plain(value: Any) -> Any:
    """Dataclasses and mappings of others, inside of containers too, as dictionaries; any other value as it is."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if type(value) is OrderedDict:
        return OrderedDict((key, plain(entry)) for key, entry in value.items())
    if isinstance(value, Mapping) and type(value) is not Counter:
        return {key: plain(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value


def warn_of_other_hyper_parameters(
    module: pl.LightningModule, checkpoint: Mapping[str, Any], path: str | os.PathLike[str]
) -> None:
    """Warns where a checkpoint was saved with other hyper-parameters than the module was built with."""
    saved, now = (plain(dict(values)) for values in (checkpoint.get(KEYS[0], {}), module.hparams))
    differing = [
        f"{name} = {_shown(saved[name])} (the checkpoint) and {_shown(now[name])} (the module)"
        for name in saved.keys() & now.keys()
        if not name.startswith("_") and repr(saved[name]) != repr(now[name])
    ]
    if differing:
        rank_zero_warn(
            f"checkpoint {path} was saved with other hyper-parameters: {'; '.join(sorted(differing))}. The module's "
            "count. LightningCLI reads those of a checkpoint from files only: give them as options, or use "
            "lightning_megatron.cli.MegatronCLI, which reads them from directories too"
        )


def warn_after_cli(module: pl.LightningModule, checkpoint: Mapping[str, Any], path: str) -> None:
    """Warns as `warn_of_other_hyper_parameters` where LightningCLI built the module, which leaves a note of it."""
    if "_instantiator" in module.hparams:
        warn_of_other_hyper_parameters(module, checkpoint, path)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def rebuilt(kind: Any, value: Any) -> Any:
    """The value, or the dataclass that `kind` (an annotation) asks for where the value is a mapping of its fields."""
    choices = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if isinstance(value, (list, tuple)) and get_origin(kind) is tuple and get_args(kind)[1:] == (...,):
        return tuple(rebuilt(get_args(kind)[0], part) for part in value)
    wanted = next((choice for choice in choices if isinstance(choice, type) and is_dataclass(choice)), None)
    if wanted is None or not isinstance(value, Mapping):
        return value
    hints = get_type_hints(wanted)
    known = {field.name: field.init for field in fields(wanted)}
    if strangers := [name for name in value if name not in known]:
        raise ValueError(
            f"{wanted.__name__} has no fields {strangers}, which the checkpoint has; give the argument that takes it"
        )
    return wanted(**{name: rebuilt(hints[name], part) for name, part in value.items() if known[name]})

"""Modules of experts of networks that were written for one device, in compiled code, which runs each uncompiled.

How many rows an expert gets is data, and where ranks share experts rows travel: a compiler can trace neither. The
operator of the package's own layers of experts (`uncompiled_experts`) calls the module as it is, with its hooks.

T tokens, K experts of each, H hidden.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import nn

from lightning_megatron.any_module.cut_experts import expert_modules
from lightning_megatron.handles import handle_of
from lightning_megatron.transformer.uncompiled_experts import Uncompiled

_NUM_ARGUMENTS = len(("tokens", "experts", "probabilities"))
# Attributes of a module of experts within a compiled call.
_UNCOMPILED, _NAMES, _NOTHING = (f"_lightning_megatron_{name}" for name in ("uncompiled", "names", "nothing"))


@contextmanager
def experts_uncompiled(layer: nn.Module) -> Iterator[None]:
    """Inside the block compiled code runs the layer's modules of experts uncompiled.

    They are called with tokens [T, H], the experts that each chose [T, K] and their probabilities [T, K].
    """
    modules = {}
    for _, module in expert_modules(layer):
        names = tuple(signature(type(module).forward).parameters)[1:]
        if len(names) == _NUM_ARGUMENTS:
            modules[module] = names
    for module, names in modules.items():
        # In this call alone: a copy of the module would call this one.
        module.__dict__ |= {
            "forward": MethodType(_forward, module),
            _UNCOMPILED: Uncompiled(weakref.ref(module)),
            _NAMES: names,
            _NOTHING: handle_of(()),
        }
    try:
        yield
    finally:
        for module in modules:
            for name in ("forward", _UNCOMPILED, _NAMES, _NOTHING):
                del module.__dict__[name]


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        return type(module).forward(module, *args, **kwargs)
    names = module._lightning_megatron_names
    given = dict(zip(names, args, strict=False)) | kwargs
    inputs = [given[name] for name in names]
    output_TH, _ = module._lightning_megatron_uncompiled.run(
        inputs, module._lightning_megatron_nothing, inputs[0].dtype
    )
    return output_TH

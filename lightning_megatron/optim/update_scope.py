"""Update scope of an optimizer: whether it reads one element's gradient and state to update it, or more.

The scope decides how weights may be sharded. A part of a weight can be stepped alone only by an optimizer whose update
is elementwise; a full weight only by one that reads no other weight.
"""

from typing import Literal

import torch
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from lightning_megatron.optim.config import DeclaredScope
from lightning_megatron.optim.muon import Muon

UpdateScope = Literal["elementwise", "sharded parameter", "parameter", "model", "unknown"]
"""Elementwise; a full parameter, of which the optimizer itself puts the shards together, or which it must be given; the
full model; not known."""

_ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop, SparseAdam)
_BY_PARAMETER = (Adafactor, torch.optim.Muon)


def update_scope_of(optimizer: Optimizer, declared: DeclaredScope) -> UpdateScope:
    """The update scope of an optimizer: known for torch's own, `declared` for all others.

    A subclass of torch's own counts as another one, because it may step otherwise.
    """
    if type(optimizer) in _ELEMENTWISE:
        return "elementwise"
    if type(optimizer) is Muon:
        return "sharded parameter"
    if isinstance(optimizer, _BY_PARAMETER):
        return "parameter"
    if isinstance(optimizer, LBFGS):
        return "model"
    return "unknown" if declared == "auto" else declared


def is_elementwise(optimizer: Optimizer, declared: DeclaredScope) -> bool:
    """Whether the update is elementwise, so that the optimizer may be given any part of a parameter."""
    return update_scope_of(optimizer, declared) == "elementwise"

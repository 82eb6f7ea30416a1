"""How far an optimizer looks when it steps one number of a weight: at that number's own gradient and state, or further.

Who cuts weights must know it. A part of a weight can be stepped alone only by an optimizer that treats each number by
itself; a whole weight only by one that looks at no other weight.
"""

from typing import Literal

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
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from lightning_megatron.optim.config import DeclaredScope

UpdateScope = Literal["elementwise", "parameter", "model", "unknown"]

_ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop, SparseAdam)
_BY_PARAMETER = (Adafactor, Muon)


def update_scope_of(optimizer: Optimizer, declared: DeclaredScope) -> UpdateScope:
    """What the step of a number looks at: as is known of torch's own optimizers, as `declared` of all others.

    A subclass is its author's: it may step otherwise than what it is made from.
    """
    if type(optimizer) in _ELEMENTWISE:
        return "elementwise"
    if isinstance(optimizer, _BY_PARAMETER):
        return "parameter"
    if isinstance(optimizer, LBFGS):
        return "model"
    return "unknown" if declared == "auto" else declared


def is_elementwise(optimizer: Optimizer, declared: DeclaredScope) -> bool:
    """Whether the optimizer may be given any part of a parameter."""
    return update_scope_of(optimizer, declared) == "elementwise"

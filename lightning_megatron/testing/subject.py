"""What is certified: a user's module, the batches that it trains on, and how it is to be trained."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from torch import nn


class SubjectError(Exception):
    """The module or its data cannot be made or cannot be used; the message is for the user."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A new module with its data, in the process that is to train it."""

    module: pl.LightningModule
    data: pl.LightningDataModule | Iterable[Any] | None = None
    """A data module, or batches; None: the module's own `train_dataloader`."""
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """Options of the Trainer that change the numbers, such as `gradient_clip_val`."""
    change_batch: Callable[[Any], Any] | None = None
    """What is done to each batch that is read; None: nothing."""
    notes: tuple[str, ...] = ()
    """What a reader of the certificate must know about the module, one sentence each."""


MakeSubject = Callable[[], Subject]
"""It is called in every process, several times, and must make the same each time."""


@dataclass(frozen=True, kw_only=True)
class FromFunctions:
    """The subject of two functions, which every process imports by their names."""

    make_module: Callable[[], pl.LightningModule]
    make_batches: Callable[[], pl.LightningDataModule | Iterable[Any]] | None
    trainer: Mapping[str, Any]

    def __call__(self) -> Subject:
        data = self.make_batches() if self.make_batches is not None else None
        return Subject(module=require_module(self.make_module()), data=data, trainer=self.trainer)


def maker_fault(make: Any, name: str) -> str:
    """What keeps a class or function of that name from being called without arguments; empty where nothing does."""
    if isinstance(make, nn.Module) or not callable(make):
        return (
            f"{name} must be a class or a function without arguments, and is a {type(make).__name__}; every process "
            "makes its own: give the class, or a function that returns one"
        )
    needed = [
        argument
        for argument, parameter in inspect.signature(make).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if not needed:
        return ""
    called = f"{getattr(make, '__name__', name)}({', '.join(f'{argument}=...' for argument in needed)})"
    return (
        f"{name} is called without arguments, and needs {', '.join(needed)}; write a function in the same file that "
        f"returns {called}, and give that"
    )


def require_module(module: Any) -> pl.LightningModule:
    """The module. Raises SubjectError for anything that is no LightningModule."""
    if not isinstance(module, pl.LightningModule):
        raise SubjectError(f"a LightningModule is needed, and what was made is a {type(module).__name__}")
    return module

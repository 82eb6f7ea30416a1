"""What stands in a file of the user's, by `path.py:Name` or `package.module:Name`."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_megatron.testing.maker_spec import spec_fault
from lightning_megatron.testing.subject import Subject, SubjectError, maker_fault, require_module


@dataclass(frozen=True, kw_only=True)
class FromFiles:
    """The subject of a class, or a function, in a file of the user's: `module.py:MyModule`."""

    module: str
    data: str | None
    trainer: Mapping[str, Any]

    def __call__(self) -> Subject:
        data = called(self.data) if self.data is not None else None
        return Subject(module=require_module(called(self.module)), data=data, trainer=self.trainer)


def called(spec: str) -> Any:
    """What the class or function makes, called without arguments. Raises SubjectError where that cannot be."""
    found = named(spec)
    if fault := maker_fault(found, spec):
        raise SubjectError(fault)
    return found()


def named(spec: str) -> Any:
    """The value of that name. Raises SubjectError where there is none."""
    if fault := spec_fault(spec):
        raise SubjectError(fault)
    where, _, name = spec.rpartition(":")
    module = module_of_file(Path(where)) if where.endswith(".py") else _imported(where)
    if name not in vars(module):
        there = sorted(key for key, value in vars(module).items() if _is_own(value, module))
        raise SubjectError(f"{where} has no {name}; it has {', '.join(there) or 'no class and no function'}")
    return vars(module)[name]


def module_of_file(path: Path, name: str | None = None) -> ModuleType:
    """The file as a module, under its own name where none is given; its folder is searched for what it imports.

    What the file raises is not caught.
    """
    path = path.resolve()
    name = name if name is not None else path.stem
    for known in (name, f"user_{name}"):
        if known not in sys.modules:
            break
        if str(path) == getattr(sys.modules[known], "__file__", None):
            return sys.modules[known]
    name = known
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Pickles of what it defines find it under this name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _imported(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise SubjectError(f"{name} cannot be imported: {error}; give a file, as in module.py:MyModule") from error


def _is_own(value: Any, module: ModuleType) -> bool:
    return (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module.__name__

"""What the package adds to the registries of others, from the moment on that those are imported.

The name "megatron" among Lightning's strategies, for which there is no entry point; and a file system of this machine
among fsspec's, by which Lightning reads a checkpoint directory as it reads a file. Importing the two for that would
cost a process that only plans or draws a schedule some five seconds.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_NAME = "megatron"
# Protocols under which fsspec knows the files of this machine.
_PROTOCOLS = ("file", "local")
# Floors above this file; imported by name when a Trainer asks for the strategy.
_STRATEGY_MODULE = "lightning_megatron.trainer"
# Imports fsspec; imported by name when a file is opened.
_FILE_SYSTEM_MODULE = "lightning_megatron.local_file_system"


def register() -> None:
    """Registers with each registry that is imported, and with the others as soon as they are."""
    waiting = {finder.name for finder in sys.meta_path if isinstance(finder, _Finder)}
    for name, enter in _REGISTRIES.items():
        if (registry := sys.modules.get(name)) is not None:
            enter(registry)
        elif name not in waiting:
            sys.meta_path.insert(0, _Finder(name, enter))


def _enter_strategy(strategies: ModuleType) -> None:
    if _NAME not in strategies.StrategyRegistry:
        description = "Megatron's parallelism for ordinary LightningModules"
        strategies.StrategyRegistry.register(_NAME, _strategy, description=description)


def _strategy(**arguments: Any) -> Any:
    return import_module(_STRATEGY_MODULE).MegatronStrategy(**arguments)


def _enter_file_system(registry: ModuleType) -> None:
    for protocol in _PROTOCOLS:
        # A name is imported when a file is first opened. A class that is there already would come before it.
        is_used = protocol in registry.registry
        entry = (
            import_module(_FILE_SYSTEM_MODULE).LocalFileSystem if is_used else f"{_FILE_SYSTEM_MODULE}.LocalFileSystem"
        )
        registry.register_implementation(protocol, entry, clobber=True)


_REGISTRIES: dict[str, Callable[[ModuleType], None]] = {
    "lightning.pytorch.strategies": _enter_strategy,
    "fsspec.registry": _enter_file_system,
}


class _Finder(MetaPathFinder):
    """Waits for the import of a registry, and leaves with it."""

    def __init__(self, name: str, enter: Callable[[ModuleType], None]) -> None:
        self.name = name
        self._enter = enter

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader, self._enter)
        return spec


class _RegisteringLoader(Loader):
    """Loads the module as its own loader does, then registers with it."""

    def __init__(self, loader: Loader, enter: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._enter = enter

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        # What reads the module's files later asks the loader that knows them.
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._enter(module)

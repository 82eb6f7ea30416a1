"""The name "megatron" among Lightning's strategies, from the moment on that Lightning itself is imported.

Lightning has no entry point for strategies, so importing the package makes the name known. Importing Lightning for that
would cost a process that only plans or draws a schedule some five seconds.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_REGISTRY = "lightning.pytorch.strategies"
_NAME = "megatron"
# Floors above this file; imported by name when a Trainer asks for the strategy.
_STRATEGY_MODULE = "lightning_megatron.trainer"


def register_strategy() -> None:
    """Registers the strategy with Lightning if that is imported, or else as soon as it is."""
    if (strategies := sys.modules.get(_REGISTRY)) is not None:
        _register(strategies)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(strategies: ModuleType) -> None:
    if _NAME not in strategies.StrategyRegistry:
        description = "Megatron's parallelism for ordinary LightningModules"
        strategies.StrategyRegistry.register(_NAME, _strategy, description=description)


def _strategy(**arguments: Any) -> Any:
    return import_module(_STRATEGY_MODULE).MegatronStrategy(**arguments)


class _Finder(MetaPathFinder):
    """Waits for the import of Lightning's strategies, and leaves with it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    """Loads the module as its own loader does, then registers the strategy."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        # What reads the module's files later asks the loader that knows them.
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register(module)

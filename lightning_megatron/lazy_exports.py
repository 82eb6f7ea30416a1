"""Names that a package exports but imports only when they are first used (PEP 562).

The imports stand in the package's `__init__.py` under `if TYPE_CHECKING:`, where type checkers and editors see them,
and are read from there: they are written once. It keeps `lightning-megatron --help` and the planner free of Lightning.
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package, from the imports that its `file` has under `if TYPE_CHECKING:`.

    An exported name must not be that of a submodule: importing the submodule would put it in the name's place.
    """
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    [guarded] = [node for node in tree.body if isinstance(node, ast.If)]
    homes = {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = homes[name]
        value = getattr(import_module(module), attribute)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return __getattr__, __dir__

"""Packages that an extra installs, imported by the module that is their one door when they are first needed."""

from importlib import import_module
from types import ModuleType


def optional_package(name: str, purpose: str, *, distribution: str = "", extra: str = "data") -> ModuleType:
    """The module `name`. Raises ImportError, with the purpose and the extra to install, where it is not installed.

    `distribution` is the package's name where it is another one than the module's.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs the package {distribution or name!r}: pip install 'lightning_megatron[{extra}]'"
        ) from error

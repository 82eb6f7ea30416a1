"""The command line: `lightning-megatron` and recipes."""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lightning_megatron.cli.lightning_cli import MegatronCLI
else:
    __getattr__, __dir__ = lazy_exports(__name__, __file__)

__all__ = ["MegatronCLI"]

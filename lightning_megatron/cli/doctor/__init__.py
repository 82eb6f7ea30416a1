"""`lightning-megatron doctor`: facts of each rank and machine are gathered, and findings on them are made and shown."""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lightning_megatron.cli.doctor.command import add_parser
else:
    __getattr__, __dir__ = lazy_exports(__name__, __file__)

__all__ = ["add_parser"]

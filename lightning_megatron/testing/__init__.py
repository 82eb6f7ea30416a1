"""Proof for a user's own module: the numbers of one device, under every layout."""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lightning_megatron.testing.certificate import Certificate, LayoutResult
    from lightning_megatron.testing.proof import CertifyError, certify
else:
    __getattr__, __dir__ = lazy_exports(__name__, __file__)

__all__ = ["Certificate", "CertifyError", "LayoutResult", "certify"]

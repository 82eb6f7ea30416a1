"""The strategy's choice of a library for torch's fused attention, which torch calls in place of its own kernels.

    torch         what torch chooses: FlashAttention-2 in 16 bits                              everywhere
    cudnn         cuDNN's kernel first, where it takes the call; not that of packed documents  with torch for CUDA
    flash3        FlashAttention-3 in place of FlashAttention-2                                Hopper
    flash4        FlashAttention-4 in place of FlashAttention-2                                Hopper and Blackwell

Source: torch 2.13, `torch.nn.attention`.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

from lightning_megatron.precision.kernels import AttentionLibrary, KernelConfig

_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_HOPPER, _BLACKWELL = (9, 0), (10, 0)
# By torch's name: the module that torch imports, how to get it, and the devices that its kernels run on.
_FLASH = {
    "flash3": (
        "FA3",
        "flash_attn_interface",
        "build it from the folder hopper of github.com/Dao-AILab/flash-attention",
        (_HOPPER,),
    ),
    "flash4": ("FA4", "flash_attn.cute.interface", "pip install flash-attn-4", (_HOPPER, _BLACKWELL)),
}


def attention_faults(config: KernelConfig, device: torch.device) -> list[str]:
    """Why the configured library cannot run on this device: nothing, or one sentence."""
    option = f"kernels attention ({config.attention!r})"
    if config.attention == "torch":
        return []
    if device.type != "cuda":
        return [f"{option} runs on CUDA, and this run is on {device.type}; use 'torch'"]
    if config.attention == "cudnn":
        missing = not torch.backends.cudnn.is_available()
        return [f"{option} needs cuDNN, and this build of torch has none; use 'torch'"] if missing else []
    _, module, way, capabilities = _FLASH[config.attention]
    found = torch.cuda.get_device_capability(device)
    if found not in capabilities:
        known = " or ".join(f"{major}.{minor}" for major, minor in capabilities)
        has = ".".join(map(str, found))
        return [f"{option} needs a GPU of compute capability {known}, and this one has {has}; use 'torch' or 'cudnn'"]
    if not _is_there(module):
        return [f"{option} needs the module {module}, which is not installed: {way}, or use 'torch' or 'cudnn'"]
    return []


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # A package around it is absent.
        return False


@contextmanager
def attention_by(library: AttentionLibrary) -> Iterator[None]:
    """A block in which torch's attention runs the kernels of a library, compiled layers' too."""
    if library == "torch":
        yield
    elif library == "cudnn":
        with sdpa_kernel(_CUDNN_FIRST, set_priority=True):
            yield
    else:
        activate_flash_attention_impl(_FLASH[library][0])
        try:
            yield
        finally:
            restore_flash_attention_impl()

"""Counter-based random numbers: a function of what they are for, not of the rank that draws them.

Initial values and dropout masks must not depend on the layout, so each number is computed from a key and an index: any
rank can draw any slice and gets the values that one device would have drawn there.

The generator is two rounds of the 64-bit finaliser of SplitMix64 over `key + index * odd constant`. On a GPU a tensor
of them is one kernel, where Triton can make one (`random_kernels`), with the same numbers.
Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 16.
"""

import hashlib
import importlib.util
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lightning_megatron.comm.splitmix import GOLDEN, MIX_1, MIX_2, signed

# Elements drawn at a time, which bounds the int64 and float64 scratch of a draw to a few tens of MB.
_BLOCK = 1 << 20

MASK_BLOCK = 1 << 22
"""Elements of a mask that are drawn at a time, each through two int64; so many that launches do not count."""


def key(*parts: int | str) -> int:
    """A 64-bit key for what `parts` name together, equal on every machine and Python."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return signed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


def key_tensor(*parts: int | str) -> Tensor:
    """`key` as a tensor [] on the host, wherever its user stands: compiled code of layers that differ in their keys
    alone is the same, where a number would be a part of the code."""
    return torch.tensor(key(*parts), device="cpu")


def seed_torch(seed: int) -> None:
    """Seeds torch's default generators of the CPU and of this process's CUDA device, where there is one."""
    # Not torch.manual_seed: for each kind of accelerator that is not there it keeps a call, with a stack trace, for the
    # day that it comes up; once a microbatch that is milliseconds, and memory without end.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own shift of a negative int64 is arithmetic."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """A bijective hash of int64 patterns."""
    x = _shift(x, 30).bitwise_xor_(x).mul_(MIX_1)
    x = _shift(x, 27).bitwise_xor_(x).mul_(MIX_2)
    return _shift(x, 31).bitwise_xor_(x)


def bits(keys: Tensor | int, index: Tensor) -> Tensor:
    """64 random bits, as int64, for each index under its key; the two broadcast."""
    if index.device.type != "cpu" and not torch.compiler.is_compiling():
        drawn: Tensor = _bits_operator(keys if isinstance(keys, Tensor) else torch.tensor(keys, device="cpu"), index)
        return drawn
    return _bits(keys, index)


def _bits(keys: Tensor | int, index: Tensor) -> Tensor:
    return mix(mix(index * GOLDEN + keys) + keys)


def uniform(keys: Tensor | int, index: Tensor) -> Tensor:
    """Numbers in (0, 1), float64, for each index under its key."""
    return (_shift(bits(keys, index), 11).double() + 0.5) * 2.0**-53


def normal(keys: int, index: Tensor) -> Tensor:
    """Standard normal numbers, float64, for each index (Box-Muller on two uniforms of its own)."""
    radius = torch.sqrt(-2.0 * torch.log(uniform(keys, index * 2)))
    return radius * torch.cos(2.0 * math.pi * uniform(keys, index * 2 + 1))


def box_index(
    global_shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], device: torch.device
) -> Tensor:
    """Row-major positions, within a tensor of `global_shape`, of the box at `offsets`: int64 of shape `sizes`."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for extent, offset, size in zip(global_shape, offsets, sizes, strict=True):
        index = index.unsqueeze(-1) * extent + torch.arange(offset, offset + size, dtype=torch.int64, device=device)
    return index


@torch.no_grad()
def fill_normal_(
    target: Tensor, std: float, name_key: int, global_shape: Sequence[int], offsets: Sequence[int]
) -> Tensor:
    """Fills the box `target`, which lies at `offsets` in a tensor of `global_shape`, with normal numbers."""
    index = box_index(global_shape, offsets, target.shape, target.device).flatten()
    flat = torch.empty(index.numel(), dtype=target.dtype, device=target.device)
    for start in range(0, index.numel(), _BLOCK):
        block = slice(start, start + _BLOCK)
        flat[block] = normal(name_key, index[block]).mul_(std)
    return target.copy_(flat.view(target.shape))


def keep_mask(keys: Tensor, num_columns: int, probability: float, first_column: int = 0) -> Tensor:
    """Dropout mask, True where an element is not dropped with `probability`: [*keys.shape, num_columns].

    `keys` (int64) are the keys of the tensor's rows; `first_column` is the index of the first column in the unsharded
    row, so that a shard of columns draws its own part of it.
    """
    columns = torch.arange(first_column, first_column + num_columns, dtype=torch.int64, device=keys.device)
    return keep_columns(keys, columns, probability)


def keep_columns(keys: Tensor, columns: Tensor, probability: float) -> Tensor:
    """`keep_mask` for columns (int64) in any order: [*keys.shape, columns]."""
    threshold = _threshold(probability)
    if keys.device.type != "cpu" and not torch.compiler.is_compiling():
        keep: Tensor = _keep_operator(keys.flatten(), columns, threshold)
    else:
        keep = _keep_columns(keys.flatten(), columns, threshold)
    return keep.view(*keys.shape, columns.numel())


def _keep_columns(rows: Tensor, columns: Tensor, threshold: int) -> Tensor:
    """Mask [rows, columns] of keys and columns."""
    offsets = columns * GOLDEN
    # A compiler fuses it all into one kernel, without scratch.
    num_block = rows.numel() * columns.numel() if torch.compiler.is_compiling() else MASK_BLOCK
    num_rows = max(num_block // max(columns.numel(), 1), 1)
    keep = torch.empty(rows.numel(), columns.numel(), dtype=torch.bool, device=rows.device)
    for start in range(0, rows.numel(), num_rows):
        block = slice(start, start + num_rows)
        keep[block] = mix(rows[block].unsqueeze(-1) + offsets) >= threshold
    return keep


def keeps(keys: Tensor, columns: Tensor, probability: float) -> Tensor:
    """Whether the element of each row key and column is not dropped; the two broadcast."""
    # One finaliser is enough here: the row keys are finalised bits already. What goes in is held by nobody else.
    return mix(keys + columns * GOLDEN) >= _threshold(probability)


def _threshold(probability: float) -> int:
    """Least bits, as int64, of an element that is kept."""
    return signed(int(probability * 2.0**64) - (1 << 63))


@torch.library.custom_op("lightning_megatron::random_bits", mutates_args=(), device_types="cpu")
def _bits_operator(keys: Tensor, index: Tensor) -> Tensor:
    return _bits(keys, index)


@_bits_operator.register_kernel("cuda")
def _(keys: Tensor, index: Tensor) -> Tensor:
    if not _has_kernels():
        return _bits(keys, index)
    from lightning_megatron.comm import random_kernels

    # A single key is on the host.
    return random_kernels.bits(keys if keys.is_cuda else int(keys), index)


@_bits_operator.register_fake
def _(keys: Tensor, index: Tensor) -> Tensor:
    return index.new_empty(torch.broadcast_shapes(keys.shape, index.shape))


@torch.library.custom_op("lightning_megatron::keep_columns", mutates_args=(), device_types="cpu")
def _keep_operator(rows: Tensor, columns: Tensor, threshold: int) -> Tensor:
    return _keep_columns(rows, columns, threshold)


@_keep_operator.register_kernel("cuda")
def _(rows: Tensor, columns: Tensor, threshold: int) -> Tensor:
    if not _has_kernels():
        return _keep_columns(rows, columns, threshold)
    from lightning_megatron.comm import random_kernels

    return random_kernels.keep_columns(rows, columns, threshold)


@_keep_operator.register_fake
def _(rows: Tensor, columns: Tensor, threshold: int) -> Tensor:
    return rows.new_empty(rows.numel(), columns.numel(), dtype=torch.bool)


@cache
def _has_kernels() -> bool:
    """Whether Triton is here, and the C compiler that it starts kernels by; without them torch draws the same."""
    return importlib.util.find_spec("triton") is not None and any(map(shutil.which, ("cc", "gcc", "clang")))


@dataclass(kw_only=True)
class Draws:
    """The randomness of a model call: its step, the call within it, and its samples in the global batch.

    The owner of the step loop writes the fields before each call; the model only reads them.
    """

    seed: int
    """Seed of the run."""
    step: int = 0
    """Batches trained on so far."""
    call: int = 0
    """Model calls so far within this microbatch."""
    first_sample: int = 0
    """Index in the global batch of the first sample of this call's input."""
    documents: Tensor | None = None
    """Documents of a call to which they were routed from other ranks, int64 [documents, 2]: the sample of each in the
    global batch, and its number in that sample, -1 where it is the full sample."""

    def sample_keys(self, num_samples: int, device: torch.device) -> Tensor:
        """Keys of the samples of this call's input, int64 [num_samples]."""
        samples = torch.arange(self.first_sample, self.first_sample + num_samples, dtype=torch.int64, device=device)
        return self._keys_of(samples)

    def document_keys(self, device: torch.device) -> Tensor:
        """Keys of the `documents`, the ones they have in their own samples, int64 [documents]."""
        assert self.documents is not None
        samples, numbers = self.documents.to(device).unbind(1)
        sample_keys = self._keys_of(samples)
        return torch.where(numbers < 0, sample_keys, bits(sample_keys, numbers))

    def _keys_of(self, samples: Tensor) -> Tensor:
        return bits(key(self.seed, "step", self.step, self.call), samples)

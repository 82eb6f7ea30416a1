"""Counter-based random numbers: a function of what they are for, not of the rank that draws them.

Initial values and dropout masks must not depend on the layout, so each number is computed from a key and an index: any
rank can draw any slice and gets the values that one device would have drawn there.

The generator is two rounds of the 64-bit finaliser of SplitMix64 over `key + index * odd constant`.
Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 16.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    """A 64-bit pattern as torch's int64."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
# Elements drawn at a time, which bounds the int64 and float64 scratch of a draw to a few tens of MB.
_BLOCK = 1 << 20

MASK_BLOCK = 1 << 22
"""Elements of a mask that are drawn at a time, each through two int64; so many that launches do not count."""


def key(*parts: int | str) -> int:
    """A 64-bit key for what `parts` name together, equal on every machine and Python."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return _signed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


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
    x = _shift(x, 30).bitwise_xor_(x).mul_(_MIX_1)
    x = _shift(x, 27).bitwise_xor_(x).mul_(_MIX_2)
    return _shift(x, 31).bitwise_xor_(x)


def bits(keys: Tensor | int, index: Tensor) -> Tensor:
    """64 random bits, as int64, for each index under its key; the two broadcast."""
    return mix(mix(index * _GOLDEN + keys) + keys)


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
    rows, offsets = keys.flatten(), columns * _GOLDEN
    # A compiler fuses it all into one kernel, without scratch.
    num_block = rows.numel() * columns.numel() if torch.compiler.is_compiling() else MASK_BLOCK
    num_rows = max(num_block // max(columns.numel(), 1), 1)
    keep = torch.empty(rows.numel(), columns.numel(), dtype=torch.bool, device=keys.device)
    for start in range(0, rows.numel(), num_rows):
        block = slice(start, start + num_rows)
        keep[block] = _is_kept(mix(rows[block].unsqueeze(-1) + offsets), probability)
    return keep.view(*keys.shape, columns.numel())


def keeps(keys: Tensor, columns: Tensor, probability: float) -> Tensor:
    """Whether the element of each row key and column is not dropped; the two broadcast."""
    # One finaliser is enough here: the row keys are finalised bits already. What goes in is held by nobody else.
    return _is_kept(mix(keys + columns * _GOLDEN), probability)


def _is_kept(bits: Tensor, probability: float) -> Tensor:
    return bits >= _signed(int(probability * 2.0**64) - (1 << 63))


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

"""A folder with a Hugging Face model: its configuration, and its weights read slice by slice.

| file | |
|---|---|
| `config.json` | the configuration |
| `model.safetensors` | all weights, or |
| `model.safetensors.index.json` | which file holds which |
| `generation_config.json` | how transformers generates, where it is there |
"""

from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.checkpoint.folder import Address, is_remote
from lightning_megatron.hf.blocks import Shape
from lightning_megatron.sharding import Box, is_deferring
from lightning_megatron.text_files import json_of, read_json_table

CONFIG = "config.json"
GENERATION = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of weights, by their names in a file."""

# Size of the first number in a file: the length of its header in bytes.
_LENGTH_BYTES = 8
# More than a hundred thousand tensors in one file; JSON takes some hundred times its size in memory.
_LONGEST_HEADER_BYTES = 16 * 2**20


def on_disk(path: Address) -> Path:
    """The path, if it is on a disk. Raises ValueError for a remote address."""
    if is_remote(path):
        raise ValueError(
            f"{path} is an address, and a folder with a Hugging Face model is read and written on a disk; give a path "
            "there (only checkpoints may be at a remote address)"
        )
    return Path(path)


def safetensors() -> ModuleType:
    """The package safetensors. Raises ImportError with the way to install it."""
    try:
        import safetensors
    except ImportError as error:
        raise ImportError(
            "reading Hugging Face weights needs the package 'safetensors': pip install 'lightning-megatron[hf]'"
        ) from error
    return safetensors


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`. Raises ValueError where there is none."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give one with {CONFIG} and {SINGLE}, as save_pretrained writes it")
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} has no {CONFIG}; give a folder with a Hugging Face model")
    return read_json_table(folder / CONFIG)


class WeightFiles:
    """The weights of a folder: `shapes` and `dtypes` by name, and any box of each.

    Raises ValueError with all faults of the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._file_of = _files_by_name(folder)
        self._open: dict[Path, Any] = {}
        # First byte of each weight in its file, and files that are mapped into memory.
        self._starts: dict[str, int] = {}
        self._maps: dict[Path, Any] = {}
        faults = []
        for file in sorted(set(self._file_of.values())):
            names = {name for name, holder in self._file_of.items() if holder == file}
            entries, first_byte = _header(file)
            if lost := sorted(names - entries.keys()):
                faults.append(f"{file.name} lacks what {INDEX} says is in it: {', '.join(lost[:20])}")
            for name in sorted(names & entries.keys()):
                self.shapes[name] = tuple(entries[name]["shape"])
                self.dtypes[name] = DTYPES.get(entries[name]["dtype"], torch.uint8)
                self._starts[name] = first_byte + entries[name]["data_offsets"][0]
        if faults:
            raise ValueError("\n  ".join([f"the weights in {folder} cannot be read:", *faults]))
        if is_deferring():
            # What is read later is what is there now, wherever the files go meanwhile.
            for file in set(self._file_of.values()):
                self._handle(file)

    def read(self, name: str, box: Box) -> Tensor:
        """The values of a box, in the dtype of the file; no other value is read."""
        slices = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
        values: Tensor = self._handle(self._file_of[name]).get_slice(name)[slices]
        return values

    def mapped(self, name: str) -> Tensor:
        """A floating-point weight in memory that is mapped from its file: what is not looked at is not read, and
        processes of a host share what is. Changes of it stay in the process."""
        file, dtype, shape = self._file_of[name], self.dtypes[name], self.shapes[name]
        if self._starts[name] % dtype.itemsize:
            return self.read(name, Box((0,) * len(shape), shape))
        if file not in self._maps:
            self._maps[file] = torch.UntypedStorage.from_file(str(file), False, file.stat().st_size)
        strides = torch.empty(shape, device="meta").stride()
        # Under a mode that changes dtypes, as a certificate in float64 does, bytes would be taken for other numbers.
        with torch._C.DisableTorchFunction():
            return torch.empty(0, dtype=dtype, device="cpu").set_(
                self._maps[file], self._starts[name] // dtype.itemsize, shape, strides
            )

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            package = safetensors()
            try:
                self._open[file] = package.safe_open(file, framework="pt", device="cpu")
            except package.SafetensorError as error:
                raise ValueError(f"{file} is no safetensors file: {error}") from error
        return self._open[file]


def _files_by_name(folder: Path) -> dict[str, Path]:
    """File that holds each weight, by the name of the weight."""
    if (folder / INDEX).is_file():
        by_name = read_json_table(folder / INDEX).get("weight_map")
        if not isinstance(by_name, dict) or not by_name or not all(isinstance(one, str) for one in by_name.values()):
            raise ValueError(f"{folder / INDEX} has no weight_map; fetch the file again")
        missing = sorted({file for file in by_name.values() if not (folder / file).is_file()})
        if missing:
            raise ValueError(
                f"{folder} lacks {len(missing)} of the files that {INDEX} names: {', '.join(missing[:20])}; fetch them"
            )
        return {name: folder / file for name, file in by_name.items()}
    if (folder / SINGLE).is_file():
        return dict.fromkeys(_header(folder / SINGLE)[0], folder / SINGLE)
    pickles = sorted(path.name for pattern in ("pytorch_model*.bin", "*.pth", "*.pt") for path in folder.glob(pattern))
    if pickles:
        raise ValueError(
            f"{folder} has its weights in {pickles[0]}, which is a pickle: reading it may run code. If you trust it, "
            "convert it once: transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}; give a folder with a Hugging Face model")


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Dtype, shape and offsets of each tensor of a file, by its name, and the byte from which offsets count."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        text = stream.read(length) if length <= min(size, _LONGEST_HEADER_BYTES) else b""
    try:
        entries: dict[str, Any] = json_of(text, str(file))
        entries.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        strange = [f"{name}, by {entry}" for name, entry in entries.items() if not _is_entry(entry)]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no safetensors file, or is cut off: its header cannot be read") from error
    if strange:
        raise ValueError(f"{file} has a tensor in its header that cannot be: {strange[0]}; fetch it again")
    if size != _LENGTH_BYTES + length + end:
        raise ValueError(
            f"{file} is {size} bytes long, and its header says {_LENGTH_BYTES + length + end}: it is cut off or "
            "damaged; fetch it again"
        )
    return entries, _LENGTH_BYTES + length


def _is_entry(entry: Any) -> bool:
    """Whether an entry of a header has a dtype, a shape and the offsets of its bytes."""
    shape, offsets = entry["shape"], entry["data_offsets"]
    numbers = [*shape, *offsets]
    return (
        isinstance(entry["dtype"], str)
        and isinstance(shape, list)
        and isinstance(offsets, list)
        and len(offsets) == 2
        and all(type(number) is int and number >= 0 for number in numbers)
        and offsets[0] <= offsets[1]
    )

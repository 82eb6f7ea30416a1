"""GPUs and their machines: peaks, measured matmul ceilings, memory and links, each with its source.

A plan starts here. `gpus.json` holds the known GPUs; a YAML file with the same fields describes another.
"""

import json
import re
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from lightning_megatron.planner.constants import Constants, constant_faults, fitted
from lightning_megatron.text_files import read_text, yaml_of

GIGA, TERA = 1e9, 1e12

Products = Literal["double", "full", "half", "fp8"]
"""Precision of matrix products: float64; float32 without tensor cores, which is torch's default; 16 bits; FP8."""

# No field of a GPU is so large, in any unit.
_MOST = 1e12
# Where no matmul is measured, the largest one is taken to reach this share of the peak.
_USUAL_SHARE = 0.8
# A float32 product in an attention kernel takes the time of six in 16 bits: it is three in TF32, each at half the rate
# of 16 bits. Sources: PyTorch, mem_eff_attention/gemm_kernel_utils.h: OpMultiplyAddFastF32 from compute
# capability 8.0 on; NVIDIA A100 white paper, table 1.
_HALF_PRODUCTS = 6
# Names that drivers give the known GPUs.
_DEVICES = (
    (r"\bV100-SXM\d-32GB", "v100-32gb"),
    (r"\bA100-SXM\d-40GB", "a100-40gb"),
    (r"\bA100-SXM\d-80GB", "a100-80gb"),
    (r"\bH100 80GB HBM3\b", "h100"),
    (r"\bH800\b(?! PCIe)", "h800"),
    (r"\bH200\b(?! NVL)", "h200"),
    (r"\bB200\b", "b200"),
    (r"\bB300\b", "b300"),
    (r"\bGB200\b", "gb200"),
    (r"\bGB300\b", "gb300"),
    (r"\bL40S\b", "l40s"),
    (r"\bA10\b", "a10"),
    (r"\bA10G\b", "a10g"),
    (r"\bL4\b", "l4"),
)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU and the machine around it. Raises ValueError with all errors at once."""

    name: str
    """Name that `--gpu` takes."""
    family: str = ""
    """Architecture, which selects fitted constants; empty or unknown: the newest."""
    memory_gb: float
    """Device memory, in 1e9 bytes."""
    memory_tb_per_second: float
    """Memory bandwidth."""
    half_tflops: float
    """Dense peak of bf16 and fp16 matrix products."""
    fp8_tflops: float = 0.0
    """Dense peak in FP8; 0: it has no such units."""
    full_tflops: float = 0.0
    """Peak in float32 without tensor cores, or in TF32 for scripts that turn it on in torch; 0: not known."""
    double_tflops: float = 0.0
    """Peak in float64, on tensor cores that have it; 0: not known."""
    half_matmul_tflops: float = 0.0
    """The most that a large matmul in 16 bits was measured to reach; 0: not measured."""
    fp8_matmul_tflops: float = 0.0
    """The most that a large FP8 matmul was measured to reach; 0: not measured."""
    full_matmul_tflops: float = 0.0
    """The most that a large float32 matmul was measured to reach; 0: not measured."""
    nvlink_gb_per_second: float = 0.0
    """Bandwidth each way to GPUs of the same node; 0: no NVLink."""
    pcie_gb_per_second: float = 32.0
    """Bandwidth each way of PCIe, which replaces NVLink where there is none."""
    host_gb_per_second: float = 20.0
    """Bandwidth of a GPU's share of host memory, as an optimizer's step on the host reaches it. Source of the default:
    Ren et al., arXiv 2101.06840, table 4: 28 bytes for each of 10 billion parameters in 2.6 s on a DGX-2, which has a
    third of the bandwidth per GPU of a DGX A100."""
    network_gb_per_second: float = 25.0
    """Bandwidth each way of a GPU's share of the node's network."""
    gpus_per_node: int = 8
    """GPUs that NVLink joins."""
    source: str = ""
    """Source of these numbers."""
    aliases: tuple[str, ...] = ()
    """Further names."""
    constants: Constants = field(default_factory=fitted)
    """Constants of the time model on it: in a file a table of those that differ from the fitted ones."""

    def __post_init__(self) -> None:
        per_second = ("memory_tb", "pcie_gb", "host_gb", "network_gb")
        positive = ("memory_gb", "half_tflops", *(f"{name}_per_second" for name in per_second))
        faults = [f"{name} ({getattr(self, name)}) must be above 0" for name in positive if not getattr(self, name) > 0]
        of_kinds = [f"{kind}_{what}" for what in ("tflops", "matmul_tflops") for kind in ("fp8", "full")]
        natural = (*of_kinds, "double_tflops", "half_matmul_tflops", "nvlink_gb_per_second")
        faults += [f"{name} ({getattr(self, name)}) must be 0 or above" for name in natural if getattr(self, name) < 0]
        faults += [
            f"{name}_matmul_tflops ({measured}) must be at most {name}_tflops ({peak}), the peak"
            for name, measured, peak in (
                ("half", self.half_matmul_tflops, self.half_tflops),
                ("fp8", self.fp8_matmul_tflops, self.fp8_tflops),
                ("full", self.full_matmul_tflops, self.full_tflops),
            )
            if measured > peak
        ]
        if self.gpus_per_node < 1:
            faults.append(f"gpus_per_node ({self.gpus_per_node}) must be at least 1")
        if faults:
            raise ValueError("\n".join(f"GPU {self.name!r}: {fault}" for fault in faults))

    @property
    def memory_bytes(self) -> float:
        return self.memory_gb * GIGA

    @property
    def memory_bytes_per_second(self) -> float:
        return self.memory_tb_per_second * TERA

    @property
    def link_bytes_per_second(self) -> float:
        """Bandwidth each way to a GPU of the same node."""
        return (self.nvlink_gb_per_second or self.pcie_gb_per_second) * GIGA

    @property
    def network_bytes_per_second(self) -> float:
        """Bandwidth each way to a GPU of another node."""
        return self.network_gb_per_second * GIGA

    def timed_as(self, products: Products) -> Products:
        """Precision whose rates time products of this one: float32 for float64, and 16 bits for float32, without a
        known peak."""
        lower: dict[Products, Products] = {"double": "full", "full": "half"}
        while products in lower and not self.peak_flops(products):
            products = lower[products]
        return products

    def peak_flops(self, products: Products) -> float:
        """Dense peak of matrix products in FLOP/s; 0 without such units, or where it is not known."""
        peaks = {"double": self.double_tflops, "full": self.full_tflops, "half": self.half_tflops}
        return {**peaks, "fp8": self.fp8_tflops}[products] * TERA

    def matmul_flops(self, products: Products) -> float:
        """The most that a matmul is known to reach, in FLOP/s.

        Where float32 or float64 is not measured, it reaches the same share of its peak as 16 bits.
        """
        measured = {"full": self.full_matmul_tflops, "half": self.half_matmul_tflops, "fp8": self.fp8_matmul_tflops}
        if products in ("double", "full") and not measured.get(products):
            return self.peak_flops(products) * self.matmul_flops("half") / self.peak_flops("half")
        return (measured[products] * TERA) or _USUAL_SHARE * self.peak_flops(products)

    def attention_flops(self, products: Products) -> float:
        """Matmul ceiling of an attention kernel in FLOP/s, which FP8 does not change."""
        if products == "double" or (products == "full" and self.family == "volta"):
            return self.matmul_flops(products)
        return self.matmul_flops("half") / (_HALF_PRODUCTS if products == "full" else 1)


@lru_cache(maxsize=1)
def known_gpus() -> dict[str, Gpu]:
    """The GPUs that come with the package, by name."""
    text = resources.files(__package__).joinpath("gpus.json").read_text(encoding="utf-8")
    gpus = [_made_of(record, "gpus.json") for record in json.loads(text)]
    return {gpu.name: gpu for gpu in gpus}


def gpu_of(name: str) -> Gpu:
    """The known GPU of that name, or the one that a YAML file describes.

    Raises ValueError with the known names for any other name, and with all errors of a file.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return _read(path)
    wanted, known = name.lower(), known_gpus()
    for gpu in known.values():
        if wanted in (gpu.name, *gpu.aliases):
            return gpu
    nearest = get_close_matches(wanted, known, n=1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise ValueError(
        f"GPU {name!r} is not known; {hint}known are {', '.join(known)}; for another give a YAML file with the fields "
        f"{', '.join(_needed())}"
    )


def gpu_of_device(device_name: str) -> Gpu | None:
    """The known GPU with this name of its driver; None for others, such as PCIe variants with lower clocks."""
    for pattern, name in _DEVICES:
        if re.search(pattern, device_name):
            return known_gpus()[name]
    return None


def _read(path: Path) -> Gpu:
    try:
        record = yaml_of(read_text(path), str(path))
    except ValueError as error:
        raise ValueError(f"GPU file {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"GPU file {path} must be a table of fields: {', '.join(_needed())}")
    return _made_of({"name": path.stem, **record}, str(path))


def _made_of(record: dict[str, Any], where: str) -> Gpu:
    kinds = {one.name: one.type for one in fields(Gpu)}
    faults = [
        f"field {name!r} in {where} is not known; fields are {', '.join(kinds)}" for name in record if name not in kinds
    ]
    faults += [f"field {name!r} is missing in {where}" for name in _needed() if name not in record]
    for name, value in record.items():
        if name in kinds and (wanted := _wanted(kinds[name], value)):
            faults.append(f"field {name!r} in {where} ({value!r}) must be {wanted}")
    if faults:
        raise ValueError("\n".join(faults))
    made: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
    return Gpu(**made | {"constants": replace(fitted(), **record.get("constants", {}))})


def _wanted(kind: object, value: object) -> str:
    """The rule that a field's value breaks; empty: none."""
    if kind in (float, int):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return "a number, as 1000.0: YAML takes 1e3 for a word"
        if not abs(value) < _MOST:
            return f"a number below {_MOST:g}"
        return "a whole number, as 8" if kind is int and not isinstance(value, int) else ""
    if kind is Constants:
        return "; ".join(constant_faults(value))
    if kind is str:
        return "" if isinstance(value, str) else "text; put it in quotes"
    is_list = isinstance(value, list) and all(isinstance(one, str) for one in value)
    return "" if is_list else "a list of names, as [mine, other]"


def _needed() -> list[str]:
    return [one.name for one in fields(Gpu) if one.default is one.default_factory is MISSING and one.name != "name"]

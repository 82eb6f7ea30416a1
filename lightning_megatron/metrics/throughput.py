"""How fast training goes, and which share of the hardware's peak that is: arithmetic and a table, no clock.

Convention of MFU (model FLOPs utilisation): the model FLOPs of `transformer.cost.training_flops` (matrix products,
forward and backward, causal attention counted half, nothing that is recomputed), divided by seconds, devices and the
dense peak of one device at the precision of the matrix products. Source: Chowdhery et al., arXiv 2204.02311,
appendix B, with the half of causal attention as in Dao, arXiv 2307.08691, section 4.1.

HFU (hardware FLOPs utilisation) adds what is recomputed in the backward, and nothing else: the same products, causal
attention counted half. Source: the same appendix; Korthikanti et al., arXiv 2205.05198, appendix A.
"""

import re
from dataclasses import dataclass

TERA = 1e12


@dataclass(frozen=True)
class Peak:
    """Dense peaks of one device in FLOP/s, without sparsity; 0 where it has no such units."""

    pattern: str
    """Regular expression for the GPU's name, as the driver reports it."""
    half_flops: float
    """Peak FLOP/s of bf16 or fp16 matrix products."""
    fp8_flops: float
    source: str


# fmt: off
PEAKS = (
    Peak(r"\bV100-SXM", 125 * TERA, 0.0, "NVIDIA V100 data sheet: fp16 tensor cores; it has no bf16"),
    Peak(r"\bA100\b", 312 * TERA, 0.0, "NVIDIA A100 data sheet, 40 GB and 80 GB"),
    Peak(r"\bH100 80GB HBM3\b", 989.4 * TERA, 1978.9 * TERA, "NVIDIA H100 SXM data sheet, half of the sparse figures"),
    Peak(r"\bH800\b(?! PCIe)", 989.4 * TERA, 1978.9 * TERA, "as H100 SXM: only the links are slower"),
    Peak(r"\bH200\b(?! NVL)", 989.4 * TERA, 1978.9 * TERA, "NVIDIA H200 SXM data sheet, half of the sparse figures"),
    Peak(r"\bB[23]00\b", 2250 * TERA, 4500 * TERA, "NVIDIA HGX B200 and B300 data sheets, dense"),
    Peak(r"\bGB[23]00\b", 2500 * TERA, 5000 * TERA, "NVIDIA GB200 and GB300 NVL72 data sheets, dense"),
    Peak(r"\bL40S\b", 362 * TERA, 733 * TERA, "NVIDIA L40S data sheet, dense"),
    Peak(r"\bA10G\b", 70 * TERA, 0.0, "NVIDIA A10G as offered by AWS, dense"),
    Peak(r"\bA10\b", 125 * TERA, 0.0, "NVIDIA A10 data sheet, dense"),
    Peak(r"\bL4\b", 121 * TERA, 242 * TERA, "NVIDIA L4 data sheet, half of the sparse figures"),
)
# fmt: on
"""Of other devices, such as PCIe variants with lower clocks, no peak is assumed: a wrong one makes a wrong MFU."""


@dataclass(frozen=True)
class Speed:
    """Throughput of a span of training, over all devices."""

    num_tokens: int
    num_flops: float
    """Model FLOPs."""
    seconds: float
    num_devices: int
    num_recomputed_flops: float = 0.0
    """Recomputed FLOPs, beyond model FLOPs."""

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def flops_per_second(self) -> float:
        """Model FLOPs of all devices together."""
        return self.num_flops / self.seconds

    @property
    def tflops_per_device(self) -> float:
        """1e12 model FLOPs a second of one device."""
        return self.flops_per_second / self.num_devices / TERA

    def mfu(self, peak_flops: float) -> float:
        """Share of the devices' peak, from 0 to 1; `peak_flops` is that of one device in FLOP/s."""
        return self.flops_per_second / (self.num_devices * peak_flops)

    def hfu(self, peak_flops: float) -> float:
        """Hardware FLOPs utilisation: `mfu` with what was recomputed counted too."""
        return (self.num_flops + self.num_recomputed_flops) / self.seconds / (self.num_devices * peak_flops)


def peak_flops(device_name: str, precision: str) -> float:
    """Dense peak of one device in FLOP/s under the Trainer's precision; 0 where none is known.

    Full precision has none here: whether tensor cores serve it is a setting, and the peaks differ by a factor of eight.
    """
    for peak in PEAKS:
        if re.search(peak.pattern, device_name):
            if precision.startswith("transformer-engine"):
                return peak.fp8_flops
            return peak.half_flops if precision.startswith(("bf16", "16")) else 0.0
    return 0.0

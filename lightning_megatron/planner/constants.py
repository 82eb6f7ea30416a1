"""The constants of the time model, each with a meaning; all but a few are fitted and read from a file.

`benchmarks/fit_planner.py` fits them to published runs and writes `constants.json`: the values, and the fitted rows.
"""

import json
import math
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources
from typing import Any

from lightning_megatron.planner.framework_profile import AttentionKernel

GIVEN = ("flash_edge", "both_ways_edge", "moved_backward")
"""Constants that are not fitted: a publication or arithmetic gives them."""

# Generations after Ampere; Ada has the same instructions for products. An unknown family counts as Blackwell.
_GENERATIONS = {"volta": 0, "ampere": 0, "ada": 0, "hopper": 1}
_GENERATION_SHARE = 0.56
"""Factor on an Ampere kernel's share of the matmul ceiling, one generation later. Source: Dao, arXiv
2307.08691, section 4.1: FlashAttention-2 reaches 205 TFLOP/s on A100 and 335 on H100, of ceilings of 271 and 795."""
_FIRST_SHARE = 0.5
"""Speed of the first kernels over FlashAttention-2's. Source: Dao, arXiv 2307.08691, abstract: twice as fast."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Constants of the time model; shares are of the numbers in `gpus.json`."""

    ampere_share: float = 0.85
    """Share of the measured matmul ceiling that a training step's large products reach on Ampere, Volta and Ada."""
    hopper_share: float = 0.85
    """Share of the measured matmul ceiling that large products in 16 bits reach on Hopper."""
    hopper_fp8_share: float = 0.85
    """Share of the measured matmul ceiling that large products in FP8 reach on Hopper."""
    blackwell_share: float = 0.75
    """Share of the measured matmul ceiling that large products reach on Blackwell, bound by power in any precision."""
    edge: float = 200.0
    """A product takes 1 + edge (1/M + 1/N + 1/K) times as long: partial tiles, and filling of pipelines."""
    grouped_edge: float = 300.0
    """An expert's product takes 1 + grouped_edge (1/M + 1/N + 1/K) times as long; M: tokens of one expert."""
    second_flash_share: float = 0.75
    """Share of the matmul ceiling in 16 bits that FlashAttention-2 reaches on Ampere with many keys."""
    vendor_flash_share: float = 0.65
    """Share of the matmul ceiling in 16 bits that the vendor's kernel reaches on any family with many keys."""
    flash_edge: float = 330.0
    """Fused causal attention takes 1 + flash_edge / keys times as long. Source: Shah et al., arXiv 2407.08608,
    figure 5: heads of 128, 512 to 16,384 tokens: 191 to 335 TFLOP/s of FlashAttention-2, 315 to 539 of the vendor's."""
    both_ways_edge: float = 105.0
    """Fused bidirectional attention takes 1 + both_ways_edge / keys times as long. Source: Shah et al., arXiv
    2407.08608, figure 5: 309 to 370 TFLOP/s, and 497 to 595."""
    materialised_share: float = 0.4
    """Share of the matmul ceiling that the two products of materialised attention reach."""
    traffic: float = 1.2
    """Bytes that elementwise kernels, fused where possible, read and write, over the least."""
    unfused_traffic: float = 2.0
    """Bytes that unfused elementwise kernels read and write, over the least."""
    moved_backward: float = 1.4
    """Bytes that a layer's elementwise kernels move in a backward, over a forward: a norm and a sum 6 over 5, an
    activation 3 over 2, with a gate 5 over 3."""
    cast_traffic: float = 1.5
    """Bytes that casts to FP8 read and write, over the least."""
    layer_seconds: float = 2.0e-4
    """Least seconds of a layer's forward: those of the host to launch it."""
    link_share: float = 0.8
    """Share of the bandwidth within a node that collectives reach."""
    network_share: float = 0.8
    """Share of a network port's bandwidth that collectives reach."""
    exchange_share: float = 0.9
    """Share of a network port's bandwidth that an all-to-all reaches."""
    link_seconds: float = 8.0e-6
    """Latency of a message within a node."""
    network_seconds: float = 2.5e-5
    """Latency of a message between nodes."""
    hop_seconds: float = 5.0e-5
    """Latency of a message between stages: the call, and the wait of both ends for each other."""
    exposed_tensor: float = 0.3
    """Share of tp messages in the backward that the weights' gradients do not hide."""
    exposed_hop: float = 0.5
    """Share of messages between stages that a rank waits for."""
    exposed_gather: float = 0.3
    """Slowdown of compute by overlapped messages of weights and gradients, as a share of their time."""
    routing_seconds: float = 6.0e-4
    """Seconds of routing in a layer with experts."""
    expert_seconds: float = 1.0e-4
    """Least seconds of a forward or a backward for each expert of a rank that the host launches one by one; twice that
    where forwards overlap backwards, whose layers are launched piece by piece."""
    step_seconds: float = 0.03
    """Seconds of a step outside of all other terms."""
    straggling: float = 0.004
    """Relative increase of a step's time with every doubling of the GPUs."""

    def product_share(self, family: str, *, is_fp8: bool) -> float:
        """Share of the matmul ceiling on a family of GPUs; an unknown one counts as the newest."""
        if family in ("volta", "ampere", "ada"):
            return self.ampere_share
        if family == "hopper":
            return self.hopper_fp8_share if is_fp8 else self.hopper_share
        return self.blackwell_share

    def attention_share(self, family: str, kernel: AttentionKernel) -> float:
        """Share of the matmul ceiling in 16 bits that a fused attention kernel reaches with many keys."""
        if kernel == "vendor":
            return self.vendor_flash_share
        share = self.second_flash_share * _GENERATION_SHARE ** _GENERATIONS.get(family, 2)
        return share * _FIRST_SHARE if kernel == "first" else share


def most_of(name: str) -> float:
    """The most that a constant may be: shares are of a whole."""
    return 1.0 if name.endswith("_share") or name.startswith("exposed_") else math.inf


def constant_faults(table: object) -> list[str]:
    """Rules that a table of constants breaks."""
    names = [field.name for field in fields(Constants)]
    if not isinstance(table, dict):
        return [f"a table of constants: {', '.join(names)}"]
    faults = [f"without {name!r}; constants are {', '.join(names)}" for name in table if name not in names]
    for name, value in table.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name in names and not (is_number and 0 < value <= most_of(name) and value < math.inf):
            below = f" and at most {most_of(name):g}" if most_of(name) < math.inf else ""
            faults.append(f"with a number above 0{below} for {name}, as 0.5")
    return faults


@lru_cache(maxsize=1)
def fitted() -> Constants:
    """The constants as fitted."""
    values = fitted_file()["values"]
    names = (field.name for field in fields(Constants) if field.name not in GIVEN)
    return Constants(**{name: float(values[name]) for name in names})


def fitted_file() -> dict[str, Any]:
    """What `constants.json` holds: the constants as fitted, and published over predicted step times."""
    found: dict[str, Any] = json.loads(
        resources.files(__package__).joinpath("constants.json").read_text(encoding="utf-8")
    )
    return found

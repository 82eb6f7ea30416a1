"""The constants of the time model, each of which means something; their values are fitted and lie in a file.

`benchmarks/fit_planner.py` writes `constants.json` from published runs: the values, and of which rows they are.
"""

import json
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources
from typing import Any

from lightning_megatron.planner.software import AttentionKernel

FAMILIES = ("volta", "ampere", "hopper", "blackwell")


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Shares are of what `gpus.json` says; seconds are of one thing."""

    volta_share: float = 0.85
    # of the measured matmul ceiling that a large product of a training step reaches, in 16 bits
    ampere_share: float = 0.85
    # the same of another family
    hopper_share: float = 0.85
    # the same
    blackwell_share: float = 0.85
    # the same
    hopper_fp8_share: float = 0.75
    # the same of products in FP8
    blackwell_fp8_share: float = 0.75
    # the same
    edge: float = 100.0
    # a product takes 1 + edge (1/M + 1/N + 1/K) times as long: tiles that are not full, pipelines that fill
    grouped_edge: float = 200.0
    # the same of the products of experts, M being the rows of one
    first_flash_share: float = 0.4
    # of the matmul ceiling in 16 bits that attention in one kernel reaches, with the first such kernels
    first_flash_hopper_share: float = 0.25
    # the same on GPUs that are younger than these kernels
    second_flash_share: float = 0.45
    # the same of FlashAttention-2
    vendor_flash_share: float = 0.75
    # the same of the vendor's kernel
    laid_out_share: float = 0.4
    # the same of the two products of attention that lays its weights out
    traffic: float = 1.5
    # elementwise kernels, joined where they can be, read and write so many times the least
    unfused_traffic: float = 2.5
    # the same where each is by itself
    cast_traffic: float = 1.5
    # FP8 casts the same
    layer_seconds: float = 2.0e-4
    # that the host needs to start the forward of a layer; no layer is faster
    link_share: float = 0.7
    # of the link within a node that collectives reach
    network_share: float = 0.7
    # of a network port that collectives reach
    exchange_share: float = 0.5
    # of a network port that an all-to-all reaches
    link_seconds: float = 8.0e-6
    # of a message within a node, however small
    network_seconds: float = 2.5e-5
    # of a message between nodes
    hop_seconds: float = 5.0e-5
    # of a message between stages, beyond its bytes: the call, and both ends finding each other
    exposed_tensor: float = 0.7
    # of the messages of tp in the backward, what is not hidden behind the gradient of weights
    exposed_hop: float = 0.5
    # of messages between stages, what a rank waits for
    exposed_gather: float = 0.3
    # of weights and gradients that travel behind compute, what slows it down
    routing_seconds: float = 2.0e-4
    # of finding the way of tokens to experts, a layer
    step_seconds: float = 0.03
    # of a step, outside of forwards, backwards and what is counted here
    straggling: float = 0.004
    # a step is so much longer for every doubling of the GPUs

    def product_share(self, family: str, *, is_fp8: bool) -> float:
        """Of a family of GPUs; an unknown one counts as the newest."""
        known = family if family in FAMILIES else "blackwell"
        name = f"{known}_fp8_share" if is_fp8 else f"{known}_share"
        return float(getattr(self, name, self.blackwell_fp8_share))

    def flash_share(self, family: str, kernel: AttentionKernel) -> float:
        """Of the matmul ceiling that attention in one kernel reaches."""
        if kernel == "first":
            return self.first_flash_share if family in ("volta", "ampere") else self.first_flash_hopper_share
        return self.second_flash_share if kernel == "second" else self.vendor_flash_share


@lru_cache(maxsize=1)
def fitted() -> Constants:
    """The constants as fitted."""
    record: dict[str, Any] = json.loads(
        resources.files(__package__).joinpath("constants.json").read_text(encoding="utf-8")
    )
    return Constants(**{field.name: float(record["values"][field.name]) for field in fields(Constants)})

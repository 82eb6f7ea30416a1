"""The constants of the time model, each of which means something; all but a few are fitted and lie in a file.

`benchmarks/fit_planner.py` writes `constants.json` from published runs: the values, and of which rows they are.
"""

import json
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources
from typing import Any

from lightning_megatron.planner.framework_profile import AttentionKernel

GIVEN = ("flash_edge", "both_ways_edge", "moved_backward")
"""Constants that are not fitted: a publication or arithmetic gives them."""

_YOUNGER = {"volta": 0, "ampere": 0, "ada": 0, "hopper": 1}
# Generations after Ampere; Ada multiplies by the same instructions. An unknown family counts as the newest, Blackwell.
_KEPT_SHARE = 0.56
"""What a kernel written for Ampere keeps of its share of the matmul ceiling, a generation later. Source: Dao, arXiv
2307.08691, section 4.1: FlashAttention-2 reaches 205 TFLOP/s on A100 and 335 on H100, of ceilings of 271 and 795."""
_FIRST_SHARE = 0.5
"""What the first kernels reach of FlashAttention-2. Source: the same, abstract: it is twice as fast."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Shares are of what `gpus.json` says; seconds are of one thing."""

    ampere_share: float = 0.85
    """Of the measured matmul ceiling that a large product of a training step reaches, here, on Volta and on Ada."""
    hopper_share: float = 0.85
    """The same of another family."""
    hopper_fp8_share: float = 0.85
    """The same of products in FP8."""
    blackwell_share: float = 0.75
    """The same of another family, in either precision: power bounds both."""
    edge: float = 200.0
    """A product takes 1 + edge (1/M + 1/N + 1/K) times as long: tiles that are not full, pipelines that fill."""
    grouped_edge: float = 300.0
    """The same of the products of experts, M being the rows of one."""
    second_flash_share: float = 0.75
    """Of the matmul ceiling in 16 bits that FlashAttention-2 reaches on Ampere with many keys."""
    vendor_flash_share: float = 0.65
    """The same of the vendor's kernel, on any family."""
    flash_edge: float = 330.0
    """Causal attention in one kernel takes 1 + flash_edge / keys times as long. Source: Shah et al., arXiv 2407.08608,
    figure 5: heads of 128, 512 to 16,384 tokens: 191 to 335 TFLOP/s of FlashAttention-2, 315 to 539 of the vendor's."""
    both_ways_edge: float = 105.0
    """The same of attention whose queries see all keys. Source: the same: 309 to 370 TFLOP/s, and 497 to 595."""
    laid_out_share: float = 0.4
    """The same of the two products of attention that lays its weights out."""
    traffic: float = 1.2
    """Elementwise kernels, joined where they can be, read and write so many times the least."""
    unfused_traffic: float = 2.0
    """The same where each is by itself."""
    moved_backward: float = 1.4
    """What elementwise kernels of a layer move in a backward, over what they move in a forward: a norm and a sum 6 over
    5, an activation 3 over 2, with a gate 5 over 3."""
    cast_traffic: float = 1.5
    # FP8 casts the same
    layer_seconds: float = 2.0e-4
    """That the host needs to start the forward of a layer; no layer is faster."""
    link_share: float = 0.8
    """Of the link within a node that collectives reach."""
    network_share: float = 0.8
    """Of a network port that collectives reach."""
    exchange_share: float = 0.9
    """Of a network port that an all-to-all reaches."""
    link_seconds: float = 8.0e-6
    """Of a message within a node, however small."""
    network_seconds: float = 2.5e-5
    """Of a message between nodes."""
    hop_seconds: float = 5.0e-5
    """Of a message between stages, beyond its bytes: the call, and both ends finding each other."""
    exposed_tensor: float = 0.3
    """Of the messages of tp in the backward, what is not hidden behind the gradient of weights."""
    exposed_hop: float = 0.5
    """Of messages between stages, what a rank waits for."""
    exposed_gather: float = 0.3
    """Of weights and gradients that travel behind compute, what slows it down."""
    routing_seconds: float = 6.0e-4
    """Of finding the way of tokens to experts, a layer."""
    step_seconds: float = 0.03
    """Of a step, outside of forwards, backwards and what is counted here."""
    straggling: float = 0.004
    """A step is so much longer for every doubling of the GPUs."""

    def product_share(self, family: str, *, is_fp8: bool) -> float:
        """Of a family of GPUs; an unknown one counts as the newest."""
        if family in ("volta", "ampere", "ada"):
            return self.ampere_share
        if family == "hopper":
            return self.hopper_fp8_share if is_fp8 else self.hopper_share
        return self.blackwell_share

    def attention_share(self, family: str, kernel: AttentionKernel) -> float:
        """Of the matmul ceiling in 16 bits that attention in one kernel reaches with many keys."""
        if kernel == "vendor":
            return self.vendor_flash_share
        kept = self.second_flash_share * _KEPT_SHARE ** _YOUNGER.get(family, 2)
        return kept * _FIRST_SHARE if kernel == "first" else kept


@lru_cache(maxsize=1)
def fitted() -> Constants:
    """The constants as fitted."""
    record: dict[str, Any] = json.loads(
        resources.files(__package__).joinpath("constants.json").read_text(encoding="utf-8")
    )
    names = (field.name for field in fields(Constants) if field.name not in GIVEN)
    return Constants(**{name: float(record["values"][name]) for name in names})

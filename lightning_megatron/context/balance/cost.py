"""Time of a packed microbatch on a group of ranks: one formula, few constants.

A pack of documents of lengths L_i has T = sum L_i tokens and Q = sum L_i^2 squares. On a group of g ranks each rank
takes

    seconds = fixed + a T/g + b Q/g + (g - 1) max(0, c T/g + latency - b Q/g^2)

a  linear layers, per token            fixed    what a microbatch costs with no token in it
b  causal attention, per square        latency  of one message of the ring
c  sending one token to the neighbour; another rate where a group leaves the node

The last term is the ring: in g - 1 of its g steps the keys and values of T/g tokens are sent while attention works for
b Q/g^2; what sending takes longer is seen. All parts are of forward and backward together, on one pipeline stage.
T and Q are sums over documents, so a pack grows by adding two numbers, and seconds grow with both.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import overload

import numpy as np
import numpy.typing as npt

from lightning_megatron.config_dataclass import config_dataclass

Floats = npt.NDArray[np.float64]


@config_dataclass
class CostModel:
    """Constants of the cost formula; seconds in any unit that all of them share."""

    seconds_per_token: float
    """Time of the linear layers per token (a in the formula)."""
    seconds_per_square: float = 0.0
    """Time of causal attention per squared token of a document (b in the formula)."""
    fixed_seconds: float = 0.0
    """Fixed time of a microbatch, with documents or without."""
    seconds_per_sent_token: float = 0.0
    """Time of sending one token to the neighbour within a node (c in the formula)."""
    seconds_per_far_token: float = 0.0
    """Time of sending one token to the neighbour in a group of more than ranks_per_node ranks."""
    latency_seconds: float = 0.0
    """Latency of one step of the ring."""
    ranks_per_node: int = 0
    """Number of neighbouring dp x cp ranks that share a node; 0 means all."""

    def __post_init__(self) -> None:
        faults = [
            f"{field.name} ({value}) must be a finite number of at least 0"
            for field in fields(self)
            if not (math.isfinite(value := getattr(self, field.name)) and value >= 0)
        ]
        if not faults and self.seconds_per_token == 0:
            faults.append("seconds_per_token (0) must be above 0: every token takes time")
        if faults:
            raise ValueError("\n".join(f"cost model: {fault}" for fault in faults))

    def work(self, tokens: float, squares: float) -> float:
        """Seconds of these documents on one rank without the fixed part, the least rank-seconds on any group."""
        return self.seconds_per_token * tokens + self.seconds_per_square * squares

    @overload
    def seconds(self, tokens: float, squares: float, size: int) -> float: ...
    @overload
    def seconds(self, tokens: Floats, squares: Floats, size: int) -> Floats: ...
    def seconds(self, tokens: float | Floats, squares: float | Floats, size: int) -> float | Floats:
        """Seconds of a pack with these sums on a group of `size` ranks; arrays give many packs at once."""
        compute = (self.seconds_per_token * tokens + self.seconds_per_square * squares) / size
        if size == 1:
            return self.fixed_seconds + compute
        sent = self.sent_seconds(size) * tokens / size + self.latency_seconds
        exposed = sent - self.seconds_per_square * squares / size**2
        if isinstance(exposed, np.ndarray):
            return self.fixed_seconds + compute + (size - 1) * np.maximum(exposed, 0.0)
        # No message is sent where there is no token.
        return self.fixed_seconds + compute + (size - 1) * (max(exposed, 0.0) if tokens else 0.0)

    def sent_seconds(self, size: int) -> float:
        """Seconds of sending one token to the neighbour in a group of this size."""
        is_near = self.ranks_per_node == 0 or size <= self.ranks_per_node
        return self.seconds_per_sent_token if is_near else self.seconds_per_far_token

"""How ranks that share sequences exchange what attention needs, and what computes it."""

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_megatron.mesh import AttentionKernel

CommType = Literal["ring", "all_gather", "all_to_all", "hierarchical"]
_COMM_TYPES = ("ring", "all_gather", "all_to_all", "hierarchical")


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """The exchange of context parallelism, and the kernels of attention to other ranks' keys or within documents."""

    comm_type: CommType = "ring"
    """Keys and values go round the ranks while they compute; or come from all ranks at once; or heads are exchanged for
    tokens; or that among neighbours, and a ring of such groups."""
    ulysses_size: int = 0
    """Of "hierarchical": neighbouring ranks that exchange heads for tokens, best those of one node."""
    uneven: Literal["pad", "refuse"] = "pad"
    """What becomes of a sequence that ranks cannot share evenly."""
    kernel: AttentionKernel = "fused"
    """torch's fused kernels, or, on CUDA, its FlexAttention, where biases of relative positions are part of the
    kernel."""

    def __post_init__(self) -> None:
        faults = []
        if self.comm_type not in _COMM_TYPES:
            faults.append(f"comm_type ({self.comm_type!r}) must be one of {', '.join(map(repr, _COMM_TYPES))}")
        if self.uneven not in ("pad", "refuse"):
            faults.append(f"uneven ({self.uneven!r}) must be 'pad' or 'refuse'")
        if self.kernel not in get_args(AttentionKernel):
            known = " or ".join(map(repr, get_args(AttentionKernel)))
            faults.append(f"kernel ({self.kernel!r}) must be {known}")
        if self.comm_type == "hierarchical" and self.ulysses_size < 2:
            faults.append(
                f"ulysses_size ({self.ulysses_size}) must be at least 2 for comm_type 'hierarchical', and divide "
                "context_parallel_size; best it is the number of ranks of cp on one node"
            )
        if self.comm_type != "hierarchical" and self.ulysses_size != 0:
            faults.append(
                f"ulysses_size ({self.ulysses_size}) is one of comm_type 'hierarchical', and comm_type is "
                f"{self.comm_type!r}"
            )
        if faults:
            raise ValueError("\n".join(faults))

    def ulysses_size_of(self, size: int) -> int:
        """Of `size` ranks that share a sequence, how many neighbours exchange heads for tokens."""
        return {"all_to_all": size, "hierarchical": self.ulysses_size}.get(self.comm_type, 1)

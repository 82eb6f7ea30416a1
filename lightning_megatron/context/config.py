"""How ranks that share sequences exchange what attention needs, and what computes it."""

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_megatron.mesh import AttentionKernel

Kind = Literal["ring", "all_gather", "all_to_all", "hierarchical"]
_KINDS = ("ring", "all_gather", "all_to_all", "hierarchical")


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """The exchange of context parallelism, and the kernels of attention to other ranks' keys or within documents."""

    kind: Kind = "ring"
    """Keys and values go round the ranks while they compute; or come from all ranks at once; or heads are exchanged for
    tokens; or that among neighbours, and a ring of such groups."""
    inner_size: int = 0
    """Of "hierarchical": neighbouring ranks that exchange heads for tokens, best those of one node."""
    uneven: Literal["pad", "refuse"] = "pad"
    """What becomes of a sequence that ranks cannot share evenly."""
    kernel: AttentionKernel = "fused"
    """torch's fused kernels, or, on CUDA, its FlexAttention, where biases of relative positions are part of the
    kernel."""

    def __post_init__(self) -> None:
        faults = []
        if self.kind not in _KINDS:
            faults.append(f"kind ({self.kind!r}) must be one of {', '.join(map(repr, _KINDS))}")
        if self.uneven not in ("pad", "refuse"):
            faults.append(f"uneven ({self.uneven!r}) must be 'pad' or 'refuse'")
        if self.kernel not in get_args(AttentionKernel):
            known = " or ".join(map(repr, get_args(AttentionKernel)))
            faults.append(f"kernel ({self.kernel!r}) must be {known}")
        if self.kind == "hierarchical" and self.inner_size < 2:
            faults.append(
                f"inner_size ({self.inner_size}) must be at least 2 for kind 'hierarchical', and divide "
                "context_parallel_size; best it is the number of ranks of cp on one node"
            )
        if self.kind != "hierarchical" and self.inner_size != 0:
            faults.append(f"inner_size ({self.inner_size}) is one of kind 'hierarchical', and kind is {self.kind!r}")
        if faults:
            raise ValueError("\n".join(faults))

    def inner_of(self, size: int) -> int:
        """Of `size` ranks that share a sequence, how many neighbours exchange heads for tokens."""
        return {"all_to_all": size, "hierarchical": self.inner_size}.get(self.kind, 1)

"""Configuration of context parallelism: how ranks that share sequences exchange keys, values or heads."""

from typing import Literal, get_args

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.mesh import AttentionKernel

CommType = Literal["ring", "all_gather", "all_to_all", "hierarchical"]
_COMM_TYPES = get_args(CommType)


@config_dataclass
class ContextConfig:
    """Communication of context parallelism, and the kernel of attention across ranks or within documents."""

    comm_type: CommType = "ring"
    """Communication between context-parallel ranks: "ring", keys and values go round while ranks compute; "all_gather",
    keys and values of all ranks at once; "all_to_all" (Ulysses), ranks exchange heads for tokens; "hierarchical",
    Ulysses among ulysses_size neighbours and a ring of such groups."""
    ulysses_size: int = 0
    """Number of neighbouring ranks that exchange heads for tokens under "hierarchical", best those of one node; 0
    otherwise."""
    uneven: Literal["pad", "refuse"] = "pad"
    """What to do with a sequence that ranks cannot share evenly: "pad" it, or "refuse" it with an error."""
    kernel: AttentionKernel = "fused"
    """Attention kernel: "fused", torch's fused kernels, or "flex", torch's FlexAttention (CUDA only), which also fuses
    relative position biases and dropout."""

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
        """Number of neighbours that exchange heads for tokens, of `size` ranks that share a sequence."""
        return {"all_to_all": size, "hierarchical": self.ulysses_size}.get(self.comm_type, 1)

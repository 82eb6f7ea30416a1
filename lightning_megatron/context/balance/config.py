"""Configuration of dynamic context parallelism, and the group sizes that it allows."""

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.context.balance.cost import CostModel


@config_dataclass
class DynamicContextConfig:
    """Dynamic context parallelism: each packed microbatch runs on a group of 1, 2, 4 ... ranks."""

    max_tokens_per_rank: int
    """Most tokens of one microbatch on one rank: the memory cap."""
    min_group_size: int = 1
    """Least number of ranks that share a microbatch: a power of two."""
    max_group_size: int = 0
    """Most ranks that share a microbatch: a power of two, or all dp x cp ranks; 0 means all."""
    microbatch_multiple: int = 1
    """Divisor of the number of microbatches, as a pipeline schedule may require."""
    min_microbatches: int = 1
    """Least number of microbatches in a step, on every rank."""
    cost: CostModel | None = None
    """Constants of the cost model; None measures them on this machine before the first step."""
    balance_tolerance: float = 0.01
    """Relative distance from the lower bound at which the search for a plan ends; 0.01 is one per cent."""

    def __post_init__(self) -> None:
        faults = [
            f"{name} ({value}) must be at least 1"
            for name, value in (
                ("max_tokens_per_rank", self.max_tokens_per_rank),
                ("min_group_size", self.min_group_size),
                ("microbatch_multiple", self.microbatch_multiple),
                ("min_microbatches", self.min_microbatches),
            )
            if value < 1
        ]
        if self.min_group_size > 1 and self.min_group_size & (self.min_group_size - 1):
            below = 1 << (self.min_group_size.bit_length() - 1)
            faults.append(
                f"min_group_size ({self.min_group_size}) must be a power of two; {below} or {2 * below} is near"
            )
        if self.max_group_size < 0:
            faults.append(f"max_group_size ({self.max_group_size}) must be at least 0; 0 is all dp x cp ranks")
        if 0 < self.max_group_size < self.min_group_size:
            faults.append(
                f"max_group_size ({self.max_group_size}) must not be below min_group_size ({self.min_group_size})"
            )
        if not self.balance_tolerance >= 0:
            faults.append(f"balance_tolerance ({self.balance_tolerance}) must be at least 0; 0.01 is one per cent")
        if faults:
            raise ValueError("\n".join(f"dynamic context parallelism: {fault}" for fault in faults))


def group_sizes(ranks: int, config: DynamicContextConfig) -> tuple[int, ...]:
    """Allowed sizes of groups of `ranks` ranks in a line, ascending; each divides the next.

    The sizes are the powers of two that divide `ranks`, and `ranks` itself, within the limits of the config.
    Raises ValueError for a limit that is none of them.
    """
    if ranks < 1:
        raise ValueError(f"the number of dp x cp ranks ({ranks}) must be at least 1")
    powers = [1 << k for k in range(ranks.bit_length()) if ranks % (1 << k) == 0]
    sizes = [*powers, *([ranks] if ranks not in powers else [])]
    largest = config.max_group_size or ranks
    faults = [
        f"{name} ({value}) must be a group size of {ranks} dp x cp ranks; it may be {', '.join(map(str, sizes))}"
        for name, value in (("min_group_size", config.min_group_size), ("max_group_size", largest))
        if value not in sizes
    ]
    if faults:
        raise ValueError("\n".join(f"dynamic context parallelism: {fault}" for fault in faults))
    return tuple(size for size in sizes if config.min_group_size <= size <= largest)

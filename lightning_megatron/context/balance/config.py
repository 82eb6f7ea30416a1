"""What a user sets about dynamic context parallelism, and the group sizes that follow from it."""

from dataclasses import dataclass

from lightning_megatron.context.balance.cost import CostModel


@dataclass(frozen=True, kw_only=True)
class DynamicContextConfig:
    """How documents may be cut and packed, and where the costs come from."""

    max_tokens_per_rank: int
    """Memory cap: tokens of one microbatch on one rank."""
    min_group_size: int = 1
    """Ranks that share a microbatch, at least: a power of two."""
    max_group_size: int = 0
    """And at most: a power of two, or all dp x cp ranks; 0: all."""
    microbatch_multiple: int = 1
    """The number of microbatches is a multiple of this, as a pipeline schedule may ask."""
    min_microbatches: int = 1
    """Of a step, on every rank."""
    cost: CostModel | None = None
    # None: measured on this machine before the first step
    balance_tolerance: float = 0.01
    """The search ends at the first plan that is within this share of the lower bound."""

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
        if self.min_group_size > 1 and not _is_power_of_two(self.min_group_size):
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
    """The sizes that groups of `ranks` ranks in a line may have, ascending; each divides the next.

    They are the powers of two that divide `ranks`, and `ranks` itself, within the limits of the config.
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


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
